"""Losses: what they sum, over whom, and what padding has to say in it: nothing."""

import math

import pytest
import torch

from conftest import DEVICE, close
from regard.data.batch import NO_LABEL
from regard.training.losses import Loss, by_step, cross_entropy, perplexity

B, M, V = 3, 5, 7


def drawn(dtype=torch.float64):
    scores = torch.randn(B, M, V, dtype=torch.float64).mul(3).to(DEVICE, dtype).requires_grad_()
    return scores, torch.randint(V, (B, M), device=DEVICE)


def some_real():
    valid = torch.rand(B, M, device=DEVICE) < 0.6
    valid[:, 2] = True
    return valid


def slowly(scores, target, valid, smoothing):
    """The definition, one number at a time: -sum over w of q(w) log p(w), q = (1 - s) [w = truth] + s / v."""
    total, count = 0.0, 0
    for row, truths, real in zip(scores.tolist(), target.tolist(), valid.tolist(), strict=True):
        for s, truth, is_real in zip(row, truths, real, strict=True):
            if not is_real or truth == NO_LABEL:
                continue
            norm = math.log(sum(math.exp(x) for x in s))
            wanted = [(1 - smoothing) * (w == truth) + smoothing / V for w in range(V)]
            total -= sum(q * (x - norm) for q, x in zip(wanted, s, strict=True))
            count += 1
    return total, count


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_it_is_the_formula_over_real_tokens_with_a_label(smoothing):
    (scores, target), valid = drawn(), some_real()
    target[0, 2] = NO_LABEL
    loss = cross_entropy(scores, target, valid, smoothing=smoothing)
    total, count = slowly(scores, target, valid, smoothing)
    assert loss.total.dtype == torch.float64 and int(loss.over) == count
    close(loss.total.item(), total, 1e-12)
    close(loss.mean.item(), total / count, 1e-12)
    close(loss.parts["nll"].item(), slowly(scores, target, valid, 0.0)[0], 1e-12)
    assert not loss.parts["nll"].requires_grad


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_its_gradient_is_the_probability_less_what_is_wanted(smoothing):
    (scores, target), valid = drawn(), some_real()
    cross_entropy(scores, target, valid, smoothing=smoothing).total.backward()
    wanted = (1 - smoothing) * torch.nn.functional.one_hot(target, V).double() + smoothing / V
    close(scores.grad, (scores.detach().softmax(-1) - wanted) * valid[..., None], 1e-12)


def test_torch_smooths_alike():
    scores, target = drawn()
    theirs = torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum", label_smoothing=0.2)
    close(cross_entropy(scores, target, smoothing=0.2).total, theirs, 1e-12)


def test_what_is_said_at_padding_changes_nothing():
    (scores, target), valid = drawn(), some_real()
    other = torch.where(valid[..., None], scores, torch.randn_like(scores) * 1e4)
    elsewhere = torch.where(valid, target, torch.randint_like(target, V))
    for smoothing in (0.0, 0.1):
        here, there = (cross_entropy(s, t, valid, smoothing=smoothing) for s, t in ((scores, target), (other, elsewhere)))
        close(here.total, there.total, 1e-12)
        assert here.over == there.over


def test_the_sum_over_steps_is_the_sum():
    (scores, target), valid = drawn(), some_real()
    target[1, 2] = NO_LABEL
    steps = by_step(scores, target, valid)
    assert steps.shape == (B, M)
    assert (steps[~valid] == 0).all() and steps[1, 2] == 0
    close(steps.sum(), cross_entropy(scores, target, valid).total, 1e-12)


def test_a_label_per_sequence_works_as_well():
    scores, target = torch.randn(4, V, device=DEVICE, dtype=torch.float64), torch.tensor([1, NO_LABEL, 3, 0], device=DEVICE)
    loss = cross_entropy(scores, target)
    assert loss.over == 3
    close(loss.total, by_step(scores, target).sum(), 1e-12)


def test_nothing_to_learn_is_a_loss_of_zero_and_not_of_nan():
    scores, target = drawn()
    loss = cross_entropy(scores, torch.full_like(target, NO_LABEL), smoothing=0.1)
    loss.mean.backward()
    assert loss.mean == 0 and loss.over == 0 and (scores.grad == 0).all()


def test_half_precision_is_summed_in_float32():
    scores, target = drawn(torch.bfloat16)
    loss = cross_entropy(scores, target, smoothing=0.1)
    assert loss.total.dtype == by_step(scores, target).dtype == torch.float32
    close(loss.total, cross_entropy(scores.double(), target, smoothing=0.1).total.float(), 1e-5)


def test_perplexity_is_of_the_truth_whatever_the_smoothing():
    scores, target = torch.zeros(B, M, V, device=DEVICE), torch.zeros(B, M, dtype=torch.long, device=DEVICE)
    assert perplexity(cross_entropy(scores, target, smoothing=0.3)).item() == pytest.approx(V)
    assert perplexity(Loss(torch.tensor(0.0), torch.tensor(0))).item() == 1


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2])
def test_smoothing_is_a_share(smoothing):
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\)"):
        cross_entropy(*drawn(), smoothing=smoothing)


def test_scores_and_target_must_belong_together():
    scores, target = drawn()
    with pytest.raises(ValueError, match=r"need a target of shape \(3, 5\), not \(3, 4\)"):
        cross_entropy(scores, target[:, :4])
    with pytest.raises(ValueError, match="need a target of shape"):
        by_step(scores, target[0])
