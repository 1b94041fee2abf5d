"""Causal attention by exponential random features as operators of torch.library, for torch.compile: one graph for any length.

Results that a call does not have are empty tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import like_by_token
from regard.ops.linear.noncausal_compiled import or_empty

CAUSAL_EXP_TENSORS = 9  # of a call
DIRECTION_COPIES = 2  # of directions, at the end of what is kept: those of half precision alone have them


@torch.library.custom_op("regard::causal_exp_attention", mutates_args=())
def causal_exp_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    directions: Tensor,
    log_norm: Tensor | None,
    s: Tensor,
    z: Tensor,
    top: Tensor,
) -> list[Tensor]:
    """Compute out (b h n e), the state behind the last token, and what the backward pass needs: see `CausalExpKept`."""
    from regard.ops.linear.causal_exp_launch import ExpState, causal_inputs, launch_causal_exp

    return _flat(q, *launch_causal_exp(causal_inputs(q, k, v, valid, directions, log_norm), ExpState(s, z, top)))


@causal_exp_operator.register_fake
def fake_causal_exp_attention(q, k, v, valid, directions, log_norm, *state):  # noqa: ARG001
    from regard.ops.linear.causal_exp_launch import causal_inputs, empty_results

    return _flat(q, *empty_results(causal_inputs(q, k, v, valid, directions, log_norm)))


@torch.library.custom_op("regard::causal_exp_attention_backward", mutates_args=())
def causal_exp_operator_backward(
    grad: Tensor,
    grad_s: Tensor | None,
    grad_z: Tensor | None,
    out: Tensor,
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    directions: Tensor,
    log_norm: Tensor | None,
) -> list[Tensor]:
    """Compute the gradients of queries, keys, values, the state, and of the log of the largest norm if there is one."""
    from regard.ops.linear.causal_exp_launch import CausalExpKept, causal_inputs, launch_causal_exp_grads

    copies = (x if x.numel() else None for x in kept[-DIRECTION_COPIES:])
    inputs = causal_inputs(q, k, v, valid, directions, log_norm)
    found = launch_causal_exp_grads(inputs, CausalExpKept(*kept[:-DIRECTION_COPIES], *copies), out, grad, (grad_s, grad_z))
    return [found.q, found.k, found.v, found.s, found.z, *([] if found.log_norm is None else [found.log_norm])]


@causal_exp_operator_backward.register_fake
def fake_causal_exp_backward(grad, grad_s, grad_z, out, kept, q, k, v, valid, directions, log_norm):  # noqa: ARG001
    (b, g), f, e = k.shape[:2], directions.shape[0], v.shape[-1]
    found = [like_by_token(x) for x in (q, k, v)]
    found += [q.new_empty(b, g, f, e, dtype=torch.float32), q.new_empty(b, g, f, dtype=torch.float32)]
    return found if log_norm is None else [*found, torch.empty_like(log_norm)]


def _flat(q: Tensor, out: Tensor, last: tuple[Tensor, ...], kept: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [out, *last, *(or_empty(x, q) for x in kept)]


def _keep_tensors(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    out, _, _, top, *kept = output
    ctx.save_for_backward(*inputs[: CAUSAL_EXP_TENSORS - 3], out, *kept)
    ctx.mark_non_differentiable(top, *kept)
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    (q, k, v, valid, directions, log_norm, out), kept = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    grad, grad_s, grad_z, *_ = grads
    grad = torch.zeros_like(out) if grad is None else grad
    found = causal_exp_operator_backward(grad, grad_s, grad_z, out, list(kept), q, k, v, valid, directions, log_norm)
    d_q, d_k, d_v, d_s, d_z, *d_norm = found
    return d_q, d_k, d_v, None, None, d_norm[0] if d_norm else None, d_s, d_z, None


causal_exp_operator.register_autograd(_operator_gradients, setup_context=_keep_tensors)
