"""Softmax attention over the pairs of a pattern: forward and backward in time and memory that follow the pairs.

A fused kernel belongs here, behind `tiled`, with the same arguments and the same results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.kernels.parts import UNSEEN, Span
from regard.kernels.passes import Pass, accumulator
from regard.kernels.plan import Plan, plan
from regard.mixers.patterns import Pattern

__all__ = ["UNSEEN", "accumulator", "tiled"]


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    span: Span,
    *,
    scale: float,
    valid: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Softmax over the pairs of a pattern (of one head, bound to its length), with queries and keys where the span says.

    q (b h n d), k (b h m d), v (b h m e); valid (b m): keys that exist. Returns out (b h n e) and the log-sum-exp of the scores
    (b h n) in float32 or better; a query without any pair gets 0 and UNSEEN.
    """
    if q.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3], dtype=accumulator(q.dtype))
    seed = torch.randint(2**62, (), dtype=torch.long) if dropout else None
    if torch.compiler.is_compiling():  # one opaque operator: a plan is not for a tracer to look into
        return _operator(q, k, v, valid, seed, pattern.__repr__(), list(span), scale, dropout)
    return _Tiled.apply(q, k, v, valid, seed, plan(pattern, span), scale, dropout)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        seed: Tensor | None,
        work: Plan,
        scale: float,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse = Pass(q, k, v, valid, seed, work, scale, dropout).forward()
        ctx.save_for_backward(q, k, v, valid, seed, out, lse)
        ctx.rest = (work, scale, dropout)
        return out.to(v.dtype), lse.clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, valid, seed, out, lse = ctx.saved_tensors
        grads = Pass(q, k, v, valid, seed, *ctx.rest).backward(out, lse, d_out, d_lse)
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
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    out, lse = Pass(q, k, v, valid, seed, plan(Pattern.parse(pattern), Span(*span)), scale, dropout).forward()
    return out.to(v.dtype, copy=True), lse


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
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    work = Pass(q, k, v, valid, seed, plan(Pattern.parse(pattern), Span(*span)), scale, dropout)
    return work.backward(out.to(work.acc), lse, d_out, d_lse)


@_operator.register_fake
def _(q, k, v, valid, seed, pattern, span, scale, dropout):  # noqa: ARG001
    return q.new_empty(*q.shape[:3], v.shape[-1], dtype=v.dtype), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


@_operator_back.register_fake
def _(d_out, d_lse, q, k, v, valid, seed, out, lse, pattern, span, scale, dropout):  # noqa: ARG001
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.rest = inputs[5:]


def _go_back(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple:
    grads = _operator_back(d_out, d_lse, *ctx.saved_tensors, *ctx.rest)
    return *grads, *[None] * 6


_operator.register_autograd(_go_back, setup_context=_keep)
