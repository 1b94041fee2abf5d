"""The running softmax as an operator of torch.library, for torch.compile: one graph for any length.

Tops and sums of segments are not saved: their number depends on the length, which a graph does not fix; the backward operator
computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import dense_rows, like_by_token


@torch.library.custom_op("regard::running_softmax", mutates_args=())
def running_softmax_operator(
    q: Tensor, k: Tensor, first_z: Tensor, first_top: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute mix, keys, log decays and the sums behind the last token: see `RunningSoftmax`."""
    from regard.ops.linear.running_softmax_launch import launch_running_softmax

    mix, keys, log_decay, z, top = launch_running_softmax((dense_rows(q), dense_rows(k), first_z, first_top, valid))[0]
    return mix, keys, log_decay, z, top


@running_softmax_operator.register_fake
def fake_running_softmax(q, k, first_z, first_top, valid):  # noqa: ARG001
    from regard.ops.linear.running_softmax_launch import empty_running_softmax

    return tuple(empty_running_softmax(q, k))


@torch.library.custom_op("regard::running_softmax_backward", mutates_args=())
def running_softmax_operator_backward(
    d_mix: Tensor | None,
    d_keys: Tensor | None,
    d_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    first_z: Tensor,
    first_top: Tensor,
    valid: Tensor | None,
    mix: Tensor,
    keys: Tensor,
    log_decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and of the sums before the first token."""
    from regard.ops.linear.running_softmax_launch import launch_running_gradients, states_before_segments

    inputs = dense_rows(q), dense_rows(k), first_z, first_top, valid
    return launch_running_gradients(inputs, states_before_segments(inputs), (mix, keys, log_decay), (d_mix, d_keys, d_last))


@running_softmax_operator_backward.register_fake
def fake_running_softmax_backward(d_mix, d_keys, d_last, q, k, first_z, *rest):  # noqa: ARG001
    return like_by_token(q), like_by_token(k), first_z.new_empty(first_z.shape)


def _keep_tensors(ctx: Any, inputs: tuple, output: tuple) -> None:
    mix, keys, log_decay, _, top = output
    ctx.save_for_backward(*inputs, mix, keys, log_decay)
    ctx.mark_non_differentiable(log_decay, top)
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    d_mix, d_keys, _, d_last, _ = grads
    return *running_softmax_operator_backward(d_mix, d_keys, d_last, *ctx.saved_tensors), None, None


running_softmax_operator.register_autograd(_operator_gradients, setup_context=_keep_tensors)
