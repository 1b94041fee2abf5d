"""Launch the backward kernels of linear attention: gradients of queries, adjoint states, gradients of keys, values and decays."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.linear.triton_keys import linear_backward_keys
from regard.ops.linear.triton_launch import (
    LinearInputs,
    LinearLaunch,
    LinearStates,
    features_adjacent,
    filled,
    scan_segments,
    state_part,
)
from regard.ops.linear.triton_queries import linear_backward_queries


class LinearGrads(NamedTuple):
    """Gradients of all tensors of a launch."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    state: Tensor
    log_decay: Tensor | None
    norm_state: Tensor | None


def launch_backward(
    inputs: LinearInputs,
    kept: LinearStates,
    d_out: Tensor | None,
    d_norm: Tensor | None,
    d_last: Tensor | None,
    d_last_z: Tensor | None,
    *,
    decay_grad: bool,
) -> LinearGrads:
    """Return the gradients of all tensors, given those of out (b h n e), norm (b h n), and the last states."""
    run = LinearLaunch(inputs)
    x = run.x
    last = torch.zeros_like(x.state) if d_last is None else d_last.float().contiguous()
    last_z = None
    if x.norm_state is not None:
        last_z = torch.zeros_like(x.norm_state) if d_last_z is None else d_last_z.float().contiguous()
    decay_grad = decay_grad and x.log_decay is not None
    d_q = own = own_z = dd = qd = None
    if x.q is not None:
        if d_out is None:
            d_out = torch.zeros((), dtype=x.q.dtype, device=run.device).expand(run.b, run.h, run.n, run.e)
        d_out = features_adjacent(d_out)
        assert d_out is not None
        dd = _norm_grad(run, d_norm)
        d_q, own, own_z, qd = _query_grads(run, kept, d_out, dd, decay_grad)
    d_state = torch.empty_like(x.state)
    d_norm_state = None if x.norm_state is None else torch.empty_like(x.norm_state)
    adjoint = (run.slots(run.g, run.f, run.e), run.slots(run.g, run.f) if run.norm else None)
    dots = run.slots(run.g, run.f) if decay_grad else None
    scan_segments(
        run, own, own_z, adjoint, kept.decays, (last, last_z), (d_state, d_norm_state),
        heads=run.h // run.g, reverse=True, other=(kept.states, kept.norms), dots=dots,
    )  # fmt: skip
    if x.k is None:
        return LinearGrads(d_q, None, None, d_state, None, d_norm_state)
    d_k, d_v, d_decay = _key_grads(run, kept, d_out, dd, adjoint, qd, dots)
    return LinearGrads(d_q, d_k, d_v, d_state, d_decay, d_norm_state)


def _norm_grad(run: LinearLaunch, d_norm: Tensor | None) -> Tensor | None:
    """The gradient of the norm (b h n): given, 0, or room for the kernel to compute it."""
    if not run.norm:
        return None
    if run.x.normalize:
        return run.new(run.b, run.h, run.n)
    if d_norm is None:
        return torch.zeros(run.b, run.h, run.n, device=run.device)
    return d_norm.float().contiguous()


def _query_grads(
    run: LinearLaunch, kept: LinearStates, d_out: Tensor, dd: Tensor | None, decay_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    x, some = run.x, run.x.state
    assert x.q is not None
    width = state_part(run.bf, run.be)
    parts = run.bf // width
    d_q = run.tokens(run.h, run.f, x.q.dtype)
    own = run.slots(run.h, run.f, run.e)
    own_z = run.slots(run.h, run.f) if run.norm else None
    qd = None
    if decay_grad:
        qd = run.new(parts, run.b, run.h, run.n) if run.decay == 1 else run.new(run.b, run.h, run.n, run.f)
    slots = run.segs + 1 if kept.states.dim() == 5 else 1
    linear_backward_queries[(parts * run.segs * run.b * run.h,)](
        *filled(some, x.q, x.k, x.v, kept.levels, x.valid, d_out, kept.out, kept.den, dd, kept.states, kept.norms),
        *filled(some, d_q, own, own_z, qd),
        *run.strides(x.q, x.k, x.v, kept.levels, d_out),
        x.scale, run.n, run.segs, run.seg, slots, run.b * run.h, run.h, run.h // run.g,
        BF=width, BE=run.be, PARTS=parts, NORMALIZE=run.divides, HAS_KEYS=x.k is not None, DECAY_GRAD=decay_grad,
        **run.flags, **run.product, **run.tiles("linear_backward_queries"),
    )  # fmt: skip
    return d_q, own, own_z, qd


def _key_grads(
    run: LinearLaunch,
    kept: LinearStates,
    d_out: Tensor | None,
    dd: Tensor | None,
    adjoint: tuple[Tensor, Tensor | None],
    qd: Tensor | None,
    dots: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    x, some = run.x, run.x.state
    assert x.k is not None and x.v is not None
    features, values = state_part(run.bf, run.be), state_part(run.be, run.bf)
    parts = run.bf // features
    d_k = run.tokens(run.g, run.f, x.k.dtype)
    d_v = run.tokens(run.g, run.e, x.v.dtype)
    d_decay = None
    if dots is not None:
        assert x.log_decay is not None
        d_decay = run.new(parts, run.b, run.g, run.n)
        if run.decay == 2:
            d_decay = run.new(run.b, run.g, run.n, run.f, dtype=x.log_decay.dtype)
    tiles = run.tiles("linear_backward_keys")
    linear_backward_keys[((parts + run.be // values) * run.segs * run.b * run.g,)](
        *filled(some, x.q, x.k, x.v, kept.levels, x.valid, d_out, kept.den, dd, *adjoint, qd, dots),
        *filled(some, d_k, d_v, d_decay, x.log_decay),
        *run.strides(x.q, x.k, x.v, kept.levels, d_out, x.log_decay),
        x.scale, x.gate_root, run.n, run.segs, run.seg, run.b * run.h, run.b * run.g, run.h, run.h // run.g,
        BF=run.bf, BE=run.be, PF=features, PE=values, NORMALIZE=run.divides, HAS_QUERIES=x.q is not None,
        DECAY_GRAD=dots is not None, GATES=x.gate_root > 0, CUMSUM=tiles["num_warps"] <= 4, **run.flags, **run.product, **tiles,
    )  # fmt: skip
    if d_decay is not None:
        assert x.log_decay is not None
        if run.decay == 1:
            d_decay = d_decay[0] if parts == 1 else d_decay.sum(0)
            d_decay = d_decay.unsqueeze(-1)
        d_decay = d_decay.to(x.log_decay.dtype)
    return d_k, d_v, d_decay
