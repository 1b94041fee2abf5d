"""Losses of non-autoregressive decoders: CTC sums over paths, the best path, glancing, masks."""

import itertools

import pytest
import torch

from conftest import DEVICE, close
from regard.config import Config
from regard.data.batch import END, Batch, padded
from regard.decoding.nat_decoding import generate_nat
from regard.models.nat import BLANK, SlotInputs, nat_translator
from regard.training.ctc import best_path, certain, ctc, needed, odds, same
from regard.training.losses import cross_entropy
from regard.training.nat_loss import glancing, nat_loss, random_slots
from test_nat import KINDS, alone, made, scattered, talk

TARGETS = [[5, 6], [6, 6], [5], [], [5, 6, 5], [6, 6, 5]]


def paths(logs, classes):
    """The probability of every path (t c) that says these classes, and the path."""
    t, c = logs.shape
    for path in itertools.product(range(c), repeat=t):
        if [k for k, _ in itertools.groupby(path) if k != 0] == classes:
            yield sum(logs[i, k] for i, k in enumerate(path)), path


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "masked"])
def test_the_loss_of_a_batch_is_the_sum_of_its_rows_with_gradients(kind):
    model, batch = made(kind), talk()
    runs = []
    for batches in ([batch], [scattered(batch)], [alone(batch, i) for i in range(4)]):
        model.zero_grad()
        lost = [nat_loss(model, one, smoothing=0.1) for one in batches]
        torch.stack([x.total for x in lost]).sum().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        runs.append((sum(x.total for x in lost).detach(), sum(x.over for x in lost), grads))
    for total, over, grads in runs[1:]:
        close(total, runs[0][0])
        assert over == runs[0][1]
        close(grads, runs[0][2])


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
    logs = odds(scores.log_softmax(-1), columns)
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


def opinions(t=5, dtype=torch.float64):
    """Logs that sum to anything, and targets that can and cannot be said in t slots."""
    logs = torch.randn(len(TARGETS), t, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    target, _ = padded(TARGETS)
    return logs.to(DEVICE, dtype), same(target).to(DEVICE), torch.tensor([len(row) for row in TARGETS]).to(DEVICE)


@pytest.mark.parametrize("t", [1, 2, 3, 5])
def test_the_gradient_over_paths_is_that_of_their_sum_whatever_probabilities_sum_to(t):
    logs, classes, length = opinions(t)
    logs.requires_grad_()
    weight = torch.arange(1, 7, device=DEVICE)
    lost = ctc(logs, classes, length)
    (ours,) = torch.autograd.grad((lost * weight).sum(), logs)
    for i, row in enumerate(classes):
        ways = [p for p, _ in paths(logs[i], row[: length[i]].tolist())]
        if not ways:  # it cannot be said
            assert lost[i] == torch.inf and not ours[i].any()
            continue
        slow = -torch.stack(ways).logsumexp(0)
        close(lost[i], slow)
        close(ours[i], torch.autograd.grad(slow * weight[i], logs)[0][i])
    sayable = needed(classes, length) <= t
    assert torch.equal(sayable, lost.isfinite())
    assert torch.autograd.gradcheck(lambda x: ctc(x, classes[sayable], length[sayable]), logs[sayable].detach().requires_grad_())


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_the_loss_over_many_paths_is_torchs_with_its_gradient_by_scores(dtype, near):
    dice = torch.Generator().manual_seed(4)
    length = torch.tensor([0, 1, 7, 12, 12, 5])
    target = torch.randint(5, 9, (6, 12), generator=dice).to(DEVICE)  # few tokens, so many stand twice in a row
    scores = torch.randn(6, 40, 30, generator=dice, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()

    def ours():
        return ctc(odds(scores.log_softmax(-1), torch.nn.functional.pad(target, (1, 0))), same(target), length.to(DEVICE))

    logs = scores.log_softmax(-1).transpose(0, 1)
    theirs = torch.nn.functional.ctc_loss(logs, target, torch.full((6,), 40), length, reduction="none")
    lost = ours()
    close(lost, theirs, near)
    close(*(torch.autograd.grad(x.sum(), scores)[0] for x in (lost, theirs)), near)
    with torch.no_grad():
        assert torch.equal(ours(), lost)


def test_what_can_never_be_said_has_no_part_in_a_path_and_no_slots_say_nothing():
    logs, classes, length = opinions(dtype=torch.float32)
    logs[:, 2, 1:], logs[0, :, 0] = -torch.inf, -torch.inf  # all blank, and none blank: no path is left for the first row
    logs.requires_grad_()
    lost = ctc(logs, classes, length)
    assert torch.equal(lost.isfinite(), torch.tensor([False, True, True, True, True, True], device=DEVICE))
    (grad,) = torch.autograd.grad(lost[1:].sum(), logs)
    assert grad.isfinite().all() and not grad[logs == -torch.inf].any()
    close(grad[1:].sum(-1), torch.full_like(grad[1:, :, 0], -1), 1e-5)  # every slot of a path says something
    nothing = logs[:, :0]
    assert torch.equal(ctc(nothing, classes, length), torch.where(length > 0, torch.inf, 0.0))
    assert best_path(nothing, classes, length).shape == (6, 0)


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
    lost = nat_loss(model, Batch(source, None, target, valid).to(DEVICE), glance=0.5)
    only = nat_loss(model, Batch(source[:1], None, torch.tensor([fits])).to(DEVICE))
    assert lost.parts["unsayable"] == 2
    assert lost.over == only.over == 2
    lost.total.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    plain = nat_loss(model, Batch(source, None, target, valid).to(DEVICE))
    close(plain.total, only.total)


@pytest.mark.parametrize("kind", ["length", "fixed(count=11)", "ctc"])
def test_who_is_shown_nothing_loses_what_it_says_and_who_is_shown_all_loses_nothing(kind, monkeypatch):
    model, batch = made(kind), talk()
    plain = nat_loss(model, batch, smoothing=0.1)
    monkeypatch.setattr("regard.training.nat_loss.random_slots", lambda real, count: torch.zeros_like(real))  # noqa: ARG005
    close(nat_loss(model, batch, smoothing=0.1, glance=0.5).total, plain.total)
    monkeypatch.setattr("regard.training.nat_loss.random_slots", lambda real, count: real)  # noqa: ARG005
    everything = nat_loss(model, batch, glance=0.5)
    assert float(everything.parts["nll"]) == pytest.approx(0, abs=1e-9)


def test_what_is_shown_is_a_share_of_the_mistakes(monkeypatch):
    seen = []

    def watching(real, count):
        seen.append((real, count))
        return random_slots(real, count)

    monkeypatch.setattr("regard.training.nat_loss.random_slots", watching)
    model, batch = made("length"), talk()
    lost = nat_loss(model, batch, glance=0.5)
    real, count = seen[0]
    read = model.encode(batch.source, batch.source_valid)
    wrong = (model.answer(read, model.slot_inputs(read, real.shape[1], real)).argmax(-1) != batch.target) & real
    assert count.tolist() == (0.5 * wrong.sum(1)).round().tolist()
    assert lost.over == real.sum() - count.sum()
    shown = random_slots(real.repeat(2000, 1), count.repeat(2000))
    assert torch.equal(shown.sum(1), count.repeat(2000).long())
    share = shown.view(2000, *real.shape).double().mean(0)
    assert ((share - real * (count / real.sum(1))[:, None]).abs() < 0.06).all()  # every slot as likely as another
    assert [round(glancing(i, 10), 2) for i in (0, 5, 10, 20)] == [0.5, 0.4, 0.3, 0.3]


@pytest.mark.parametrize("kind", ["length", "fixed(count=11)", "ctc"])
def test_a_share_that_lies_on_the_device_is_that_share(kind):
    for step in (-1, 0, 5, 10, 20):
        share = glancing(torch.tensor(step, device=DEVICE), 10)
        assert share.shape == () and share.device.type == DEVICE.type
        assert share.item() == pytest.approx(glancing(step, 10), abs=1e-6)
    model, batch, found = made(kind), talk(), []
    for share in (0.5, torch.tensor(0.5, device=DEVICE)):
        torch.manual_seed(1)
        found.append(nat_loss(model, batch, glance=share))
    assert found[0].over == found[1].over and found[0].total == found[1].total
    close(nat_loss(model, batch, glance=torch.zeros((), device=DEVICE)).total, nat_loss(model, batch).total)
    with pytest.raises(ValueError, match="from 0 to 1, not"):
        nat_loss(model, batch, glance=torch.full((4,), 0.5, device=DEVICE))
    with pytest.raises(ValueError, match="by chance already"):
        nat_loss(made("masked"), batch, glance=torch.zeros((), device=DEVICE))


def test_masked_learns_what_is_hidden_from_what_is_not(monkeypatch):
    model, batch = made("masked"), talk()
    picked = []
    monkeypatch.setattr(
        "regard.training.nat_loss.random_slots", lambda real, count: picked.append(random_slots(real, count)) or picked[-1]
    )
    lost = nat_loss(model, batch, smoothing=0.1)
    (shown,) = picked
    hidden = batch.target_valid & ~shown
    assert hidden.any(1).all()
    read = model.encode(batch.source, batch.source_valid)
    x = torch.where(shown[..., None], model.embed.vectors(batch.target), model.slots.empty)
    scores = model.answer(read, SlotInputs(x, batch.target_valid))
    wanted = cross_entropy(scores, batch.target, hidden, smoothing=0.1)
    assert lost.over == wanted.over
    close(lost.total - lost.parts["length"], wanted.total, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_changes_little_and_its_gradients_are_finite(kind):
    model, batch = made(kind, torch.float32), talk()
    torch.manual_seed(1)
    whole = nat_loss(model, batch, smoothing=0.1).mean
    torch.manual_seed(1)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        half = nat_loss(model, batch, smoothing=0.1).mean
        glanced = nat_loss(model, batch, glance=0.0 if kind == "masked" else 0.5).mean
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
    steps, dice = 180, torch.Generator().manual_seed(1)
    model = nat_translator(Config(width=32, heads=4, depth=1, ffn=64, dropout=0.0, max_len=16), 15, kind=kind).to(DEVICE)
    learn = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98))
    pace = torch.optim.lr_scheduler.LambdaLR(learn, lambda i: min((i + 1) / 40, 1, 2.5 * (1 - i / steps)))
    for step in range(steps):
        learn.zero_grad()
        nat_loss(model, examples(64, dice)[1], glance=glancing(step, steps) if glance else 0.0).mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        learn.step()
        pace.step()
    rows, batch = examples(300, torch.Generator().manual_seed(9))
    said = generate_nat(model.eval(), batch.source, batch.source_valid, **options)
    assert sum(a == row[::-1] for a, row in zip(said, rows, strict=True)) > 0.95 * 300


@pytest.mark.parametrize("kind", ["ctc", "length", "fixed(count=11)"])
def test_glancing_teaches_every_weight_under_autocast_too(kind):
    model = made(kind, torch.float32).train()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        lost = nat_loss(model, talk(), glance=0.5)
    lost.total.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("kind", [*KINDS, "ctc(upsample=1)"])
def test_two_answers_that_agree_are_one_answer(kind):
    model, batch = made(kind), talk()
    found = []
    for agree in (0.0, 3.0):
        torch.manual_seed(1)  # what is shown is shown to both
        found.append(nat_loss(model, batch, smoothing=0.1, glance=0.0 if kind == "masked" else 0.5, rdrop=agree))
    assert found[1].parts.pop("apart") == 0 and found[0].over == found[1].over
    close(found[1].total, found[0].total)
    for name, x in found[0].parts.items():
        close(found[1].parts[name].double(), x.double())


@pytest.mark.parametrize("kind", ["ctc", "length", "fixed(count=11)"])
def test_two_answers_that_differ_pay_for_it_where_they_are_asked(kind):
    model, batch = made(kind, dropout=0.3).train(), talk()
    torch.manual_seed(5)
    held = nat_loss(model, batch, smoothing=0.1, rdrop=3.0)
    torch.manual_seed(5)
    loose = nat_loss(
        model, Batch(*(torch.cat([x, x]) for x in batch[:4])), smoothing=0.1
    )  # the same dropout: the same two answers
    torch.manual_seed(5)
    read = model.encode(*(torch.cat([x, x]) for x in batch[:2]))
    valid = torch.cat([batch.target_valid] * 2)
    seats = model.slot_inputs(read, valid.shape[1], valid) if kind == "length" else model.slot_inputs(read)
    p, q = model.answer(read, seats).softmax(-1).chunk(2)
    asked = seats.valid[:4] if seats.valid is not None else torch.arange(11, device=DEVICE) < batch.target_valid.sum(1)[:, None]
    apart = ((p * (p / q).log()).sum(-1) + (q * (q / p).log()).sum(-1))[asked].sum()
    close(held.parts["apart"], apart.detach())
    close(held.total, loose.total / 2 + 3 / 4 * apart)
    assert 2 * held.over == loose.over
    grads = [torch.autograd.grad(x, model.head.map.weight, retain_graph=True)[0] for x in (held.total, loose.total, apart)]
    close(grads[0], grads[1] / 2 + 3 / 4 * grads[2])
    with pytest.raises(ValueError, match="rdrop must not be below 0, but it is -1"):
        nat_loss(model, batch, rdrop=-1)
