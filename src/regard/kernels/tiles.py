"""Softmax attention over the pairs of a pattern: forward and backward in time and memory that follow the pairs.

A fused kernel belongs here, behind `tiled`, with the same arguments and the same results.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.kernels.parts import UNSEEN, Span
from regard.kernels.passes import Pass, accumulator
from regard.kernels.plan import Plan, plan
from regard.mixers.patterns import Causal, Pattern

__all__ = ["UNSEEN", "Reach", "accumulator", "tiled"]

PIECE = 1 << 21  # elements of the queries computed together on a CPU


class Reach(NamedTuple):
    """A pattern as each of the heads sees it, worked out once. The text is for torch.compile, which takes no other values."""

    each: tuple[Pattern, ...]
    text: str
    bends: bool  # with the length

    @staticmethod
    def of(pattern: Pattern, heads: int) -> Reach:
        each = tuple(pattern.for_head(h, heads) for h in range(heads))
        return Reach(each, str(pattern), pattern.bends_with_length)


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: Reach,
    span: Span,
    *,
    scale: float,
    causal: bool = False,
    valid: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Softmax over the pairs of a pattern, of the past alone if causal, with queries and keys where the span says.

    q (b h n d), k (b h m d), v (b h m e); valid (b m): keys that exist. Returns out (b h n e) and the log-sum-exp of the scores
    (b h n) in float32 or better; a query without any pair gets 0 and UNSEEN.
    """
    if q.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3], dtype=accumulator(q.dtype))
    seed = torch.randint(2**62, (), dtype=torch.long) if dropout else None
    if torch.compiler.is_compiling():  # one opaque operator: a plan is not for a tracer to look into
        return _operator(q, k, v, valid, seed, reach.text, list(span), causal, scale, dropout)
    return _Tiled.apply(q, k, v, valid, seed, shares(reach.each, span, causal), scale, dropout)


class Share(NamedTuple):
    """Heads that compute the same plan."""

    work: Plan
    heads: list[int]


@lru_cache(maxsize=64)
def shares(each: tuple[Pattern, ...], span: Span, causal: bool) -> tuple[Share, ...]:
    heads: dict[Pattern, list[int]] = {}
    for h, pattern in enumerate(each):
        heads.setdefault(pattern.bound(span.n, span.m), []).append(h)
    return tuple(Share(plan(p & Causal() if causal else p, span), own) for p, own in heads.items())


@lru_cache(maxsize=64)
def _shares_of(text: str, heads: int, span: Span, causal: bool) -> tuple[Share, ...]:
    return shares(Reach.of(Pattern.parse(text), heads).each, span, causal)


def _forward(
    work: tuple[Share, ...], q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, seed: Tensor | None, *rest: float
) -> tuple[Tensor, Tensor]:
    pieces = _pieces(work, q)
    if len(pieces) == 1:
        return Pass(pieces[0][0], q, k, v, valid, seed, *rest).forward()
    acc = accumulator(q.dtype)
    out, lse = (torch.empty(*q.shape[:3], *x, dtype=acc, device=q.device) for x in ((v.shape[-1],), ()))
    for number, (p, own) in enumerate(pieces):
        one = Pass(p, q[:, own], k[:, own], v[:, own], valid, _other(seed, number), *rest)
        out[:, own], lse[:, own] = one.forward()
    return out, lse


def _backward(
    work: tuple[Share, ...],
    up: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    seed: Tensor | None,
    *rest: float,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v; up: out, log-sum-exp, and the gradients of both."""
    pieces = _pieces(work, q)
    if len(pieces) == 1:
        return Pass(pieces[0][0], q, k, v, valid, seed, *rest).backward(*up)
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for number, (p, own) in enumerate(pieces):
        one = Pass(p, q[:, own], k[:, own], v[:, own], valid, _other(seed, number), *rest)
        found = one.backward(*(x[:, own] for x in up))
        for total, part in zip(grads, found, strict=True):
            total[:, own] = part
    return grads


def _other(seed: Tensor | None, number: int) -> Tensor | None:
    """Dice of its own for every piece: heads must not drop the same pairs."""
    return None if seed is None else (seed + number * 1_000_000_000_039) % 2**62


def _pieces(work: tuple[Share, ...], q: Tensor) -> list[tuple[Plan, list[int] | slice]]:
    """Heads that are computed together. On a CPU not too many: the C library gives back every tensor of more than 32 MB to the
    kernel, and getting its pages anew costs more than the arithmetic does."""
    b, _, n, d = q.shape
    if q.device.type != "cpu":
        return [(p, _neighbours(heads)) for p, heads in work]
    most = max(1, PIECE // (b * n * d))
    return [(p, _neighbours(heads[x : x + most])) for p, heads in work for x in range(0, len(heads), most)]


def _neighbours(heads: list[int]) -> list[int] | slice:
    """Heads side by side as a slice, which takes a view and no copy."""
    if heads == list(range(heads[0], heads[-1] + 1)):
        return slice(heads[0], heads[-1] + 1)
    return heads


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        seed: Tensor | None,
        work: tuple[Share, ...],
        scale: float,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(work, q, k, v, valid, seed, scale, dropout)
        ctx.save_for_backward(q, k, v, valid, seed, out, lse)
        ctx.rest = (work, scale, dropout)
        return out.to(v.dtype), lse.clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, valid, seed, out, lse = ctx.saved_tensors
        work, scale, dropout = ctx.rest
        grads = _backward(work, (out, lse, d_out, d_lse), q, k, v, valid, seed, scale, dropout)
        return *grads, None, None, None, None, None


@torch.library.custom_op("regard::tiled", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    span: list[int],
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _forward(_shares_of(pattern, q.shape[1], Span(*span), causal), q, k, v, valid, seed, scale, dropout)
    return out.to(v.dtype, copy=True), lse.clone()


@torch.library.custom_op("regard::tiled_backward", mutates_args=())
def _operator_back(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    pattern: str,
    span: list[int],
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    work, up = _shares_of(pattern, q.shape[1], Span(*span), causal), (out.to(lse.dtype), lse, d_out, d_lse)
    dq, dk, dv = (x.contiguous() for x in _backward(work, up, q, k, v, valid, seed, scale, dropout))
    return dq, dk, dv


@_operator.register_fake
def _(q, k, v, valid, seed, pattern, span, causal, scale, dropout):  # noqa: ARG001
    return q.new_empty(*q.shape[:3], v.shape[-1], dtype=v.dtype), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


@_operator_back.register_fake
def _(d_out, d_lse, q, k, v, valid, seed, out, lse, pattern, span, causal, scale, dropout):  # noqa: ARG001
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.rest = inputs[5:]


def _go_back(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple:
    grads = _operator_back(d_out, d_lse, *ctx.saved_tensors, *ctx.rest)
    return *grads, *[None] * 7


_operator.register_autograd(_go_back, setup_context=_keep)
