"""What a model loses: the surprise at what it should have said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from regard.data.batch import NO_LABEL
from regard.mixers.attention import precise, watched
from regard.mixers.features import wide
from regard.models.heads import NextToken

SLICE = 1 << 25  # scores that are looked at together
Two = tuple[Tensor, Tensor]


class Loss(NamedTuple):
    """A sum, and over how many things: passes of different sizes add up to one update without weighing the small ones more."""

    total: Tensor  # summed
    over: Tensor  # how many it is summed over
    parts: dict[str, Tensor] = {}  # noqa: RUF012 - for the log: sums as well; never changed

    @property
    def mean(self) -> Tensor:
        return self.total / self.over.clamp_min(1)


def cross_entropy(scores: Tensor, target: Tensor, valid: Tensor | None = None, *, smoothing: float = 0.0) -> Loss:
    """Minus the log-probability of the target, summed over real ones: scores (... v), target (...).

    With smoothing s the target is (1 - s) of the truth and s of a uniform choice among all v (Szegedy et al. 2015,
    arXiv:1512.00567). A target of NO_LABEL is not counted. `parts["nll"]` is the loss without smoothing.
    """
    _share(smoothing)
    target, scores = _real(scores, target, valid).flatten(), scores.flatten(0, -2)
    count = (target != NO_LABEL).sum()
    if torch.compiler.is_compiling():  # it fuses the definition by itself
        total, nll = _plainly(scores, target, smoothing)
    else:
        total, nll = _Surprise.apply(scores, target, smoothing)
    return Loss(total, count, {"nll": nll.detach()})


def surprise(head: nn.Module, x: Tensor, target: Tensor, valid: Tensor | None = None, *, smoothing: float = 0.0) -> Loss:
    """cross_entropy(head(x), target, valid) of vectors x (... w), without ever holding the scores of all of them.

    A vocabulary is wide: its scores are the largest tensor of a training step by far. They are made for some tokens at a time,
    and their gradient at once, in the forward pass, so that they are walked over while they are near and then forgotten.
    That is for a `NextToken` as it was built; any other head is asked for all of its scores.
    """
    made = head.map if type(head) is NextToken and not watched(head) else None
    if torch.compiler.is_compiling() or type(made) is not nn.Linear or watched(made) or _product(made.weight) != _product(x):
        return cross_entropy(head(x), target, valid, smoothing=smoothing)
    assert made is not None
    _share(smoothing)
    target, x = _real(x, target, valid).flatten(), x.flatten(0, -2)
    given: tuple[Tensor | None, ...] = (x, made.weight, made.bias)
    if not torch.is_grad_enabled():  # which a Function is not told
        given = tuple(None if y is None else y.detach() for y in given)
    total, nll = _Said.apply(*given, target, smoothing)
    return Loss(total, (target != NO_LABEL).sum(), {"nll": nll.detach()})


def by_step(scores: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Minus the log-probability at every step, shaped as the target (b m), 0 where there is none: what `cross_entropy` sums."""
    target = _real(scores, target, valid)
    logs = wide(scores).log_softmax(-1).flatten(0, -2)
    return F.nll_loss(logs, target.flatten(), ignore_index=NO_LABEL, reduction="none").view_as(target)


def apart(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) + KL(q || p) = sum (p - q) (log p - log q) of two choices by their scores (... v), one for each (...)."""
    p, q = wide(p).log_softmax(-1), wide(q).log_softmax(-1)
    return ((p.exp() - q.exp()) * (p - q)).sum(-1)


def perplexity(loss: Loss) -> Tensor:
    return torch.exp(loss.parts.get("nll", loss.total) / loss.over.clamp_min(1))


def _real(scores: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """The target, with NO_LABEL at padding."""
    if scores.shape[:-1] != target.shape:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} need a target of shape {tuple(scores.shape[:-1])}, not {tuple(target.shape)}"
        )
    return target if valid is None else target.masked_fill(~valid, NO_LABEL)


def _share(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), not {smoothing!r}")


def _plainly(scores: Tensor, target: Tensor, smoothing: float) -> Two:
    """The definition: total and nll of scores (t v), target (t)."""
    logs = wide(scores).log_softmax(-1)
    nll = F.nll_loss(logs, target, ignore_index=NO_LABEL, reduction="sum")
    if not smoothing:
        return nll, nll
    return (1 - smoothing) * nll - smoothing * logs.mean(-1).masked_fill(target == NO_LABEL, 0).sum(), nll


def _slices(tokens: int, vocab: int) -> Iterator[slice]:
    rows = max(1, SLICE // max(1, vocab))
    return (slice(i, i + rows) for i in range(0, tokens, rows))


class _Surprise(torch.autograd.Function):
    """The definition, with nothing of the size of the scores made beside them but their gradient.

    That is softmax(scores) - (1 - s) [w = truth] - s / v, from the scores themselves.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, smoothing: float) -> Two:
        real, acc = target != NO_LABEL, _sums(scores)
        at = target.where(real, 0)[:, None]
        own, mean = (scores.new_empty(len(target), 1, dtype=acc) for _ in range(2))
        for part in _slices(*scores.shape):
            logs = scores[part].log_softmax(-1, dtype=acc)
            torch.gather(logs, 1, at[part], out=own[part])
            if smoothing:
                torch.mean(logs, -1, keepdim=True, out=mean[part])
        ctx.save_for_backward(scores, at, real)
        ctx.smoothing = smoothing
        return _total(ctx, own, mean, real, smoothing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        scores, at, real = ctx.saved_tensors
        grad, s = torch.empty_like(scores), ctx.smoothing
        weight = (up * real)[:, None]
        truth, uniform = weight * (s - 1), weight * (-s / max(1, scores.shape[1]))
        for part in _slices(*scores.shape):
            p = scores[part].softmax(-1, dtype=up.dtype)
            into = grad[part] if grad.dtype == p.dtype else p  # rounded only when all is added up
            torch.addcmul(uniform[part], p, weight[part], out=into).scatter_add_(1, at[part], truth[part])
            if into is p:
                grad[part] = p
        return grad, None, None


class _Said(torch.autograd.Function):
    """_Surprise of the scores x W^T + b, (t w) -> (t v), and their gradient beside them, some tokens at a time.

    What smoothing takes from that gradient is s / v for every token of the vocabulary, so it is taken where those have been
    summed over: mean(scores) = x mean(W) + mean(b), s mean(W) goes from the gradient of x, s / v sum(x) from every row of W's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, s: float) -> Two:
        real, acc, dtype = target != NO_LABEL, _sums(x), _product(x)
        at, rest, b = target.where(real, 0)[:, None], real[:, None], None if bias is None else bias.to(dtype)
        with precise(x):  # what autocast would convert is converted here, once
            own, truth, grads = _in_slices(ctx, x.to(dtype), weight.to(dtype), b, at, rest, s)
            mean = own
            if s:
                mean_w, mean_b = weight.to(acc).mean(0), 0 if bias is None else bias.to(acc).mean()
                mean = (x.to(acc) @ mean_w + mean_b)[:, None] + own - truth  # of the logs: lse = truth - own
            if s and any(ctx.needs_input_grad[:3]):
                shares = (mean_w, real.to(acc) @ x.to(acc) / len(weight), real.sum(dtype=acc) / len(weight))
                grads = tuple(None if grad is None else grad.sub_(s * y) for grad, y in zip(grads, shares, strict=True))
        ctx.save_for_backward(*grads, rest)
        ctx.types = x.dtype, weight.dtype, weight.dtype
        return _total(ctx, own, mean, real, s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *grads, rest = ctx.saved_tensors
        found = zip(grads, (up * rest, up, up), ctx.types, strict=True)
        return *(None if grad is None else (grad * one).to(dtype) for grad, one, dtype in found), None, None


def _in_slices(
    ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, at: Tensor, real: Tensor, s: float
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """The log-probability and the score of each truth, and the gradients of x, w, b but for what smoothing takes from them."""
    acc, wanted = _sums(x), [ctx.needs_input_grad[0], ctx.needs_input_grad[1], b is not None and ctx.needs_input_grad[2]]
    own, truth = (x.new_empty(len(x), 1, dtype=dtype) for dtype in (acc, x.dtype))
    dx = torch.empty_like(x) if wanted[0] else None
    dw, db = (
        torch.zeros_like(y, dtype=acc) if y is not None and want else None for y, want in zip((w, b), wanted[1:], strict=True)
    )
    heard, less = x * real, x.new_full((len(x), 1), s - 1, dtype=acc)
    for part in _slices(len(x), len(w)):
        scores = F.linear(x[part], w, b)
        logs = scores.log_softmax(-1, dtype=acc)
        torch.gather(scores, 1, at[part], out=truth[part])
        torch.gather(logs, 1, at[part], out=own[part])
        if not any(wanted):
            continue
        p = logs.exp_().scatter_add_(1, at[part], less[part]).to(x.dtype)  # over the logs, which are of no more use
        if dx is not None:
            torch.mm(p, w, out=dx[part])
        if dw is not None:  # summed up in float32 or better
            dw.addmm_(p.mT, heard[part]) if dw.dtype == p.dtype else dw.add_(p.mT @ heard[part])
        if db is not None:
            db += real[part, 0].to(p.dtype) @ p
    return own, truth, (dx, dw, db)


def _total(ctx: Any, own: Tensor, mean: Tensor, real: Tensor, s: float) -> Two:
    """The loss and nll, from the logs (t 1) of the truth and their mean over the vocabulary."""
    nll = -own[:, 0].where(real, 0).sum()
    ctx.mark_non_differentiable(nll)
    if not s:
        return nll.clone(), nll
    return (1 - s) * nll - s * mean[:, 0].where(real, 0).sum(), nll


def _sums(x: Tensor) -> torch.dtype:
    """The type to sum in: float32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def _product(x: Tensor) -> torch.dtype:
    """The type of a product of x: its own, or what autocast makes of it."""
    kind = x.device.type if x.device.type != "meta" else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
