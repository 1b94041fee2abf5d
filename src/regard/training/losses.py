"""What a model loses: the surprise at what it should have said."""

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

SLICE = 1 << 25  # scores that are looked at together
LossAndNll = tuple[Tensor, Tensor]
LossNllKl = tuple[Tensor, Tensor, Tensor]


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
    check_smoothing(smoothing)
    target, scores = _real(scores, target, valid).flatten(), scores.flatten(0, -2)
    count = (target != NO_LABEL).sum()
    if torch.compiler.is_compiling():  # it fuses the definition by itself
        total, nll = _plainly(scores, target, smoothing)
    else:
        total, nll = _Surprise.apply(scores, target, smoothing)
    return Loss(total, count, {"nll": nll.detach()})


def linear_cross_entropy(
    head: nn.Module, x: Tensor, target: Tensor, valid: Tensor | None = None, *, smoothing: float = 0.0
) -> Loss:
    """cross_entropy(head(x), target, valid) of vectors x (... w), without ever holding the scores of all of them.

    A vocabulary is wide: its scores are the largest tensor of a training step by far. They are made for some tokens at a time,
    and their gradient at once, in the forward pass, so that they are walked over while they are near and then forgotten.
    That is for a `NextToken` as it was built; any other head is asked for all of its scores.
    """
    made = _map(head, x)
    if made is None:
        return cross_entropy(head(x), target, valid, smoothing=smoothing)
    target, x = _real(x, target, valid).flatten(), x.flatten(0, -2)
    total, nll, _ = _token_losses(made, x, target, smoothing, 0.0)
    return Loss(total, (target != NO_LABEL).sum(), {"nll": nll.detach()})


def rdrop_loss(
    head: nn.Module, x: Tensor, y: Tensor, target: Tensor, valid: Tensor | None = None, *, smoothing: float = 0.0, weight: float
) -> Loss:
    """Of two answers x, y (... w) to one question: the mean of what they lose, and weight / 4 of how far they are `apart`.

    Like `linear_cross_entropy`, without ever holding all scores. parts["apart"] is how far they are apart.
    """
    if not weight > 0:
        raise ValueError(f"the weight of an agreement must be above 0, not {weight!r}")
    made, real = _map(head, x), _real(x, target, valid)
    over = (real != NO_LABEL).sum()
    if made is None:
        p, q = head(x), head(y)
        both = [cross_entropy(scores, target, valid, smoothing=smoothing) for scores in (p, q)]
        far = apart(p, q).masked_fill(real == NO_LABEL, 0).sum()
        total = both[0].total + both[1].total + weight / 2 * far
        nll = both[0].parts["nll"] + both[1].parts["nll"]
    else:
        pairs, truth = torch.stack([x, y], -2).flatten(0, -2), torch.stack([real, real], -1).flatten()
        total, nll, far = _token_losses(made, pairs, truth, smoothing, weight / 2)
    return Loss(total / 2, over, {"nll": nll.detach() / 2, "apart": far.detach()})


def _map(head: nn.Module, x: Tensor) -> nn.Linear | None:
    """The plain map of a `NextToken` as it was built, whose scores need not be held; of any other head there is none."""
    made = head.map if type(head) is NextToken and not has_hooks(head) else None
    if torch.compiler.is_compiling() or type(made) is not nn.Linear or has_hooks(made) or _product(made.weight) != _product(x):
        return None
    return made


def _token_losses(made: nn.Linear, x: Tensor, target: Tensor, smoothing: float, held: float) -> LossNllKl:
    check_smoothing(smoothing)
    given: tuple[Tensor | None, ...] = (x, made.weight, made.bias)
    if not torch.is_grad_enabled():  # which a Function is not told
        given = tuple(None if y is None else y.detach() for y in given)
    return _Said.apply(*given, target, smoothing, held)


def by_step(scores: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Minus the log-probability at every step, shaped as the target (b m), 0 where there is none: what `cross_entropy` sums."""
    target = _real(scores, target, valid)
    logs = upcast(scores).log_softmax(-1).flatten(0, -2)
    return F.nll_loss(logs, target.flatten(), ignore_index=NO_LABEL, reduction="none").view_as(target)


def apart(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) + KL(q || p) = sum (p - q) (log p - log q) of two choices by their scores (... v), one for each (...)."""
    return between(upcast(p).log_softmax(-1), upcast(q).log_softmax(-1))


def between(p: Tensor, q: Tensor) -> Tensor:
    """How far two choices are `apart`, by their log-probabilities."""
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


def check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), not {smoothing!r}")


def _plainly(scores: Tensor, target: Tensor, smoothing: float) -> LossAndNll:
    """The definition: total and nll of scores (t v), target (t)."""
    logs = upcast(scores).log_softmax(-1)
    nll = F.nll_loss(logs, target, ignore_index=NO_LABEL, reduction="sum")
    if not smoothing:
        return nll, nll
    return (1 - smoothing) * nll - smoothing * logs.mean(-1).masked_fill(target == NO_LABEL, 0).sum(), nll


def _slices(tokens: int, vocab: int, each: int = 1) -> Iterator[slice]:
    """`each`: so many tokens stay together."""
    rows = max(each, SLICE // max(1, vocab) // each * each)
    return (slice(i, i + rows) for i in range(0, tokens, rows))


class _Surprise(torch.autograd.Function):
    """The definition, with nothing of the size of the scores made beside them but their gradient.

    That is softmax(scores) - (1 - s) [w = truth] - s / v, from the scores themselves.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, smoothing: float) -> LossAndNll:
        real, acc = target != NO_LABEL, _sum_dtype(scores)
        at = target.where(real, 0)[:, None]
        own, mean = (scores.new_empty(len(target), 1, dtype=acc) for _ in range(2))
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
    held > 0: tokens are pairs of answers to one question, and held times how far they are apart is lost as well.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, s: float, held: float) -> LossNllKl:
        real, acc, dtype = target != NO_LABEL, _sum_dtype(x), _product(x)
        at, rest, b = target.where(real, 0)[:, None], real[:, None], None if bias is None else bias.to(dtype)
        with no_autocast(x):  # what autocast would convert is converted here, once
            own, truth, far, grads = _in_slices(ctx, x.to(dtype), weight.to(dtype), b, at, rest, s, held)
            mean = own
            if s:
                mean_w, mean_b = weight.to(acc).mean(0), 0 if bias is None else bias.to(acc).mean()
                mean = (x.to(acc) @ mean_w + mean_b)[:, None] + own - truth  # of the logs: lse = truth - own
            if s and any(ctx.needs_input_grad[:3]):
                shares = (mean_w, real.to(acc) @ x.to(acc) / len(weight), real.sum(dtype=acc) / len(weight))
                grads = tuple(None if grad is None else grad.sub_(s * y) for grad, y in zip(grads, shares, strict=True))
        ctx.save_for_backward(*grads, rest)
        ctx.types = x.dtype, weight.dtype, weight.dtype
        total, nll = _loss_and_nll(ctx, own, mean, real, s)
        far = far.where(real[::2], 0).sum() if held else nll.new_zeros(())
        ctx.mark_non_differentiable(nll, far)
        return total + held * far, nll, far

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *grads, rest = ctx.saved_tensors
        found = zip(grads, (up * rest, up, up), ctx.types, strict=True)
        return *(None if grad is None else (grad * one).to(dtype) for grad, one, dtype in found), None, None, None


def _in_slices(
    ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, at: Tensor, real: Tensor, s: float, held: float
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """The log-probability and the score of each truth, how far pairs are apart if they are held, and the gradients of x, w, b but
    for what smoothing takes from them.
    """
    acc, wanted = _sum_dtype(x), [ctx.needs_input_grad[0], ctx.needs_input_grad[1], b is not None and ctx.needs_input_grad[2]]
    own, truth = (x.new_empty(len(x), 1, dtype=dtype) for dtype in (acc, x.dtype))
    dx = torch.empty_like(x) if wanted[0] else None
    dw, db = (
        torch.zeros_like(y, dtype=acc) if y is not None and want else None for y, want in zip((w, b), wanted[1:], strict=True)
    )
    far = x.new_empty(len(x) // 2, dtype=acc)
    heard, less = x * real, x.new_full((len(x), 1), s - 1, dtype=acc)
    for part in _slices(len(x), len(w), 2 if held else 1):
        scores = F.linear(x[part], w, b)
        logs = scores.log_softmax(-1, dtype=acc)
        torch.gather(scores, 1, at[part], out=truth[part])
        torch.gather(logs, 1, at[part], out=own[part])
        pull = _pull(logs, far[part.start // 2 : part.stop // 2]) if held else None
        if not any(wanted):
            continue
        p = logs.exp_().scatter_add_(1, at[part], less[part])  # over the logs, which are of no more use
        p = (p if pull is None else p.add_(pull, alpha=held)).to(x.dtype)
        if dx is not None:
            torch.mm(p, w, out=dx[part])
        if dw is not None:  # summed up in float32 or better
            dw.addmm_(p.mT, heard[part]) if dw.dtype == p.dtype else dw.add_(p.mT @ heard[part])
        if db is not None:
            db += real[part, 0].to(p.dtype) @ p
    return own, truth, far, (dx, dw, db)


def _pull(logs: Tensor, far: Tensor) -> Tensor:
    """How far pairs are apart, by logs (2k v) into `far` (k), and its gradient (2k v).

    Of sum (p - q) (log p - log q) by the scores of p: p (d - sum p d) + p - q, with d = log p - log q.
    """
    pairs = logs.unflatten(0, (-1, 2))
    p, d = pairs.exp(), pairs[:, 0] - pairs[:, 1]
    torch.sum((p[:, 0] - p[:, 1]) * d, -1, out=far)
    apart = torch.stack([d, -d], 1)
    return (p * (apart - (p * apart).sum(-1, keepdim=True)) + p - p.flip(1)).flatten(0, 1)


def _loss_and_nll(ctx: Any, own: Tensor, mean: Tensor, real: Tensor, s: float) -> LossAndNll:
    """The loss and nll, from the logs (t 1) of the truth and their mean over the vocabulary."""
    nll = -own[:, 0].where(real, 0).sum()
    ctx.mark_non_differentiable(nll)
    if not s:
        return nll.clone(), nll
    return (1 - s) * nll - s * mean[:, 0].where(real, 0).sum(), nll


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The type to sum in: float32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def _product(x: Tensor) -> torch.dtype:
    """The type of a product of x: its own, or what autocast makes of it."""
    kind = x.device.type if x.device.type != "meta" else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
