"""All tokens at once: slots of every kind, sums over paths, the best path, second thoughts, and what is learned by glancing."""

import itertools
import math

import pytest
import torch

from conftest import DEVICE, claiming, close
from regard.config import Config
from regard.data.batch import END, PAD, Batch, padded
from regard.decoding.parallel import NOTHING, collapsed, cut, least_sure, likeliest, refined, say_at_once
from regard.mixers.base import Can
from regard.models.lengths import LengthHead
from regard.models.parallel import BLANK, Length, Parallel, Seats, parallel, rooms
from regard.models.parallel import END as SAID_LAST
from regard.training.losses import cross_entropy
from regard.training.parallel import best_path, certain, ctc, drawn, glance_at, loss, needed, odds, same

KINDS = [
    "ctc(upsample=2)",
    "ctc",
    "length",
    "length(copy='uniform')",
    "length(copy='none', reach=5)",
    "masked",
    "fixed(count=11)",
]
VOCAB = 12


def made(kind="ctc", dtype=torch.float64, **changes) -> Parallel:
    torch.manual_seed(2)
    config = Config(**{"width": 32, "heads": 4, "depth": 2, "ffn": 48, "dropout": 0.0, "max_len": 128, **changes})
    model = parallel(config, VOCAB, kind=kind).to(DEVICE, dtype).eval()
    with torch.no_grad():  # opinions
        for name, p in model.named_parameters():
            if name.endswith("lengths.map.weight"):
                p.mul_(20)
    return model


def talk(b=4, longest=7, seed=3) -> Batch:
    dice = torch.Generator().manual_seed(seed)

    def row(n):
        return torch.randint(5, VOCAB, (n,), generator=dice).tolist()

    source, source_valid = padded([row(max(1, longest - i)) for i in range(b)])
    target, target_valid = padded([[*row(2 + (i * 3) % 5), END] for i in range(b)])
    return Batch(source, source_valid, target, target_valid).to(DEVICE)


def alone(batch: Batch, i: int) -> Batch:
    """One example by itself, without padding."""
    source = batch.source[i] if batch.source_valid is None else batch.source[i][batch.source_valid[i]]
    target = batch.target[i] if batch.target_valid is None else batch.target[i][batch.target_valid[i]]
    return Batch(source[None], None, target[None], None)


def scattered(batch: Batch) -> Batch:
    """The same examples with padding in between, and something else in it."""
    dice = torch.Generator().manual_seed(8)

    def spread(x, valid):
        wide = x.shape[1] + 3
        new = torch.randint(5, VOCAB, (len(x), wide), generator=dice)
        real = torch.zeros(len(x), wide, dtype=torch.bool)
        for i, row in enumerate(x):
            tokens = row if valid is None else row[valid[i]]
            at = torch.randperm(wide, generator=dice)[: len(tokens)].sort().values
            new[i, at], real[i, at] = tokens.cpu(), True
        return new.to(DEVICE), real.to(DEVICE)

    return Batch(*spread(batch.source, batch.source_valid), *spread(batch.target, batch.target_valid))


def collapse_slowly(path):
    return [token for token, _ in itertools.groupby(path) if token != BLANK]


def paths(logs, classes):
    """The probability of every path (t c) that says these classes, and the path."""
    t, c = logs.shape
    for path in itertools.product(range(c), repeat=t):
        if [k for k, _ in itertools.groupby(path) if k != 0] == classes:
            yield sum(logs[i, k] for i, k in enumerate(path)), path


def test_the_ids_are_those_of_batches():
    assert (BLANK, SAID_LAST) == (PAD, END)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_says_what_its_rows_say_alone_wherever_padding_lies(kind):
    model, batch = made(kind), talk()
    mess = scattered(batch)
    options = {"lengths": 3, "iterations": 3} if isinstance(model.slots, Length) else {}
    whole = say_at_once(model, batch.source, batch.source_valid, **options)
    assert whole == say_at_once(model, mess.source, mess.source_valid, **options)
    scores, valid = model(batch.source, batch.source_valid)
    for i, said in enumerate(whole):
        one = alone(batch, i)
        assert say_at_once(model, one.source, **options) == [said]
        close(model(one.source)[0][0], scores[i] if valid is None else scores[i][valid[i]])
        assert not {BLANK, END, NOTHING} & set(said) or not kind.startswith("ctc")
    assert len({len(said) for said in whole}) > 1 or kind.startswith("fixed")


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "masked"])
def test_the_loss_of_a_batch_is_the_sum_of_its_rows_with_gradients(kind):
    model, batch = made(kind), talk()
    runs = []
    for batches in ([batch], [scattered(batch)], [alone(batch, i) for i in range(4)]):
        model.zero_grad()
        lost = [loss(model, one, smoothing=0.1) for one in batches]
        torch.stack([x.total for x in lost]).sum().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        runs.append((sum(x.total for x in lost).detach(), sum(x.over for x in lost), grads))
    for total, over, grads in runs[1:]:
        close(total, runs[0][0])
        assert over == runs[0][1]
        close(grads, runs[0][2])


@claiming(Can.PADDING, causal=False)
def test_slots_are_mixed_by_any_mechanism_that_sees_them_all(case):
    if case.build().rate > 1:
        with pytest.raises(ValueError, match="every slot needs an answer"):
            made("ctc(upsample=2)", mixer=str(case.spec), depth=1)
        return
    model, batch = made("ctc(upsample=2)", mixer=str(case.spec), positions=case.positions or "sinusoidal", depth=1), talk(b=2)
    scores, valid = model(batch.source, batch.source_valid)
    one = alone(batch, 1)
    close(model(one.source)[0][0], scores[1][valid[1]])
    lost = loss(model, batch, glance=0.5)
    lost.total.backward()
    assert lost.total.isfinite()


@pytest.mark.parametrize("cross", ["softmax", "linear", "additive(hidden=8)"])
@pytest.mark.parametrize("wiring", ["last", "each", "mixed"])
def test_slots_read_the_source_in_any_way(cross, wiring):
    model, batch = made("length", mixer=["conv(kernel=3)", "fnet"], cross=cross, wiring=wiring), talk()
    whole = say_at_once(model, batch.source, batch.source_valid, lengths=2)
    assert [say_at_once(model, alone(batch, i).source, lengths=2)[0] for i in range(4)] == whole
    loss(model, batch, glance=0.4).total.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_one_table_is_shared_by_source_slots_and_output():
    model = made()
    assert model.encoder.embed.table.weight is model.embed.table.weight is model.head.map.weight
    apart = parallel(Config(width=32, share=False, max_len=16), VOCAB, 9)
    assert len({id(x) for x in (apart.encoder.embed.table.weight, apart.embed.table.weight, apart.head.map.weight)}) == 3
    assert apart(torch.full((2, 16), 5))[0].shape == (2, 48, 9)  # as many slots as the longest source needs
    assert parallel(Config(width=32, max_len=16), VOCAB, upsample=2).slots.upsample == 2


def test_what_a_path_says_is_what_is_left_of_it():
    path = torch.randint(0, 3, (200, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    valid = torch.arange(9, device=DEVICE) < torch.arange(200, device=DEVICE)[:, None] % 10
    for real in (None, valid):
        fast = [[k for k in row if k != NOTHING] for row in collapsed(path, real).tolist()]
        rows = [row if real is None else row[real[i]] for i, row in enumerate(path)]
        assert fast == [collapse_slowly(row.tolist()) for row in rows]
    assert cut(torch.tensor([[5, END, 6, END], [END, 7, 7, 7], [5, 6, 7, 8]])).tolist() == [
        [5, -1, -1, -1],
        [-1] * 4,
        [5, 6, 7, 8],
    ]


TARGETS = [[5, 6], [6, 6], [5], [], [5, 6, 5], [6, 6, 5]]


def sums():
    """Scores of 5 slots, targets with repeats and without, and slots of which some are not there."""
    scores = torch.randn(len(TARGETS), 5, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(DEVICE)
    target, _ = padded(TARGETS)
    length = torch.tensor([len(row) for row in TARGETS])
    room = torch.tensor([5, 4, 2, 3, 5, 4])
    valid = torch.arange(5) < room[:, None]
    return scores, target.to(DEVICE), length.to(DEVICE), room, valid.to(DEVICE)


def in_classes(scores, target, valid):
    columns = torch.nn.functional.pad(target, (1, 0))
    logs = odds(scores, columns)
    return torch.where(valid[..., None], logs, certain(torch.zeros_like(valid, dtype=torch.long), logs))


def test_the_loss_over_paths_is_the_sum_over_all_of_them_with_its_gradient():
    scores, target, length, room, valid = sums()
    scores.requires_grad_()
    fast = ctc(in_classes(scores, target, valid), same(target), length)
    (ours,) = torch.autograd.grad((fast * torch.arange(1, 7, device=DEVICE)).sum(), scores)
    slow = []
    for i, row in enumerate(TARGETS):
        every = scores[i, : room[i]].log_softmax(-1)
        slow.append(-torch.stack([p for p, _ in paths(every, row)]).logsumexp(0))
    close(fast, torch.stack(slow))
    (theirs,) = torch.autograd.grad((torch.stack(slow) * torch.arange(1, 7, device=DEVICE)).sum(), scores)
    close(ours, theirs)


def test_the_best_path_is_the_best_of_all():
    scores, target, length, room, valid = sums()
    columns = torch.nn.functional.pad(target, (1, 0))
    found = columns.gather(1, best_path(in_classes(scores, target, valid), same(target), length))
    for i, row in enumerate(TARGETS):
        logs = scores[i, : room[i]].log_softmax(-1)
        _, best = max(paths(logs, row))
        assert found[i, : room[i]].tolist() == list(best)
        assert (found[i, room[i] :] == BLANK).all()


def test_a_path_that_is_partly_certain_leaves_the_sum_over_the_rest():
    scores, target, length, _, valid = sums()
    classes, logs = same(target), in_classes(scores, target, valid)
    path = best_path(logs, classes, length)
    shown = torch.rand(path.shape, generator=torch.Generator().manual_seed(6)).to(DEVICE) < 0.4
    fast = ctc(torch.where(shown[..., None], certain(path, logs), logs), classes, length)
    for i in range(len(TARGETS)):
        wanted = classes[i, : length[i]].tolist()
        agree = [
            sum(logs[i, t, k] for t, k in enumerate(way) if not shown[i, t])
            for _, way in paths(logs[i], wanted)
            if all(k == path[i, t] for t, k in enumerate(way) if shown[i, t])
        ]
        close(fast[i], -torch.stack([torch.as_tensor(x, dtype=torch.float64, device=DEVICE) for x in agree]).logsumexp(0))


def test_a_target_that_needs_more_slots_than_there_are_is_left_out_and_counted():
    assert needed(same(torch.tensor([[6, 6, 5, 5], [6, 6, 6, 6]])), torch.tensor([4, 2])).tolist() == [6, 3]
    model = made("ctc(upsample=1)")
    source, _ = padded([[5, 6], [7, 8], [9, 5]])
    fits, repeats, long = [5, 6, END], [7, 7, END], [5, 6, 7, 8, END]
    target, valid = padded([fits, repeats, long])
    lost = loss(model, Batch(source, None, target, valid).to(DEVICE), glance=0.5)
    only = loss(model, Batch(source[:1], None, torch.tensor([fits])).to(DEVICE))
    assert lost.parts["unsayable"] == 2
    assert lost.over == only.over == 2
    lost.total.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    plain = loss(model, Batch(source, None, target, valid).to(DEVICE))
    close(plain.total, only.total)


@pytest.mark.parametrize("kind", ["length", "fixed(count=11)", "ctc"])
def test_who_is_shown_nothing_loses_what_it_says_and_who_is_shown_all_loses_nothing(kind, monkeypatch):
    model, batch = made(kind), talk()
    plain = loss(model, batch, smoothing=0.1)
    monkeypatch.setattr("regard.training.parallel.drawn", lambda real, count: torch.zeros_like(real))  # noqa: ARG005
    close(loss(model, batch, smoothing=0.1, glance=0.5).total, plain.total)
    monkeypatch.setattr("regard.training.parallel.drawn", lambda real, count: real)  # noqa: ARG005
    everything = loss(model, batch, glance=0.5)
    assert float(everything.parts["nll"]) == pytest.approx(0, abs=1e-9)


def test_what_is_shown_is_a_share_of_the_mistakes(monkeypatch):
    seen = []

    def watching(real, count):
        seen.append((real, count))
        return drawn(real, count)

    monkeypatch.setattr("regard.training.parallel.drawn", watching)
    model, batch = made("length"), talk()
    lost = loss(model, batch, glance=0.5)
    real, count = seen[0]
    read = model.hear(batch.source, batch.source_valid)
    wrong = (model.answer(read, model.seats(read, real.shape[1], real)).argmax(-1) != batch.target) & real
    assert count.tolist() == (0.5 * wrong.sum(1)).round().tolist()
    assert lost.over == real.sum() - count.sum()
    shown = drawn(real.repeat(2000, 1), count.repeat(2000))
    assert torch.equal(shown.sum(1), count.repeat(2000).long())
    share = shown.view(2000, *real.shape).double().mean(0)
    assert ((share - real * (count / real.sum(1))[:, None]).abs() < 0.06).all()  # every slot as likely as another
    assert [round(glance_at(i, 10), 2) for i in (0, 5, 10, 20)] == [0.5, 0.4, 0.3, 0.3]


def test_masked_learns_what_is_hidden_from_what_is_not(monkeypatch):
    model, batch = made("masked"), talk()
    picked = []
    monkeypatch.setattr("regard.training.parallel.drawn", lambda real, count: picked.append(drawn(real, count)) or picked[-1])
    lost = loss(model, batch, smoothing=0.1)
    (shown,) = picked
    hidden = batch.target_valid & ~shown
    assert hidden.any(1).all()
    read = model.hear(batch.source, batch.source_valid)
    x = torch.where(shown[..., None], model.embed.vectors(batch.target), model.slots.empty)
    scores = model.answer(read, Seats(x, batch.target_valid))
    wanted = cross_entropy(scores, batch.target, hidden, smoothing=0.1)
    assert lost.over == wanted.over
    close(lost.total - lost.parts["length"], wanted.total, 1e-6)


def refine_slowly(model, read, m, rounds):
    """One row, lists, a pass a round."""
    seats = model.seats(read, m)
    tokens, sure = likeliest(model.answer(read, seats))
    tokens, sure = tokens[0].tolist(), sure[0].tolist()
    for t in range(1, rounds):
        hidden = sorted(range(m), key=lambda i: sure[i])[: math.floor(m * (rounds - t) / rounds + 1e-9)]
        shown = torch.tensor([[i not in hidden for i in range(m)]], device=DEVICE)
        again = model.answer(read, seats, torch.tensor([tokens], device=DEVICE), shown)[0].log_softmax(-1)
        for i in hidden:
            sure[i], tokens[i] = again[i].max().item(), again[i].argmax().item()
    return tokens, sum(sure)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["masked", "length"])
@pytest.mark.parametrize("rounds", [1, 2, 4, 10])
def test_second_thoughts_and_the_best_length_are_those_of_a_slow_loop(kind, rounds):
    model, batch = made(kind), talk()
    said = say_at_once(model, batch.source, batch.source_valid, lengths=3, iterations=rounds)
    for i, answer in enumerate(said):
        read = model.hear(alone(batch, i).source)
        tries = []
        for m, log in zip(*(x[0].tolist() for x in model.guess(read, 3)), strict=True):
            tokens, total = refine_slowly(model, read, m, rounds)
            tries.append(((log + total) / m, tokens))
        _, tokens = max(tries)
        assert answer == (tokens[: tokens.index(END)] if END in tokens else tokens)
    read = model.hear(batch.source, batch.source_valid)
    m, valid = rooms(model.guess(read)[0][:, 0])
    assert refined(model, read, model.seats(read, m, valid), 1)[0].shape == (4, m)


def test_the_least_sure_are_hidden():
    sure = torch.tensor([[-3.0, -1.0, -2.0, -0.5], [-1.0, -2.0, -9.0, -9.0]])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    assert least_sure(sure, valid, 2, 4).tolist() == [[True, False, True, False], [False, True, False, False]]
    assert least_sure(sure, None, 3, 4).sum(1).tolist() == [1, 1]


def test_lengths_are_guessed_around_the_source_and_learned():
    torch.manual_seed(1)
    head = LengthHead(8, reach=3, most=9).to(DEVICE)
    x, valid = torch.randn(3, 8, 8, device=DEVICE), torch.arange(8, device=DEVICE) < torch.tensor([[8], [2], [5]], device=DEVICE)
    lengths, logs = head(x, valid)
    assert lengths[:, 3].tolist() == [8, 2, 5]
    assert [
        [n for n, p in zip(*rows, strict=True) if p > -math.inf] for rows in zip(lengths.tolist(), logs.tolist(), strict=True)
    ] == [
        [5, 6, 7, 8, 9],
        [1, 2, 3, 4, 5],
        [2, 3, 4, 5, 6, 7, 8],
    ]
    close(logs.exp().sum(1), torch.ones(3, device=DEVICE), 1e-6)
    best, how = head.best(x, valid, 7)
    assert best[2].tolist() == lengths[2][logs[2].argsort(descending=True)].tolist()
    assert best[0, 5:].tolist() == [best[0, 0]] * 2  # there are no more
    assert how[0, 5:].tolist() == [-math.inf] * 2
    true = torch.tensor([20, 5, 0], device=DEVICE)  # out of reach: the nearest; in reach; no target at all
    head.most = None
    logs = head(x, valid)[1]
    close(head.surprise(x, valid, true), torch.stack([-logs[0, -1], -logs[1, -1], logs.new_zeros(())]))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: made("ctt"), "did you mean 'ctc'"),
        (lambda: made("length(copy='hard')"), "cannot be filled by 'hard'"),
        (lambda: made("ctc(upsample=0)"), "upsample must be an integer of at least 1"),
        (lambda: say_at_once(made("ctc"), talk().source, lengths=3), "for length and masked"),
        (lambda: say_at_once(made("masked"), talk().source, iterations=0), "at least 1"),
        (lambda: say_at_once(made("masked"), talk().source, lengths=99), "from 1 to 65 lengths"),
        (lambda: made("ctc").guess(None), "no length to guess"),
        (lambda: made("ctc").seats(None, 3), "leave out m and valid"),
        (lambda: made("length").seats(None), "must be told how many"),
        (lambda: loss(made("masked"), talk(), glance=0.5), "use glance=0"),
        (lambda: loss(made("ctc"), talk(), glance=2), "from 0 to 1"),
        (lambda: loss(made("ctc"), talk(), smoothing=1.0), "smoothing must be in"),
        (lambda: loss(made("ctc"), talk()._replace(target=None)), "with an END behind them"),
        (lambda: loss(made("fixed(count=4)"), talk()), "but 4 slots"),
    ],
)
def test_bad_wishes_get_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_decoder_that_waits_or_does_not_read_is_refused():
    from regard.models.build import encoder, stack, tokens

    config = Config(width=32, max_len=16)
    embed, slots, head = tokens(config, VOCAB), made().slots, made().head
    for options, sentence in (({"causal": True, "reads": True}, "is not causal"), ({}, "must read the encoder")):
        with pytest.raises(ValueError, match=sentence):
            Parallel(encoder(config, embed), embed, stack(config, **options), head, slots)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_changes_little_and_its_gradients_are_finite(kind):
    model, batch = made(kind, torch.float32), talk()
    torch.manual_seed(1)
    whole = loss(model, batch, smoothing=0.1).mean
    torch.manual_seed(1)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        half = loss(model, batch, smoothing=0.1).mean
        glanced = loss(model, batch, glance=0.0 if kind == "masked" else 0.5).mean
    assert half.item() == pytest.approx(whole.item(), rel=0.03)
    (half + glanced).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def examples(b, dice):
    """Digits, to be said backwards."""
    rows = [(torch.randint(10, (int(torch.randint(2, 5, (1,), generator=dice)),), generator=dice) + 5).tolist() for _ in range(b)]
    return rows, Batch(*padded(rows), *padded([[*row[::-1], END] for row in rows])).to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "glance", "lr", "options"), [("ctc", 0.5, 0.008, {}), ("masked", 0.0, 0.01, {"lengths": 2, "iterations": 3})]
)
def test_digits_are_said_backwards_all_at_once(kind, glance, lr, options):
    steps, dice = 280, torch.Generator().manual_seed(1)
    model = parallel(Config(width=32, heads=4, depth=1, ffn=64, dropout=0.0, max_len=16), 15, kind=kind).to(DEVICE)
    learn = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98))
    pace = torch.optim.lr_scheduler.LambdaLR(learn, lambda i: min((i + 1) / 40, 1, 2.5 * (1 - i / steps)))
    for step in range(steps):
        learn.zero_grad()
        loss(model, examples(64, dice)[1], glance=glance_at(step, steps) if glance else 0.0).mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        learn.step()
        pace.step()
    rows, batch = examples(300, torch.Generator().manual_seed(9))
    said = say_at_once(model.eval(), batch.source, batch.source_valid, **options)
    assert sum(a == row[::-1] for a, row in zip(said, rows, strict=True)) > 0.95 * 300
