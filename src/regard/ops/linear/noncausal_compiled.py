"""The kernels of linear attention without an order as operators of torch.library, for torch.compile: one graph for any length.

Results that a call does not have are empty tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import like_by_token


@torch.library.custom_op("regard::noncausal_attention", mutates_args=())
def noncausal_operator(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, directions: Tensor | None, log_norm: Tensor | None, feature: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute out (b h n e) and what the backward pass needs: see `NoncausalKept`."""
    from regard.ops.linear.noncausal_launch import NoncausalInputs, launch_noncausal

    out, kept = launch_noncausal(NoncausalInputs(q, k, v, valid, directions, log_norm, feature))
    lse, w_logs, w_grads = (or_empty(x, q) for x in kept[2:])
    return out, kept.mean, kept.level, lse, w_logs, w_grads


@noncausal_operator.register_fake
def fake_noncausal_attention(q, k, v, valid, directions, log_norm, feature):  # noqa: ARG001
    (b, h, n, d), g, e = q.shape, k.shape[1], v.shape[-1]
    half, f = q.dtype == torch.bfloat16, d if directions is None else directions.shape[0]
    mean = q.new_empty(b, g, f, e, dtype=torch.bfloat16 if half else torch.float32)
    lse, w_logs, w_grads = (or_empty(None, q) for _ in range(3))
    if directions is not None:
        lse = q.new_empty(b, h, n, dtype=torch.float32)
        if half:
            w_logs, w_grads = (q.new_empty(f, d, dtype=dtype) for dtype in (torch.float16, torch.bfloat16))
    level = q.new_empty(b, g, f, dtype=torch.float32)
    return q.new_empty(b, n, h, e).transpose(1, 2), mean, level, lse, w_logs, w_grads


@torch.library.custom_op("regard::noncausal_attention_backward", mutates_args=())
def noncausal_operator_backward(
    grad: Tensor,
    out: Tensor,
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    directions: Tensor | None,
    log_norm: Tensor | None,
    feature: str,
) -> list[Tensor]:
    """Compute the gradients of queries, keys and values, and of the log of the largest norm if there is one."""
    from regard.ops.linear.noncausal_launch import NoncausalInputs, NoncausalKept, launch_noncausal_grads

    inputs = NoncausalInputs(q, k, v, valid, directions, log_norm, feature)
    mean, level, *others = kept
    found = launch_noncausal_grads(inputs, NoncausalKept(mean, level, *(x if x.numel() else None for x in others)), out, grad)
    return [x for x in found if x is not None]


@noncausal_operator_backward.register_fake
def fake_noncausal_attention_backward(grad, out, kept, q, k, v, valid, directions, log_norm, feature):  # noqa: ARG001
    found = [like_by_token(x) for x in (q, k, v)]
    return found if log_norm is None else [*found, torch.empty_like(log_norm)]


def _keep_tensors(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:-1], *output)
    ctx.feature = inputs[-1]


def _operator_gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    inputs, (out, *kept) = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    found = noncausal_operator_backward(grad, out, kept, *inputs, ctx.feature)
    d_norm = found[3] if len(found) > 3 else None
    return *found[:3], None, None, d_norm, None


noncausal_operator.register_autograd(_operator_gradients, setup_context=_keep_tensors)


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Return a tensor, or an empty one in the place of None, which no operator returns."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x
