"""Scheduled sampling: all of the truth is teacher forcing, none of it is running free, and all its forms are one."""

import itertools
import math

import pytest
import torch

from conftest import DEVICE, PATHS, claiming, close
from decoders import VOCAB, batch_of, gradients, rows, small
from regard.data.batch import BEGIN
from regard.mixers.base import Can
from regard.models.embedding import Tokens
from regard.training.decoder_modes import free_running, teacher_forcing
from regard.training.losses import cross_entropy
from regard.training.mode_options import INPUT_FORMS
from regard.training.sampling_schedule import (
    SAMPLING_SCHEDULES,
    exponential_decay,
    inverse_sigmoid_decay,
    linear_decay,
    truth_probability,
)
from regard.training.scheduled_sampling import PredictedInputs, parallel_passes, token_by_token, two_pass

KINDS = {"token_by_token": token_by_token, "two_pass": two_pass, "parallel": parallel_passes}
OWN = [
    PredictedInputs(),
    PredictedInputs("sample"),
    PredictedInputs("softmax", 2.0),
    PredictedInputs("gumbel", 3.0),
    PredictedInputs("sample", top_k=2),
    PredictedInputs("softmax", top_k=3, through=True),
]
OWN += [PredictedInputs("gumbel", 0.7, through=True)]
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
every_own = pytest.mark.parametrize("own", OWN, ids=repr)


def thrown(seed=5):
    return torch.Generator(DEVICE).manual_seed(seed)


@every_kind
@every_own
@pytest.mark.parametrize("padding", ["none", "behind", "anywhere"])
def test_all_of_the_truth_is_teacher_forcing(kind, own, padding):
    model, batch = small(), batch_of(padding=padding)
    loss, forced = kind(model, batch, 1.0, inputs=own, smoothing=0.1), teacher_forcing(model, batch, smoothing=0.1)
    if kind is not token_by_token:
        assert loss.total == forced.total
    close(loss.total, forced.total, 1e-12)
    close(gradients(model, loss.total), gradients(model, forced.total), 1e-12)
    assert loss.over == forced.over


@pytest.mark.parametrize("padding", ["none", "behind", "anywhere"])
def test_none_of_it_is_running_free(padding):
    model, batch = small(), batch_of(padding=padding)
    loss, free = token_by_token(model, batch, 0.0, smoothing=0.1), free_running(model, batch, smoothing=0.1)
    assert loss.total == free.total and loss.over == free.over
    close(gradients(model, loss.total), gradients(model, free.total), 1e-12)


@every_own
@pytest.mark.parametrize("padding", ["none", "behind", "anywhere"])
@pytest.mark.parametrize("truth", [0.0, 0.5])
def test_as_many_passes_as_tokens_are_token_by_token_in_value_and_gradient(own, padding, truth):
    model, batch = small(), batch_of(padding=padding)
    a = token_by_token(model, batch, truth, inputs=own, dice=thrown()).total
    b = parallel_passes(model, batch, truth, inputs=own, dice=thrown(), passes=batch.target.shape[1]).total
    close(a, b)
    close(gradients(model, a), gradients(model, b))


@claiming(Can.STREAM | Can.PADDING, cases=PATHS, causal=True)
def test_every_mechanism_that_streams_hears_itself_alike_in_passes_and_in_steps(case):
    model, batch = small(mixer=str(case.spec), positions=case.positions or "sinusoidal", width=32, heads=4), batch_of(m=4)
    with torch.no_grad():
        a = token_by_token(model, batch, 0.3, dice=thrown()).total
        b = parallel_passes(model, batch, 0.3, dice=thrown(), passes=4).total
    close(a, b, 1e-8)


def test_passes_approach_token_by_token_from_the_front():
    """After i passes the first i steps hear what they would have heard."""
    model, batch = small(), batch_of(padding="none")
    for passes in range(1, 6):
        first = batch._replace(target=batch.target[:, :passes])
        close(parallel_passes(model, first, 0.0, passes=passes).total, free_running(model, first).total)


def test_one_pass_is_teacher_forcing_whatever_the_share():
    model, batch = small(), batch_of()
    assert parallel_passes(model, batch, 0.0, passes=1).total == teacher_forcing(model, batch).total


@pytest.mark.parametrize("form", INPUT_FORMS)
def test_two_passes_are_their_definition_one_example_at_a_time(form):
    """Nothing of the truth is left, so what the second pass hears is known."""
    model, batch = small(), batch_of(padding="behind")
    own, total = PredictedInputs(form), 0.0
    noise = own.noise(batch.target, model.embed, thrown_after_truth(batch))
    for i, (source, target) in enumerate(rows(batch)):
        source, target = torch.tensor([source], device=DEVICE), torch.tensor([target], device=DEVICE)
        first = model(source, None, torch.cat([torch.full_like(target[:, :1], BEGIN), target[:, :-1]], 1)).detach()
        s = first[0, :-1] + (0 if noise is None else noise[i, 1 : target.shape[1]])
        weights = s.softmax(-1) if form in ("softmax", "gumbel") else torch.nn.functional.one_hot(s.argmax(-1), VOCAB).double()
        begin = model.embed.table.weight[BEGIN][None]
        x = torch.cat([begin, weights @ model.embed.table.weight])[None] * model.embed.scale
        total = total + cross_entropy(model(source, None, x), target).total
    loss = two_pass(model, batch, 0.0, inputs=own, dice=thrown())
    close(loss.total, total)
    close(gradients(model, loss.total), gradients(model, total))


def thrown_after_truth(batch):
    """The dice after they have said which tokens stay true."""
    dice = thrown()
    torch.rand(batch.target.shape, device=DEVICE, generator=dice)
    return dice


def test_a_mixture_of_one_token_is_that_token():
    model, tokens = small(), torch.arange(VOCAB, device=DEVICE)[None]
    one = torch.nn.functional.one_hot(tokens, VOCAB).double()
    assert torch.equal(model.embed.mixed(one), model.embed.vectors(tokens))
    assert torch.equal(model.embed(model.embed.vectors(tokens)), model.embed(tokens))
    paired = Tokens(VOCAB, 16, segments=2).to(DEVICE, torch.float64)
    assert torch.equal(paired.mixed(one), paired.vectors(tokens))


def test_a_sharp_mean_is_the_choice_it_sharpens():
    model, batch = small(), batch_of()
    close(
        two_pass(model, batch, 0.2, inputs=PredictedInputs("softmax", 1e6), dice=thrown()).total,
        two_pass(model, batch, 0.2, dice=thrown()).total,
    )
    drawn = two_pass(model, batch, 0.2, inputs=PredictedInputs("sample"), dice=thrown()).total
    close(two_pass(model, batch, 0.2, inputs=PredictedInputs("gumbel", 1e6), dice=thrown()).total, drawn)
    close(
        two_pass(model, batch, 0.2, inputs=PredictedInputs("sample", top_k=1), dice=thrown()).total,
        two_pass(model, batch, 0.2, dice=thrown()).total,
    )


def test_through_changes_gradients_and_nothing_else():
    model, batch = small(), batch_of()
    shut, open_ = (
        two_pass(model, batch, 0.2, inputs=PredictedInputs("softmax", through=t), dice=thrown()).total for t in (False, True)
    )
    assert shut == open_
    assert (gradients(model, shut) - gradients(model, open_)).abs().max() > 1e-3


def test_gradients_through_the_first_pass_are_those_of_finite_differences():
    model, batch = small(), batch_of()

    def loss():
        return two_pass(model, batch, 0.2, inputs=PredictedInputs("gumbel", 0.8, through=True), dice=thrown()).total

    direction = [torch.randn_like(p) for p in model.parameters()]
    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss(), list(model.parameters())), direction, strict=True))
    ends = []
    for sign in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p += sign * d
            ends.append(loss())
    close(slope, (ends[0] - ends[1]) / 2e-6, 1e-5)


def test_a_drawn_token_is_drawn_by_its_probability():
    model = small()
    scores = torch.randn(1, 1, VOCAB, dtype=torch.float64, device=DEVICE)
    target = torch.zeros(1, 20_000, dtype=torch.long, device=DEVICE)
    own = PredictedInputs("sample")
    noise = own.noise(target, model.embed, thrown())
    drawn = own.vectors(model.embed, scores.expand(1, 20_000, VOCAB), noise)
    same = (drawn[0, :, None] == model.embed.vectors(torch.arange(VOCAB, device=DEVICE)[None])[0]).all(-1)
    close(same.double().mean(0), scores[0, 0].softmax(-1), 0.015)


def test_the_truth_is_kept_with_its_probability_and_the_begin_always():
    model, batch = small(), batch_of(b=400, m=20, padding="none")
    fed = []
    model.decoder.register_forward_pre_hook(lambda _, args: fed.append(args[0]))
    parallel_passes(model, batch, 0.7, passes=2, dice=thrown())
    kept = (fed[0] == fed[1]).all(-1)
    assert kept[:, 0].all()
    assert 0.69 < kept[:, 1:].double().mean() < 0.78  # and where the model was right


@every_kind
def test_the_same_dice_say_the_same(kind):
    model, batch, own = small(), batch_of(), PredictedInputs("sample")
    a, b, c = (kind(model, batch, 0.5, inputs=own, dice=thrown(seed)).total for seed in (1, 1, 2))
    assert a == b != c


def test_schedules_are_those_of_the_paper():
    assert [linear_decay(i, 10, 0.2) for i in (0, 5, 10, 99)] == pytest.approx([1, 0.6, 0.2, 0.2])
    assert exponential_decay(3, 0.9) == pytest.approx(0.729)
    for step, k in itertools.product((0, 1, 50, 400), (1, 5, 30.0)):
        assert inverse_sigmoid_decay(step, k) == pytest.approx(k / (k + math.exp(step / k)))
    assert inverse_sigmoid_decay(1e9, 2.0) == pytest.approx(0)


@pytest.mark.parametrize("name", SAMPLING_SCHEDULES)
@pytest.mark.parametrize("steps", [1, 7, 1000, 10**6])
@pytest.mark.parametrize("floor", [0.0, 0.5, 1.0])
def test_every_schedule_falls_from_about_one_to_about_its_floor(name, steps, floor):
    values = [truth_probability(name, step, steps, floor) for step in (0, steps / 4, steps / 2, steps, 3 * steps)]
    assert values == sorted(values, reverse=True) and values[0] <= 1 and values[-1] >= floor
    if steps >= 1000:
        assert values[0] > 0.98 and values[3] < floor + 0.02
    if name == "inverse_sigmoid":
        assert values[2] == pytest.approx((1 + floor) / 2)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: PredictedInputs("gumble"), "did you mean 'gumbel'"),
        (lambda: PredictedInputs("softmax", alpha=0), "alpha sharpens"),
        (lambda: PredictedInputs("argmax", alpha=2), "argmax chooses one token"),
        (lambda: PredictedInputs("sample", through=True), "sample chooses one token"),
        (lambda: PredictedInputs("argmax", top_k=3), "top_k is at least 1, for any form but argmax"),
        (lambda: PredictedInputs("softmax", top_k=0), "top_k is at least 1"),
        (lambda: parallel_passes(small(), batch_of(), 0.5, passes=0), "passes must be at least 1"),
        (lambda: two_pass(small(), batch_of(), 1.5), "share of true tokens must be in"),
        (lambda: token_by_token(small(), batch_of(), -0.5), "share of true tokens must be in"),
        (lambda: truth_probability("lineer", 1, 2), "did you mean 'linear'"),
        (lambda: truth_probability("linear", 1, 0), "steps > 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        wrong()


def test_padding_behind_a_target_leaves_no_trace_in_a_mechanism_that_takes_notes():
    found = []
    for more in (0, 3):
        model = small(mixer="routing(clusters=2, window=4)").train()
        batch = batch_of()
        target, valid = (torch.nn.functional.pad(x, (0, more)) for x in (batch.target, batch.target_valid))
        torch.manual_seed(0)
        token_by_token(model, batch._replace(target=target, target_valid=valid), 1.0)
        found.append(model.decoder.blocks[0].mixer.core.centroids.clone())
    close(*found)
