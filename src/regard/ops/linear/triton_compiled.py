"""The kernels of linear attention as operators of torch.library, for torch.compile: one graph for any length.

Results that a call does not have are empty tensors. States of segments are not saved: their number depends on the length, which
a graph does not fix; the backward operator computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TENSORS = 7  # of the arguments: q, k, v, state, log_decay, norm_state, valid
_GRADS = 6  # of them that have gradients


@torch.library.custom_op("regard::linear_attention", mutates_args=())
def linear_operator(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    state: Tensor,
    log_decay: Tensor | None,
    norm_state: Tensor | None,
    valid: Tensor | None,
    feature: str,
    scale: float,
    normalize: bool,
    gain: Tensor | None,
    gate_root: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute out (b h n e), its norm (b h n), and both states behind the last token."""
    from regard.ops.linear.triton_launch import LinearInputs, launch_forward

    inputs = LinearInputs(q, k, v, state, log_decay, norm_state, valid, feature, scale, normalize, gain, gate_root)
    out, norm, last, last_norm, _ = launch_forward(inputs, keep=False)
    if k is None:  # a state that is read does not change
        return _or_empty(out, state), _or_empty(norm, state), _or_empty(None, state), _or_empty(None, state)
    return _or_empty(out, state), _or_empty(norm, state), last, _or_empty(last_norm, state)


@linear_operator.register_fake
def fake_linear_attention(q, k, v, state, log_decay, norm_state, valid, *options):  # noqa: ARG001
    out, norm, last, last_norm = (_or_empty(None, state) for _ in range(4))
    if q is not None:
        b, h, n, _ = q.shape
        dtype = q.dtype if v is None else v.dtype
        out = q.new_empty(b, n, h, state.shape[-1], dtype=dtype).transpose(1, 2)
        if norm_state is not None:
            norm = q.new_empty(b, h, n, dtype=torch.float32)
    if k is not None:
        last = state.new_empty(state.shape, dtype=torch.float32)
        if norm_state is not None:
            last_norm = state.new_empty(norm_state.shape, dtype=torch.float32)
    return out, norm, last, last_norm


@torch.library.custom_op("regard::linear_attention_backward", mutates_args=())
def linear_operator_backward(
    grads: list[Tensor],
    out: Tensor,
    norm: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    state: Tensor,
    log_decay: Tensor | None,
    norm_state: Tensor | None,
    valid: Tensor | None,
    feature: str,
    scale: float,
    normalize: bool,
    gain: Tensor | None,
    gate_root: float,
) -> list[Tensor]:
    """Compute the gradients of all tensors that are not None."""
    from regard.ops.linear.triton_launch import LinearInputs, launch_states
    from regard.ops.linear.triton_launch_backward import launch_backward

    inputs = LinearInputs(q, k, v, state, log_decay, norm_state, valid, feature, scale, normalize, gain, gate_root)
    kept = launch_states(inputs, out, None if norm_state is None else norm)
    d_out, d_norm, d_last, d_last_norm = (None if g.numel() == 0 else g for g in grads)
    found = launch_backward(inputs, kept, d_out, d_norm, d_last, d_last_norm, decay_grad=log_decay is not None)
    given = {g.untyped_storage().data_ptr() for g in grads}  # a state that nothing reads on the way has the gradient given
    return [g.clone() if g.untyped_storage().data_ptr() in given else g for g in found if g is not None]


@linear_operator_backward.register_fake
def fake_linear_attention_backward(grads, out, norm, q, k, v, state, log_decay, norm_state, *rest):  # noqa: ARG001
    def tokens(x: Tensor) -> Tensor:
        b, h, n, f = x.shape
        return x.new_empty(b, n, h, f).transpose(1, 2)

    found = [tokens(x) for x in (q, k, v) if x is not None]
    found.append(state.new_empty(state.shape, dtype=torch.float32))
    if log_decay is not None:
        found.append(log_decay.new_empty(log_decay.shape))
    if norm_state is not None:
        found.append(norm_state.new_empty(norm_state.shape, dtype=torch.float32))
    return found


def _keep_tensors(ctx: Any, inputs: tuple, output: tuple) -> None:
    out, norm = output[:2]
    ctx.save_for_backward(*inputs[:_TENSORS], out, norm)
    ctx.options = inputs[_TENSORS:]


def _operator_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, norm = ctx.saved_tensors
    some = inputs[3]
    given = [some.new_empty(0) if g is None else g for g in grads]
    if ctx.options[2]:  # the norm of a divided output is no result
        given[1] = some.new_empty(0)
    found = iter(linear_operator_backward(given, out, norm, *inputs, *ctx.options))
    own = [None if x is None else next(found).to(x.dtype) for x in inputs[:_GRADS]]
    return *own, *[None] * (1 + len(ctx.options))


linear_operator.register_autograd(_operator_gradients, setup_context=_keep_tensors)


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if x is None else x
