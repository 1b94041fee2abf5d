"""Non-autoregressive decoding: slots of every kind, predicted lengths, mask-predict."""

import itertools
import math

import pytest
import torch

from conftest import DEVICE, PATHS, claiming, close
from regard.config import Config
from regard.data.batch import BEGIN, END, PAD, Batch, padded
from regard.data.batch import BEGIN as SAID_FIRST
from regard.data.batch import END as SAID_LAST
from regard.decoding.nat_decoding import (
    NO_TOKEN,
    ctc_collapse,
    cut_at_eos,
    generate_nat,
    least_confident,
    mask_predict,
    slot_argmax,
)
from regard.mixers.base import Can
from regard.models.length_predictor import LengthPredictor
from regard.models.nat import BLANK, LengthSlots, NatTranslator, nat_translator, slots_for
from regard.models.translator import WIRINGS
from regard.training.nat_loss import nat_loss

KINDS = [
    "ctc(upsample=2)",
    "ctc",
    "length",
    "length(copy='uniform')",
    "length(copy='none', reach=5)",
    "length(copy='begin', reach=5)",
    "masked",
    "fixed(count=11)",
]
VOCAB = 12


def made(kind="ctc", dtype=torch.float64, **changes) -> NatTranslator:
    torch.manual_seed(2)
    config = Config(**{"width": 32, "heads": 4, "depth": 2, "ffn": 48, "dropout": 0.0, "max_len": 128, **changes})
    model = nat_translator(config, VOCAB, kind=kind).to(DEVICE, dtype).eval()
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


def test_the_ids_are_those_of_batches():
    assert (BLANK, SAID_FIRST, SAID_LAST) == (PAD, BEGIN, END)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_says_what_its_rows_say_alone_wherever_padding_lies(kind):
    model, batch = made(kind), talk()
    mess = scattered(batch)
    options = {"lengths": 3, "iterations": 3} if isinstance(model.slots, LengthSlots) else {}
    whole = generate_nat(model, batch.source, batch.source_valid, **options)
    assert whole == generate_nat(model, mess.source, mess.source_valid, **options)
    scores, valid = model(batch.source, batch.source_valid)
    for i, said in enumerate(whole):
        one = alone(batch, i)
        assert generate_nat(model, one.source, **options) == [said]
        close(model(one.source)[0][0], scores[i] if valid is None else scores[i][valid[i]])
        assert not {BLANK, END, NO_TOKEN} & set(said) or not kind.startswith("ctc")
    assert len({len(said) for said in whole}) > 1 or kind.startswith("fixed")


@claiming(Can.PADDING, cases=PATHS, causal=False)
def test_slots_are_mixed_by_any_mechanism_that_sees_them_all(case):
    if case.build().rate > 1:
        with pytest.raises(ValueError, match="every slot needs an answer"):
            made("ctc(upsample=2)", mixer=str(case.spec), depth=1)
        return
    model, batch = made("ctc(upsample=2)", mixer=str(case.spec), positions=case.positions or "sinusoidal", depth=1), talk(b=2)
    scores, valid = model(batch.source, batch.source_valid)
    one = alone(batch, 1)
    close(model(one.source)[0][0], scores[1][valid[1]])
    lost = nat_loss(model, batch, glance=0.5)
    lost.total.backward()
    assert lost.total.isfinite()


@pytest.mark.parametrize("cross", ["softmax", "linear", "additive(hidden=8)"])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_slots_read_the_source_in_any_way(cross, wiring):
    model, batch = made("length", mixer=["conv(kernel=3)", "fnet"], cross=cross, wiring=wiring), talk()
    whole = generate_nat(model, batch.source, batch.source_valid, lengths=2)
    assert [generate_nat(model, alone(batch, i).source, lengths=2)[0] for i in range(4)] == whole
    nat_loss(model, batch, glance=0.4).total.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_row_of_begin_tokens_is_what_any_slots_say_that_hold_them_and_their_embedding_learns():
    batch, model, other = talk(), made("length(copy='begin')"), made("length(copy='none')")
    other.load_state_dict({**other.state_dict(), **model.state_dict()})
    valid = torch.arange(5, device=DEVICE) < torch.tensor([[5], [3], [1], [4]], device=DEVICE)
    begin = torch.full_like(valid, BEGIN, dtype=torch.long)
    read, heard = (x.encode(batch.source, batch.source_valid) for x in (model, other))
    found = model.answer(read, model.slot_inputs(read, 5, valid))
    close(found[valid], other.answer(heard, other.slot_inputs(heard, 5, valid), begin, torch.ones_like(valid))[valid])
    (grad,) = torch.autograd.grad(model.slot_inputs(read, 5, valid).x.sum(), model.embed.table.weight)
    assert grad[BEGIN].any() and not grad[BEGIN + 1 :].any() and not grad[:BEGIN].any()
    assert not any(name.startswith("slots.empty") for name, _ in model.named_parameters())


def test_one_table_is_shared_by_source_slots_and_output():
    model = made()
    assert model.encoder.embed.table.weight is model.embed.table.weight is model.head.map.weight
    apart = nat_translator(Config(width=32, share=False, max_len=16), VOCAB, 9)
    assert len({id(x) for x in (apart.encoder.embed.table.weight, apart.embed.table.weight, apart.head.map.weight)}) == 3
    assert apart(torch.full((2, 16), 5))[0].shape == (2, 48, 9)  # as many slots as the longest source needs
    assert nat_translator(Config(width=32, max_len=16), VOCAB, upsample=2).slots.upsample == 2


def test_what_a_path_says_is_what_is_left_of_it():
    path = torch.randint(0, 3, (200, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    valid = torch.arange(9, device=DEVICE) < torch.arange(200, device=DEVICE)[:, None] % 10
    for real in (None, valid):
        fast = [[k for k in row if k != NO_TOKEN] for row in ctc_collapse(path, real).tolist()]
        rows = [row if real is None else row[real[i]] for i, row in enumerate(path)]
        assert fast == [collapse_slowly(row.tolist()) for row in rows]
    assert cut_at_eos(torch.tensor([[5, END, 6, END], [END, 7, 7, 7], [5, 6, 7, 8]])).tolist() == [
        [5, -1, -1, -1],
        [-1] * 4,
        [5, 6, 7, 8],
    ]


def refine_slowly(model, read, m, rounds):
    """One row, lists, a pass a round."""
    seats = model.slot_inputs(read, m)
    tokens, sure = slot_argmax(model.answer(read, seats))
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
    said = generate_nat(model, batch.source, batch.source_valid, lengths=3, iterations=rounds)
    for i, answer in enumerate(said):
        read = model.encode(alone(batch, i).source)
        tries = []
        for m, log in zip(*(x[0].tolist() for x in model.guess(read, 3)), strict=True):
            tokens, total = refine_slowly(model, read, m, rounds)
            tries.append(((log + total) / m, tokens))
        _, tokens = max(tries)
        assert answer == (tokens[: tokens.index(END)] if END in tokens else tokens)
    read = model.encode(batch.source, batch.source_valid)
    m, valid = slots_for(model.guess(read)[0][:, 0])
    assert mask_predict(model, read, model.slot_inputs(read, m, valid), 1)[0].shape == (4, m)


def test_the_least_sure_are_hidden():
    sure = torch.tensor([[-3.0, -1.0, -2.0, -0.5], [-1.0, -2.0, -9.0, -9.0]])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    assert least_confident(sure, valid, 2, 4).tolist() == [[True, False, True, False], [False, True, False, False]]
    assert least_confident(sure, None, 3, 4).sum(1).tolist() == [1, 1]


def test_lengths_are_guessed_around_the_source_and_learned():
    torch.manual_seed(1)
    head = LengthPredictor(8, reach=3, most=9).to(DEVICE)
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
    true = torch.tensor([20, 4, 0], device=DEVICE)  # out of reach: the nearest; in reach; no target at all
    head.most = None
    logs = head(x, valid)[1]
    close(head.surprise(x, valid, true), torch.stack([-logs[0, -1], -logs[1, -2], logs.new_zeros(())]))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: made("ctt"), "did you mean 'ctc'"),
        (lambda: made("length(copy='hard')"), "cannot be filled by 'hard'"),
        (lambda: made("ctc(upsample=0)"), "upsample must be an integer of at least 1"),
        (lambda: generate_nat(made("ctc"), talk().source, lengths=3), "for length and masked"),
        (lambda: generate_nat(made("masked"), talk().source, iterations=0), "at least 1"),
        (lambda: generate_nat(made("masked"), talk().source, lengths=99), "from 1 to 65 lengths"),
        (lambda: made("ctc").guess(None), "no length to guess"),
        (lambda: made("ctc").slot_inputs(None, 3), "leave out m and valid"),
        (lambda: made("length").slot_inputs(None), "must be told how many"),
        (lambda: nat_loss(made("masked"), talk(), glance=0.5), "use glance=0"),
        (lambda: nat_loss(made("ctc"), talk(), glance=2), "from 0 to 1"),
        (lambda: nat_loss(made("ctc"), talk(), smoothing=1.0), "smoothing must be in"),
        (lambda: nat_loss(made("ctc"), talk()._replace(target=None)), "END included"),
        (lambda: nat_loss(made("fixed(count=4)"), talk()), "but 4 slots"),
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
            NatTranslator(encoder(config, embed), embed, stack(config, **options), head, slots)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_padding_of_an_empty_source_is_never_said(kind):
    model, batch = made(kind), talk(b=2)
    valid = batch.source_valid.clone()
    valid[1] = False
    seen = []
    for other in (batch.source, torch.where(valid, batch.source, VOCAB - 1)):
        read = model.encode(other, valid)
        room = (3, torch.ones(2, 3, dtype=torch.bool, device=DEVICE)) if isinstance(model.slots, LengthSlots) else ()
        seen.append(model.answer(read, model.slot_inputs(read, *room)))
    close(*seen)


def test_answers_have_no_blanks_whatever_kind_of_slots_they_come_from():
    model, batch = made("fixed(count=5)"), talk()
    with torch.no_grad():
        model.head.map.weight[BLANK] *= 50
    for said in generate_nat(model, batch.source, batch.source_valid):
        assert BLANK not in said
