"""The kernels of attention over all pairs as operators of torch.library, for torch.compile: one graph for any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token
from regard.ops.pair.pair_launch import pair_backward_pass, pair_forward_pass
from regard.ops.pair.pair_op import PAIR_TENSORS, PAIR_VARIABLES, PairCall


def compiled_pair_attention(fields: tuple) -> Tensor:
    """Return out of the fields of a call, without its bias."""
    return _operator(*fields)[0]


@torch.library.custom_op("regard::pair_attention", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    table: Tensor | None,
    share: Tensor | None,
    x: Tensor | None,
    y: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    valid: Tensor | None,
    seed: Tensor | None,
    start: int,
    norm: str,
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    call = PairCall(q, k, v, w, table, share, x, y, at, key_at, valid, seed, start, norm, causal, scale, dropout)
    return pair_forward_pass(call)


@_operator.register_fake
def fake_pair_attention(q, k, v, *rest):  # noqa: ARG001
    b, h, n, _ = q.shape
    return by_token(v, b, n, h, v.shape[-1]), v.new_empty(b, h, n, dtype=torch.float32)


@torch.library.custom_op("regard::pair_attention_backward", mutates_args=())
def _operator_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    table: Tensor | None,
    share: Tensor | None,
    x: Tensor | None,
    y: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    valid: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    stat: Tensor,
    start: int,
    norm: str,
    causal: bool,
    scale: float,
    dropout: float,
) -> list[Tensor]:
    call = PairCall(q, k, v, w, table, share, x, y, at, key_at, valid, seed, start, norm, causal, scale, dropout)
    found = pair_backward_pass(call, out, stat, grad, table is not None)
    return [x.contiguous() for x in found if x is not None]


@_operator_backward.register_fake
def fake_pair_attention_backward(grad, q, k, v, w, table, share, x, y, *rest):  # noqa: ARG001
    return [z.new_empty(z.shape) for z in (q, k, v, w, table, share, x, y) if z is not None]


def keep_pair_tensors(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:PAIR_TENSORS], *output)
    ctx.rest = inputs[PAIR_TENSORS:]


def pair_operator_grads(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple:  # noqa: ARG001 - only out has a gradient
    found = iter(_operator_backward(grad, *ctx.saved_tensors, *ctx.rest))
    grads = [None if x is None else next(found) for x in ctx.saved_tensors[:PAIR_VARIABLES]]
    return *grads, *[None] * (PAIR_TENSORS - PAIR_VARIABLES + len(ctx.rest))


_operator.register_autograd(pair_operator_grads, setup_context=keep_pair_tensors)
