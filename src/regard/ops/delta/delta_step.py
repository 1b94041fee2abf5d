"""One decoding step of the delta rule as one kernel: the state is read, faded, written and answers, in a single launch.

For inference: results have no gradients. This module imports triton: import it where a step is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.delta.delta_op import DeltaCall, RawGates
from regard.ops.delta.unit_features import SHORTEST_NORM
from regard.ops.in_place import may_overwrite
from regard.ops.kernel_launch import launch_kernel
from regard.ops.linear.triton_tiles import gate_decay
from regard.ops.triton_support import block_of, kernel_config


@triton.jit
def _unit(x, shortest, RAW: tl.constexpr, SILU: tl.constexpr):
    """Return a vector scaled to length 1, after silu or not, if it is raw."""
    x = x.to(tl.float32)
    if RAW:
        if SILU:
            x = x * tl.sigmoid(tl.maximum(x, -80.0))
        x = x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), shortest)
    return x


@triton.jit(do_not_specialize=["shortest", "root"])
def delta_step_kernel(
    Q, K, V, BETA, S, DECAY, OUT, NEW,
    sqb, sqh, skb, skg, svb, svg, sbb, sbg, ssb, ssg, ssf, sdb, sdg, shortest, root,
    G: tl.constexpr, SHARE: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    DECAYS: tl.constexpr, RAW: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """BE value columns of one state, and all query heads that read it. RAW: see `delta_op.raw_delta_step`."""
    bg = tl.program_id(1)
    b, g = bg // G, bg % G
    f = tl.arange(0, BF)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    here = (f[:, None] < F) & (e[None, :] < E)
    s = tl.load(S + b * ssb + g * ssg + f[:, None] * ssf + e[None, :], mask=here, other=0.0).to(tl.float32)
    k = tl.load(K + b * skb + g * skg + f, mask=f < F, other=0.0)
    k = _unit(k, shortest, RAW, SILU)
    v = tl.load(V + b * svb + g * svg + e, mask=e < E, other=0.0).to(tl.float32)
    beta = tl.load(BETA + b * sbb + g * sbg).to(tl.float32)
    if RAW:
        beta = tl.sigmoid(beta)
    if DECAYS:
        decay = tl.load(DECAY + b * sdb + g * sdg).to(tl.float32)
        if RAW:
            decay = gate_decay(decay, root)
        s *= tl.exp(decay)
    difference = beta * (v - tl.sum(k[:, None] * s, 0))
    s += k[:, None] * difference[None, :]
    tl.store(NEW + (bg * F + f[:, None]) * E + e[None, :], s.to(NEW.dtype.element_ty), mask=here)
    if SHARE > 0:  # without queries Q is another tensor, or None
        for x in range(SHARE):
            q = tl.load(Q + b * sqb + (g * SHARE + x) * sqh + f, mask=f < F, other=0.0)
            q = _unit(q, shortest, RAW, SILU)
            out = tl.sum(q[:, None] * s, 0)
            tl.store(OUT + (bg * SHARE + x) * E + e, out.to(OUT.dtype.element_ty), mask=e < E)


def delta_step(call: DeltaCall, raw: RawGates | None = None) -> tuple[Tensor, Tensor]:
    """Compute one token: out (b h 1 e), without heads where there are no queries, and the state (b g f e) behind it.

    A state that may be overwritten is, and returned as it is.
    """
    q, k, v, beta, state, decay = call
    (b, g, _, f), e = k.shape, v.shape[-1]
    q, k, v, state = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, state))  # type: ignore[assignment]
    share = 0 if q is None else q.shape[1] // g
    config = dict(kernel_config("delta_step", "any", k.device))
    wide = min(config.pop("BE"), block_of(e, k.device))
    new = state if may_overwrite(state) else torch.empty(state.shape, dtype=state.dtype, device=state.device)
    out = v.new_empty(b, g * share, 1, e)
    strides: list[int] = []
    for x, count in ((q, 2), (k, 2), (v, 2), (beta, 2), (state, 3), (decay, 2)):
        strides += [0] * count if x is None else x.stride()[:count]
    sizes = {"G": g, "SHARE": share, "F": f, "E": e, "BF": triton.next_power_of_2(f), "BE": wide}
    constants = {**sizes, "DECAYS": decay is not None, "RAW": raw is not None, "SILU": raw is not None and raw.silu, **config}
    tensors = (q, k, v, beta, state, decay, out, new)
    launch_kernel(
        delta_step_kernel,
        (-(-e // wide), b * g),
        tensors,
        (*strides, SHORTEST_NORM, 1.0 if raw is None else float(raw.root)),
        constants,
    )
    return out, new
