"""Losses: what they sum, over whom, and what padding has to say in it: nothing."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import DEVICE, close
from regard.data.batch import NO_LABEL
from regard.models.heads import NextToken, PerVector
from regard.training import losses
from regard.training.losses import Loss, by_step, cross_entropy, linear_cross_entropy, perplexity, rdrop_loss

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


W = 6


def said(bias, dtype=torch.float64):
    """A head, vectors for it, and what it should say: some of it padding, some without a label."""
    head = NextToken(W, V, bias=bias).to(DEVICE, dtype)
    for p in head.parameters():
        torch.nn.init.normal_(p)
    target, valid = drawn()[1], some_real()
    target[0, 2] = NO_LABEL
    return head, torch.randn(B, M, W, device=DEVICE, dtype=dtype).requires_grad_(), target, valid


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_the_surprise_of_a_head_is_the_loss_of_its_scores(bias, smoothing, rows, monkeypatch):
    head, x, target, valid = said(bias)
    given = (x, *head.parameters())
    whole = losses._plain_cross_entropy(head(x).flatten(0, 1), target.masked_fill(~valid, NO_LABEL).flatten(), smoothing)
    monkeypatch.setattr(losses, "SLICE", rows * V)
    for loss in (
        linear_cross_entropy(head, x, target, valid, smoothing=smoothing),
        cross_entropy(head(x), target, valid, smoothing=smoothing),
    ):
        close(loss.total, whole[0], 1e-12)
        close(loss.parts["nll"], whole[1], 1e-12)
        assert loss.over == (valid & (target != NO_LABEL)).sum()
        for mine, theirs in zip(
            *(torch.autograd.grad(3 * y, given, retain_graph=True) for y in (loss.total, whole[0])), strict=True
        ):
            close(mine, theirs, 1e-12)
        again = torch.autograd.grad(loss.total, given)  # a second pass finds what the first one found
        close(again[0] * 3, torch.autograd.grad(3 * whole[0], given, retain_graph=True)[0], 1e-12)
        assert (again[0][~valid] == 0).all()


@pytest.mark.parametrize("rows", [1, 4, 7, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_two_answers_lose_what_each_loses_and_how_far_they_are_apart(bias, smoothing, rows, monkeypatch):
    head, x, target, valid = said(bias)
    y = torch.randn_like(x).requires_grad_()
    given, real = (x, y, *head.parameters()), valid & (target != NO_LABEL)
    each = [cross_entropy(head(z), target, valid, smoothing=smoothing) for z in (x, y)]
    p, q = (head(z)[real].log_softmax(-1) for z in (x, y))
    far = sum(torch.nn.functional.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p)))
    whole = (each[0].total + each[1].total) / 2 + 0.75 * far
    monkeypatch.setattr(losses, "SLICE", rows * V)
    fused = rdrop_loss(head, x, y, target, valid, smoothing=smoothing, weight=3.0)
    head.map.register_forward_hook(lambda *_: None)  # somebody listens: all scores are made
    plain = rdrop_loss(head, x, y, target, valid, smoothing=smoothing, weight=3.0)
    for loss in (fused, plain):
        assert loss.over == real.sum()
        close(loss.total, whole, 1e-12)
        close(loss.parts["apart"], far, 1e-12)
        close(loss.parts["nll"], (each[0].parts["nll"] + each[1].parts["nll"]) / 2, 1e-12)
        for mine, theirs in zip(
            *(torch.autograd.grad(3 * z, given, retain_graph=True) for z in (loss.total, whole)), strict=True
        ):
            close(mine, theirs, 1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradients_are_those_of_small_steps(smoothing):
    head, x, target, valid = said(True)
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, valid, smoothing=smoothing).total, drawn()[0])
    given = (x, *head.parameters())
    assert torch.autograd.gradcheck(lambda *_: linear_cross_entropy(head, x, target, valid, smoothing=smoothing).total, given)


class Made(TorchDispatchMode):
    """The size of the largest tensor that is made, and how many products."""

    size = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        self.size = max(self.size, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)), 0)
        return out


def test_the_scores_of_all_tokens_never_exist_and_gradients_only_if_they_are_asked_for(monkeypatch):
    head, x, target, valid = said(False)
    monkeypatch.setattr(losses, "SLICE", 5 * V)
    with Made() as made:
        linear_cross_entropy(head, x, target, valid).total.backward()
    assert made.size == B * M * W < B * M * V and made.products == 3 * B * M / 5
    with Made() as made, torch.no_grad():
        loss = linear_cross_entropy(head, x, target, valid)
    assert made.size < B * M * V and made.products == B * M / 5 and not loss.total.requires_grad
    with Made() as made:
        rdrop_loss(head, x, x + 1, target, valid, weight=1.0).total.backward()
    assert made.size == 2 * B * M * W < 2 * B * M * V


def test_an_agreement_that_weighs_nothing_is_refused():
    head, x, target, valid = said(False)
    with pytest.raises(ValueError, match="above 0, not 0"):
        rdrop_loss(head, x, x, target, valid, weight=0.0)


def test_a_head_is_called_if_it_is_of_another_kind_or_somebody_listens():
    head, x, target, valid = said(True)
    other = PerVector(W, V).to(DEVICE, torch.float64)
    close(linear_cross_entropy(other, x, target, valid).total, cross_entropy(other(x), target, valid).total)
    heard = []
    head.map.register_forward_hook(lambda *_: heard.append(1))
    linear_cross_entropy(head, x, target, valid)
    assert heard == [1]


@pytest.mark.parametrize("frozen", ["x", "weights", "all"])
def test_what_learns_nothing_gets_no_gradient(frozen):
    head, x, target, valid = said(True)
    x.requires_grad_(frozen == "weights")
    head.requires_grad_(frozen == "x")
    loss = linear_cross_entropy(head, x, target, valid, smoothing=0.1)
    assert loss.total.requires_grad == (frozen != "all")
    if frozen != "all":
        loss.total.backward()
    assert (x.grad is not None) == (frozen == "weights") and (head.map.bias.grad is not None) == (frozen == "x")


def test_a_surprise_under_autocast_is_that_of_converted_scores():
    head, x, target, valid = said(True, torch.float32)
    given, found = (x, *head.parameters()), []
    for run in (
        lambda: linear_cross_entropy(head, x, target, valid, smoothing=0.1),
        lambda: cross_entropy(head(x), target, valid, smoothing=0.1),
    ):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = run()
        assert loss.total.dtype == torch.float32
        found.append((loss.total, *torch.autograd.grad(loss.total, given)))
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        close(mine, theirs, 2e-2)


def test_the_gradient_of_half_precision_scores_is_rounded_once():
    scores, target = drawn(torch.bfloat16)
    exact = scores.detach().double().requires_grad_()
    for x in (scores, exact):
        cross_entropy(x, target, smoothing=0.1).total.backward()
    close(scores.grad, exact.grad.bfloat16(), 5e-3)


def test_losses_compile_without_a_graph_break():
    torch._dynamo.reset()
    head, x, target, valid = said(True)
    for run in (
        lambda x: linear_cross_entropy(head, x, target, valid, smoothing=0.1).total,
        lambda x: cross_entropy(head(x), target, valid, smoothing=0.1).total,
    ):
        made = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)(x)
        close(made, run(x), 1e-12)
        close(torch.autograd.grad(made, x)[0], torch.autograd.grad(run(x), x)[0], 1e-12)


@pytest.mark.parametrize("n", [0, 1])
def test_the_surprise_at_nothing_is_nothing(n):
    head, x = said(True)[0], torch.randn(2, n, W, device=DEVICE, dtype=torch.float64).requires_grad_()
    loss = linear_cross_entropy(head, x, torch.full((2, n), NO_LABEL, device=DEVICE), smoothing=0.1)
    loss.mean.backward()
    assert loss.mean == 0 and (x.grad == 0).all() and (head.map.weight.grad == 0).all() and (head.map.bias.grad == 0).all()


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2])
def test_smoothing_is_a_share(smoothing):
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\)"):
        cross_entropy(*drawn(), smoothing=smoothing)
    head, x, target, _ = said(False)
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\)"):
        linear_cross_entropy(head, x, target, smoothing=smoothing)


def test_scores_and_target_must_belong_together():
    scores, target = drawn()
    with pytest.raises(ValueError, match=r"need a target of shape \(3, 5\), not \(3, 4\)"):
        cross_entropy(scores, target[:, :4])
    with pytest.raises(ValueError, match="need a target of shape"):
        by_step(scores, target[0])
