"""The kernels of Sinkhorn attention as operators of torch.library, for torch.compile: one graph for any length.

The last block of a graph is never full, so the balance of the sort and the attention to two blocks are operators of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.ops.balance import balance_pass, balance_pass_grads
from regard.ops.two_blocks import beside_heads, dense_call, launch_two_blocks, launch_two_blocks_gradients


@torch.library.custom_op("regard::balance_matrices", mutates_args=())
def balance_operator(logits: Tensor, iterations: int, in_time: bool) -> tuple[Tensor, Tensor]:
    """Compute the balanced weights (... r c) of logits, and what the backward pass needs of every iteration."""
    return balance_pass(logits.contiguous(), iterations, in_time)


@balance_operator.register_fake
def fake_balance_matrices(logits, iterations, in_time):
    *many, r, c = logits.shape
    return logits.new_empty(logits.shape), logits.new_empty(math.prod(many), iterations, r * c if in_time else r + c)


@torch.library.custom_op("regard::balance_matrices_backward", mutates_args=())
def balance_operator_backward(grad: Tensor, logits: Tensor, kept: Tensor, in_time: bool) -> Tensor:
    return balance_pass_grads(logits.contiguous(), kept, grad, in_time)


@balance_operator_backward.register_fake
def fake_balance_matrices_backward(grad, logits, kept, in_time):  # noqa: ARG001
    return logits.new_empty(logits.shape)


def _keep_logits(ctx: Any, inputs: tuple[Tensor, int, bool], output: tuple[Tensor, Tensor]) -> None:
    logits, _, ctx.in_time = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _logit_grads(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    return balance_operator_backward(grad, *ctx.saved_tensors, ctx.in_time), None, None


balance_operator.register_autograd(_logit_grads, setup_context=_keep_logits)


@torch.library.custom_op("regard::two_blocks_attention", mutates_args=())
def two_blocks_operator(
    q: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor, bias: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute out (b h u p e) of `two_blocks_attention` and its log-sum-exp (b h u p)."""
    return launch_two_blocks(dense_call((q, k, v, k2, v2, bias)), causal)


@two_blocks_operator.register_fake
def fake_two_blocks_attention(q, k, v, k2, v2, bias, causal):  # noqa: ARG001
    return beside_heads(v), q.new_empty(q.shape[:4], dtype=torch.float32)


@torch.library.custom_op("regard::two_blocks_attention_backward", mutates_args=())
def two_blocks_operator_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2: Tensor,
    v2: Tensor,
    bias: Tensor,
    causal: bool,
) -> list[Tensor]:
    """Compute the gradients of both blocks and of the bias."""
    blocks, found = (q, k, v, k2, v2, bias), _empty_gradients(q, k, v, k2, v2)
    d_bias = launch_two_blocks_gradients(dense_call(blocks), (out, lse), grad, causal, found)
    return [*found, d_bias.to(bias.dtype)]


@two_blocks_operator_backward.register_fake
def fake_two_blocks_attention_backward(grad, out, lse, q, k, v, k2, v2, bias, causal):  # noqa: ARG001
    return [*_empty_gradients(q, k, v, k2, v2), bias.new_empty(bias.shape)]


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor) -> list[Tensor]:
    """Return empty tensors: tokens with their heads side by side, as projections read them, mixed blocks as products do."""
    return [*(beside_heads(x) for x in (q, k, v)), *(x.new_empty(x.shape) for x in (k2, v2))]


def _keep_blocks(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *blocks, ctx.causal = inputs
    ctx.save_for_backward(*output, *blocks)
    ctx.mark_non_differentiable(output[1])


def _block_grads(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *two_blocks_operator_backward(grad, *ctx.saved_tensors, ctx.causal), None


two_blocks_operator.register_autograd(_block_grads, setup_context=_keep_blocks)
