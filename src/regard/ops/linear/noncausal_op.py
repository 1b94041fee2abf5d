"""Attention by features in which every query sees all keys, as one operation on CUDA devices: no features are stored.

    out_i = sum_f phi(q_i)_f sum_j phi(k_j)_f v_j / sum_f phi(q_i)_f sum_j phi(k_j)_f

The kernels are described in `noncausal_kernels.py`. "softmax" is efficient attention, whose two factors are softmaxes over
features and over tokens; "random" has the exponential features of performer, phi(x) = exp(w_f . x' - |x'|^2 / 2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.linear.exp_feature_op import ExpMap, exponents
from regard.ops.linear.feature_maps import feature_map, safe_ratio
from regard.ops.triton_support import DTYPES
from regard.transforms import differentiable_grads, needs_plain_ops

WIDEST_STATE = {torch.bfloat16: 128}  # coordinates of a token, and numbers of a value: what fits into shared memory
WIDEST_OTHER = 64  # of types whose products have operands of 4 bytes


def takes_noncausal(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels, where there are any, take queries (b h n d), keys (b g m d) and values (b g m e)."""
    if needs_plain_ops() or q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return False
    alike = q.dtype == k.dtype == v.dtype and q.dtype in DTYPES
    return alike and max(q.shape[-1], v.shape[-1]) <= WIDEST_STATE.get(q.dtype, WIDEST_OTHER)


def noncausal_attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, feature: str, by: ExpMap | None = None) -> Tensor:
    """Return out (b h n e) of queries q (b h n d), keys k (b g m d) and values v (b g m e), all or those at `valid` (b m).

    feature: "elu", "relu", "softmax", or "random" with the directions of `by`. Call it where `takes_noncausal`.
    """
    directions, log_norm = (None, None) if by is None else by
    flat = (q, k, v, valid, directions, log_norm, feature)
    if torch.compiler.is_compiling():
        from regard.ops.linear.noncausal_compiled import noncausal_operator

        return noncausal_operator(*flat)[0]
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in (q, k, v, log_norm)]):
        return _NoncausalFunction.apply(*flat)
    from regard.ops.linear.noncausal_launch import NoncausalInputs, launch_noncausal

    return launch_noncausal(NoncausalInputs(*flat))[0]


def plain_noncausal(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, directions: Tensor | None, log_norm: Tensor | None, feature: str
) -> Tensor:
    """Compute the same in plain differentiable operations, in float32 or better."""
    dtype, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    queries, keys, values = q.to(dtype), k.to(dtype), v.to(dtype)
    gone = None if valid is None else ~valid[:, None, :, None]
    if feature in ("softmax", "random"):
        if directions is not None:
            queries, keys = (exponents(x, directions, largest_squares(log_norm, x)) for x in (queries, keys))
        keys = keys if gone is None else keys.masked_fill(gone, -torch.inf)
        over = (-1, -2) if feature == "random" else (-2,)
        top = keys.detach().amax(over, keepdim=True)
        queries, keys = torch.softmax(queries, -1), (keys - top.masked_fill(top == -torch.inf, 0)).exp()
    else:
        queries, keys = feature_map(queries, feature), feature_map(keys, feature)
        keys = keys if gone is None else keys.masked_fill(gone, 0)
    values = values if gone is None else values.masked_fill(gone, 0)
    state, norm = keys.mT @ values, keys.sum(-2).unsqueeze(-1)
    queries = queries.unflatten(1, (-1, group)).flatten(2, 3)
    soft = feature == "softmax"
    out = queries @ (state / norm.clamp(min=1)) if soft else safe_ratio(queries @ state, queries @ norm)
    return out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype)


def largest_squares(log_norm: Tensor | None, x: Tensor) -> Tensor | None:
    """The largest squared norms (h 1 1) of tokens x (b h n d)."""
    if log_norm is None:
        return None
    return (2 * log_norm.to(x.dtype)).exp().repeat_interleave(x.shape[1] // len(log_norm))[:, None, None]


class _NoncausalFunction(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Tensor:
        from regard.ops.linear.noncausal_launch import NoncausalInputs, launch_noncausal

        out, kept = launch_noncausal(NoncausalInputs(*flat))
        ctx.save_for_backward(*flat[:-1], out, *kept)
        ctx.feature = flat[-1]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops.linear.noncausal_launch import NoncausalInputs, NoncausalKept, launch_noncausal_grads

        q, k, v, valid, directions, log_norm, out, *others = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more

            def f(q: Tensor, k: Tensor, v: Tensor, log_norm: Tensor | None) -> list[Tensor]:
                return [plain_noncausal(q, k, v, valid, directions, log_norm, ctx.feature)]

            found = differentiable_grads(f, (q, k, v, log_norm), [grad])
        else:
            inputs = NoncausalInputs(q, k, v, valid, directions, log_norm, ctx.feature)
            found = list(launch_noncausal_grads(inputs, NoncausalKept(*others), out, grad))
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5)]
        d_q, d_k, d_v, d_norm = (g if needed else None for g, needed in zip(found, needs, strict=True))
        return d_q, d_k, d_v, None, None, d_norm, None
