"""Losses: cross-entropy with label smoothing, fused with the output layer, and R-Drop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from regard.data.batch import NO_LABEL
from regard.mixers.attention import has_hooks, no_autocast
from regard.mixers.feature_math import upcast
from regard.models.heads import NextToken

SLICE = 1 << 25  # scores computed at once
LossAndNll = tuple[Tensor, Tensor]
LossNllKl = tuple[Tensor, Tensor, Tensor]


class Loss(NamedTuple):
    """Hold a sum and its number of terms, so that passes of different sizes accumulate to one correctly weighted update."""

    total: Tensor  # summed
    over: Tensor  # number of terms
    parts: dict[str, Tensor] = {}  # noqa: RUF012 - further sums, for the log; never changed in place

    @property
    def mean(self) -> Tensor:
        over = self.over.clamp_min(1)
        return self.total / over


def cross_entropy(scores: Tensor, target: Tensor, valid: Tensor | None = None, *, smoothing: float = 0.0) -> Loss:
    """Compute minus the log-probability of the target, summed over real tokens: scores (... v), target (...).

    With label smoothing s the target distribution is (1 - s) of the label and s of the uniform one (Szegedy et al. 2015,
    arXiv:1512.00567). A target of NO_LABEL is not counted. `parts["nll"]` is the loss without smoothing.
    """
    check_smoothing(smoothing)
    target = _real(scores, target, valid).flatten()
    scores = scores.flatten(0, -2)
    count = (target != NO_LABEL).sum()
    if torch.compiler.is_compiling():  # the compiler fuses the definition
        total, nll = _plain_cross_entropy(scores, target, smoothing)
    else:
        total, nll = _CrossEntropy.apply(scores, target, smoothing)
    return Loss(total, count, {"nll": nll.detach()})


def binary_cross_entropy(scores: Tensor, target: Tensor) -> Loss:
    """Compute minus the log-probability of labels of 0 or 1 by their scores, both (...), summed; NO_LABEL is not counted."""
    if scores.shape != target.shape:
        raise ValueError(f"scores of shape {tuple(scores.shape)} need as many labels, not {tuple(target.shape)}")
    known = target != NO_LABEL
    scores = upcast(scores)
    terms = F.binary_cross_entropy_with_logits(scores, target.clamp_min(0).to(scores.dtype), reduction="none")
    return Loss(terms.masked_fill(~known, 0).sum(), known.sum())


def linear_cross_entropy(
    head: nn.Module, x: Tensor, target: Tensor, valid: Tensor | None = None, *, smoothing: float = 0.0
) -> Loss:
    """Compute cross_entropy(head(x), target, valid) of vectors x (... w), without storing the scores of all tokens.

    The scores over a vocabulary are the largest tensor of a training step. They are computed for a slice of tokens at a time,
    together with their gradient, in the forward pass. This needs an unmodified `NextToken`; any other head computes all scores.
    """
    made = _map(head, x)
    if made is None:
        return cross_entropy(head(x), target, valid, smoothing=smoothing)
    target = _real(x, target, valid).flatten()
    x = x.flatten(0, -2)
    total, nll, _ = _token_losses(made, x, target, smoothing, 0.0)
    over = (target != NO_LABEL).sum()
    return Loss(total, over, {"nll": nll.detach()})


def rdrop_loss(
    head: nn.Module, x: Tensor, y: Tensor, target: Tensor, valid: Tensor | None = None, *, smoothing: float = 0.0, weight: float
) -> Loss:
    """Compute the R-Drop loss of two passes x, y (... w) over one batch: their mean cross-entropy, and weight / 4 of `apart`.

    Like `linear_cross_entropy`, without storing all scores. parts["apart"] is the sum of the two divergences.
    """
    if not weight > 0:
        raise ValueError(f"the weight of an agreement must be above 0, not {weight!r}")
    made = _map(head, x)
    real = _real(x, target, valid)
    over = (real != NO_LABEL).sum()
    if made is None:
        p, q = head(x), head(y)
        one = cross_entropy(p, target, valid, smoothing=smoothing)
        two = cross_entropy(q, target, valid, smoothing=smoothing)
        far = apart(p, q).masked_fill(real == NO_LABEL, 0).sum()
        total = one.total + two.total + weight / 2 * far
        nll = one.parts["nll"] + two.parts["nll"]
    else:
        pairs = torch.stack([x, y], -2).flatten(0, -2)
        truth = torch.stack([real, real], -1).flatten()
        total, nll, far = _token_losses(made, pairs, truth, smoothing, weight / 2)
    parts = {"nll": nll.detach() / 2, "apart": far.detach()}
    return Loss(total / 2, over, parts)


def _map(head: nn.Module, x: Tensor) -> nn.Linear | None:
    """Return the linear map of an unmodified `NextToken`, which can be fused with the loss; None for any other head."""
    if type(head) is not NextToken or has_hooks(head):
        return None
    made = head.map
    if torch.compiler.is_compiling() or type(made) is not nn.Linear:
        return None
    if has_hooks(made):
        return None
    same = _product(made.weight) == _product(x)
    return made if same else None


def _token_losses(made: nn.Linear, x: Tensor, target: Tensor, smoothing: float, kl_weight: float) -> LossNllKl:
    check_smoothing(smoothing)
    given: tuple[Tensor | None, ...] = (x, made.weight, made.bias)
    if not torch.is_grad_enabled():  # needs_input_grad of a Function ignores it
        given = tuple(None if y is None else y.detach() for y in given)
    return _LinearCrossEntropy.apply(*given, target, smoothing, kl_weight)


def by_step(scores: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Compute minus the log-probability of every target (b m), 0 where there is none: the terms of `cross_entropy`."""
    target = _real(scores, target, valid)
    logs = upcast(scores).log_softmax(-1).flatten(0, -2)
    terms = F.nll_loss(logs, target.flatten(), ignore_index=NO_LABEL, reduction="none")
    return terms.view_as(target)


def apart(p: Tensor, q: Tensor) -> Tensor:
    """Compute KL(p || q) + KL(q || p) = sum (p - q) (log p - log q) of two distributions by their scores (... v): (...)."""
    log_p = upcast(p).log_softmax(-1)
    log_q = upcast(q).log_softmax(-1)
    return between(log_p, log_q)


def between(p: Tensor, q: Tensor) -> Tensor:
    """Compute the same divergence from log-probabilities (... v)."""
    difference = p.exp() - q.exp()
    return (difference * (p - q)).sum(-1)


def perplexity(loss: Loss) -> Tensor:
    nll = loss.parts.get("nll", loss.total)
    over = loss.over.clamp_min(1)
    return torch.exp(nll / over)


def _real(scores: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """Return the target with NO_LABEL at padding."""
    if scores.shape[:-1] != target.shape:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} need a target of shape {tuple(scores.shape[:-1])}, not {tuple(target.shape)}"
        )
    if valid is None:
        return target
    return target.masked_fill(~valid, NO_LABEL)


def check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), not {smoothing!r}")


def _plain_cross_entropy(scores: Tensor, target: Tensor, smoothing: float) -> LossAndNll:
    """Compute total and nll of scores (t v), target (t) by their definition."""
    logs = upcast(scores).log_softmax(-1)
    nll = F.nll_loss(logs, target, ignore_index=NO_LABEL, reduction="sum")
    if not smoothing:
        return nll, nll
    padding = target == NO_LABEL
    uniform = logs.mean(-1).masked_fill(padding, 0).sum()
    return (1 - smoothing) * nll - smoothing * uniform, nll


def _slices(tokens: int, vocab: int, each: int = 1) -> Iterator[slice]:
    """Iterate over slices of tokens with at most SLICE scores; their sizes are multiples of `each`."""
    fitting = SLICE // max(1, vocab)
    rows = max(each, fitting // each * each)
    return (slice(i, i + rows) for i in range(0, tokens, rows))


class _CrossEntropy(torch.autograd.Function):
    """Compute cross-entropy without a temporary of the size of the scores but their gradient.

    The gradient is softmax(scores) - (1 - s) [w = target] - s / v, recomputed from the scores.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, smoothing: float) -> LossAndNll:
        real = target != NO_LABEL
        acc = _sum_dtype(scores)
        at = target.where(real, 0)[:, None]
        own = scores.new_empty(len(target), 1, dtype=acc)
        mean = torch.empty_like(own)
        for part in _slices(*scores.shape):
            logs = scores[part].log_softmax(-1, dtype=acc)
            torch.gather(logs, 1, at[part], out=own[part])
            if smoothing:
                torch.mean(logs, -1, keepdim=True, out=mean[part])
        ctx.save_for_backward(scores, at, real)
        ctx.smoothing = smoothing
        return _loss_and_nll(ctx, own, mean, real, smoothing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        scores, at, real = ctx.saved_tensors
        s = ctx.smoothing
        grad = torch.empty_like(scores)
        vocab = max(1, scores.shape[1])
        weight = (up * real)[:, None]
        truth = weight * (s - 1)
        uniform = weight * (-s / vocab)
        for part in _slices(*scores.shape):
            p = scores[part].softmax(-1, dtype=up.dtype)
            into = grad[part] if grad.dtype == p.dtype else p  # rounded once, after the sum
            torch.addcmul(uniform[part], p, weight[part], out=into)
            into.scatter_add_(1, at[part], truth[part])
            if into is p:
                grad[part] = p
        return grad, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Compute cross-entropy of the scores x W^T + b, (t w) -> (t v), and its gradients, a slice of tokens at a time.

    Smoothing subtracts s / v from the gradient of every score. It is subtracted from the sums over the vocabulary instead:
    mean(scores) = x mean(W) + mean(b), s mean(W) from the gradient of x, s / v sum(x) from every row of W's.
    kl_weight > 0: adjacent tokens are pairs of two passes, and kl_weight times their divergence is added to the loss.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, s: float, kl_weight: float
    ) -> LossNllKl:
        real = target != NO_LABEL
        acc = _sum_dtype(x)
        dtype = _product(x)
        at = target.where(real, 0)[:, None]
        rest = real[:, None]
        b = None if bias is None else bias.to(dtype)
        with no_autocast(x):  # converted here, once, as autocast would
            own, truth, far, grads = _in_slices(ctx, x.to(dtype), weight.to(dtype), b, at, rest, s, kl_weight)
            mean = own
            if s:
                mean_w = weight.to(acc).mean(0)
                mean_b = 0 if bias is None else bias.to(acc).mean()
                mean_score = x.to(acc) @ mean_w + mean_b
                mean = mean_score[:, None] + own - truth  # of the logs: lse = truth - own
            if s and any(ctx.needs_input_grad[:3]):
                share_w = real.to(acc) @ x.to(acc) / len(weight)
                share_b = real.sum(dtype=acc) / len(weight)
                shares = zip(grads, (mean_w, share_w, share_b), strict=True)
                grads = tuple(None if grad is None else grad.sub_(s * y) for grad, y in shares)
        ctx.save_for_backward(*grads, rest)
        ctx.types = x.dtype, weight.dtype, weight.dtype
        total, nll = _loss_and_nll(ctx, own, mean, real, s)
        far = far.where(real[::2], 0).sum() if kl_weight else nll.new_zeros(())
        ctx.mark_non_differentiable(nll, far)
        return total + kl_weight * far, nll, far

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *grads, rest = ctx.saved_tensors
        parts = zip(grads, (up * rest, up, up), ctx.types, strict=True)
        found = [None if grad is None else (grad * one).to(dtype) for grad, one, dtype in parts]
        return *found, None, None, None


def _in_slices(
    ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, at: Tensor, real: Tensor, s: float, kl_weight: float
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Compute log-probability and score of each target, divergences of pairs, and gradients of x, w, b without smoothing."""
    acc = _sum_dtype(x)
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    tokens = len(x)
    own = x.new_empty(tokens, 1, dtype=acc)
    truth = x.new_empty(tokens, 1)
    dx = torch.empty_like(x) if needs_x else None
    dw = torch.zeros_like(w, dtype=acc) if needs_w else None
    db = torch.zeros_like(b, dtype=acc) if b is not None and needs_b else None
    far = x.new_empty(tokens // 2, dtype=acc)
    masked = x * real
    less = x.new_full((tokens, 1), s - 1, dtype=acc)
    for part in _slices(tokens, len(w), 2 if kl_weight else 1):
        scores = F.linear(x[part], w, b)
        logs = scores.log_softmax(-1, dtype=acc)
        torch.gather(scores, 1, at[part], out=truth[part])
        torch.gather(logs, 1, at[part], out=own[part])
        pull = None
        if kl_weight:
            pairs = slice(part.start // 2, part.stop // 2)
            pull = _kl_grad(logs, far[pairs])
        if dx is None and dw is None and db is None:
            continue
        p = logs.exp_().scatter_add_(1, at[part], less[part])  # overwrites the logs
        if pull is not None:
            p.add_(pull, alpha=kl_weight)
        p = p.to(x.dtype)
        if dx is not None:
            torch.mm(p, w, out=dx[part])
        if dw is not None and dw.dtype == p.dtype:
            dw.addmm_(p.mT, masked[part])
        elif dw is not None:  # summed in float32 or better
            dw.add_(p.mT @ masked[part])
        if db is not None:
            counted = real[part, 0].to(p.dtype)
            db += counted @ p
    return own, truth, far, (dx, dw, db)


def _kl_grad(logs: Tensor, far: Tensor) -> Tensor:
    """Write the divergences of pairs with logs (2k v) into `far` (k), and return their gradient (2k v).

    Of sum (p - q) (log p - log q) by the scores of p: p (d - sum p d) + p - q, with d = log p - log q.
    """
    pairs = logs.unflatten(0, (-1, 2))
    p = pairs.exp()
    d = pairs[:, 0] - pairs[:, 1]
    torch.sum((p[:, 0] - p[:, 1]) * d, -1, out=far)
    signed = torch.stack([d, -d], 1)
    mean = (p * signed).sum(-1, keepdim=True)
    return (p * (signed - mean) + p - p.flip(1)).flatten(0, 1)


def _loss_and_nll(ctx: Any, own: Tensor, mean: Tensor, real: Tensor, s: float) -> LossAndNll:
    """Sum the loss and nll, from the logs (t 1) of the target and their mean over the vocabulary."""
    nll = -own[:, 0].where(real, 0).sum()
    ctx.mark_non_differentiable(nll)
    if not s:
        return nll.clone(), nll
    uniform = mean[:, 0].where(real, 0).sum()
    return (1 - s) * nll - s * uniform, nll


def _sum_dtype(x: Tensor) -> torch.dtype:
    """Return the type for sums: float32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def _product(x: Tensor) -> torch.dtype:
    """Return the type of a matrix product of x: its own, or that of autocast."""
    kind = x.device.type if x.device.type != "meta" else "cpu"
    cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else x.dtype
