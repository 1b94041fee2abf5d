"""Causal attention by exponential random features as one operation on CUDA devices: no features are stored.

The kernels are described in `causal_exp_kernels.py`; gradients go to tokens, to the largest norm, and to the state before them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.linear.exp_feature_op import ExpMap, exponents
from regard.ops.linear.feature_maps import min_log_decay
from regard.ops.linear.linear_op import LinearCall
from regard.ops.linear.noncausal_op import largest_squares
from regard.ops.linear.prefix import cumulative_max
from regard.ops.linear.torch import TorchLinear
from regard.transforms import differentiable_grads

ExpResults = tuple[Tensor, Tensor, Tensor, Tensor]


def causal_exp_attention(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, by: ExpMap, s: Tensor, z: Tensor, top: Tensor
) -> ExpResults:
    """Return out (b h n e) of queries q (b h n d), keys k (b g n d) and values v (b g n e), and the state behind the last token.

    The state before the first one is s (b g f e) and z (b g f) in units of exp(top), (b g 1). Call it where `takes_noncausal`.
    """
    flat = (q, k, v, valid, by.directions, by.log_norm, s, z, top)
    if torch.compiler.is_compiling():
        from regard.ops.linear.causal_exp_compiled import causal_exp_operator

        out, s, z, top, *_ = causal_exp_operator(*flat)
        return out, s, z, top
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in (q, k, v, by.log_norm, s, z)]):
        return _CausalExpFunction.apply(*flat)
    return _computed(*flat)[0]


def _computed(*flat: Any) -> tuple[ExpResults, Any]:
    """The results of the kernels, and what the backward pass needs."""
    from regard.ops.linear.causal_exp_launch import ExpState, causal_inputs, launch_causal_exp

    *given, s, z, top = flat
    out, last, kept = launch_causal_exp(causal_inputs(*given), ExpState(s, z, top))
    return (out, *last), kept


def plain_causal_exp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    directions: Tensor,
    log_norm: Tensor | None,
    s: Tensor,
    z: Tensor,
    top: Tensor,
) -> ExpResults:
    """Compute the same in plain differentiable operations, in float32 or better."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, logs = (exponents(x.to(dtype), directions, largest_squares(log_norm, x.to(dtype))) for x in (q, k))
    if valid is not None:
        logs = logs.masked_fill(~valid[:, None, :, None], -torch.inf)
        v = v.masked_fill(~valid[:, None, :, None], 0)
    tops = cumulative_max(logs.detach().amax(-1, keepdim=True), top.to(dtype))
    before = torch.cat([top.to(dtype).unsqueeze(2), tops[:, :, :-1]], 2)
    decay = (before - tops).clamp(min=min_log_decay(dtype)).masked_fill(before == -torch.inf, 0)
    keys = (logs - tops.masked_fill(tops == -torch.inf, 0)).exp()
    call = LinearCall(torch.softmax(queries, -1), keys, v.to(dtype), s.to(dtype), decay, z.to(dtype), normalize=True)
    found = TorchLinear().forward(call)
    assert found.norm_state is not None
    return found.out.to(q.dtype), found.state, found.norm_state, tops[:, :, -1]


class _CausalExpFunction(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> ExpResults:
        results, kept = _computed(*flat)
        ctx.save_for_backward(*flat, results[0], *kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results[3])
        return results

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_s: Tensor | None, grad_z: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        q, k, v, valid, directions, log_norm, s, z, top, out, *others = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more

            def f(q: Tensor, k: Tensor, v: Tensor, log_norm: Tensor | None, s: Tensor, z: Tensor) -> list[Tensor]:
                return list(plain_causal_exp(q, k, v, valid, directions, log_norm, s, z, top)[:3])

            of_state = [torch.zeros_like(t, dtype=torch.float32) if g is None else g for g, t in ((grad_s, s), (grad_z, z))]
            found = list(differentiable_grads(f, (q, k, v, log_norm, s, z), [grad, *of_state]))
        else:
            from regard.ops.linear.causal_exp_launch import CausalExpKept, causal_inputs, launch_causal_exp_grads

            inputs = causal_inputs(q, k, v, valid, directions, log_norm)
            found = list(launch_causal_exp_grads(inputs, CausalExpKept(*others), out, grad, (grad_s, grad_z)))
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5, 6, 7)]
        d_q, d_k, d_v, d_norm, d_s, d_z = (g if needed else None for g, needed in zip(found, needs, strict=True))
        return d_q, d_k, d_v, None, None, d_norm, d_s, d_z, None
