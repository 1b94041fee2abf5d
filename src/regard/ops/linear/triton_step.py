"""One decoding step of linear attention as one kernel: the state is read, faded, written and answers, in a single launch.

    S = exp(log_decay) S + phi(k) v^T,   z = exp(log_decay) z + phi(k),   out = scale phi(q) S [/ scale phi(q) . z]

Gates in place of log decays are turned into them inside. Letters as in `regard.ops.linear.linear_op`. For inference: results
have no gradients. Sums are float32. This module imports triton: import it where a step is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.in_place import may_overwrite
from regard.ops.kernel_launch import launch_kernel
from regard.ops.linear.feature_maps import FEATURES
from regard.ops.linear.linear_op import LinearCall, LinearResult, gain_of_heads
from regard.ops.linear.triton_tiles import gate_decay
from regard.ops.triton_support import block_of, kernel_config

LEAST_NORM = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps  # below it weights have no digits left


@triton.jit
def _features(x, KIND: tl.constexpr):
    x = x.to(tl.float32)
    if KIND == 1:
        x = tl.maximum(x, 0.0) + tl.exp(tl.minimum(x, 0.0))
    if KIND == 2:
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def _kept(x, root, written, GATES: tl.constexpr):
    """Return what is kept of a state: exp of a log decay, or that of a gate, and all of it where no key is written."""
    x = x.to(tl.float32)
    if GATES:
        x = tl.where(written, gate_decay(x, root), 0.0)
    return tl.exp(x)


@triton.jit
def _expm1(x):
    """Return exp(x) - 1 for x <= 0, with all digits of small numbers."""
    series = 1.0 + x / 7.0 * (1.0 + x / 8.0)
    series = 1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * series)))
    return tl.where(x > -0.5, x * (1.0 + x / 2.0 * series), tl.exp(x) - 1.0)


@triton.jit(do_not_specialize=["scale", "least", "root"])
def linear_step_kernel(
    Q, K, V, S, DECAY, Z, VALID, COUNT, OUT, NORM, NEW_S, NEW_Z, NEW_COUNT,
    sqb, sqh, skb, skg, svb, svg, ssb, ssg, ssf, sdb, sdg, szb, szg, sab,
    scale, least, root,
    G: tl.constexpr, SHARE: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    KIND: tl.constexpr, DECAYS: tl.constexpr, NORMS: tl.constexpr, DIVIDES: tl.constexpr, READS: tl.constexpr,
    MASKED: tl.constexpr, GATES: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """BE value columns of one state, and all query heads that read it. DECAYS: 0 none, 1 one number, 2 one a feature.

    COUNTS: tokens are counted, and with 2 outputs are divided by the root of the sum of exp(decay)^j over j < count.
    """
    part, bg = tl.program_id(0), tl.program_id(1)
    b, g = bg // G, bg % G
    f = tl.arange(0, BF)
    e = part * BE + tl.arange(0, BE)
    in_f, in_e = f < F, e < E
    here = in_f[:, None] & in_e[None, :]
    s = tl.load(S + b * ssb + g * ssg + f[:, None] * ssf + e[None, :], mask=here, other=0.0).to(tl.float32)
    v = tl.load(V + b * svb + g * svg + e, mask=in_e, other=0.0).to(tl.float32)
    k = tl.load(K + b * skb + g * skg + f, mask=in_f, other=0.0)
    k = tl.where(in_f, _features(k, KIND), 0.0)
    written = b >= 0
    if MASKED:
        written = tl.load(VALID + b * sab) != 0
        k = tl.where(written, k, 0.0)
    if DECAYS == 1:
        kept = _kept(tl.load(DECAY + b * sdb + g * sdg), root, written, GATES) + tl.zeros([BF], tl.float32)
    if DECAYS == 2:
        kept = _kept(tl.load(DECAY + b * sdb + g * sdg + f, mask=in_f, other=0.0), root, written, GATES)
    if DECAYS != 0:
        s = s * kept[:, None]
    s += k[:, None] * v[None, :]
    tl.store(NEW_S + (bg * F + f[:, None]) * E + e[None, :], s.to(NEW_S.dtype.element_ty), mask=here)
    if NORMS:
        z = tl.load(Z + b * szb + g * szg + f, mask=in_f, other=0.0).to(tl.float32)
        if DECAYS != 0:
            z = z * kept
        z += k
        tl.store(NEW_Z + bg * F + f, z.to(NEW_Z.dtype.element_ty), mask=in_f & (part == 0))
    gain = 1.0
    if COUNTS != 0:
        count = tl.load(COUNT + b) + 1
        tl.store(NEW_COUNT + b, count, mask=(part == 0) & (g == 0))
        if COUNTS == 2:
            rate = tl.load(DECAY + b * sdb + g * sdg).to(tl.float32)
            gain = 1.0 / tl.sqrt(_expm1(count.to(tl.float32) * rate) / _expm1(rate))
    if READS:
        for x in range(SHARE):
            h = g * SHARE + x
            q = tl.load(Q + b * sqb + h * sqh + f, mask=in_f, other=0.0)
            q = tl.where(in_f, _features(q, KIND) * scale, 0.0)
            out = tl.sum(q[:, None] * s, 0) * gain
            row = bg * SHARE + x
            if NORMS:
                norm = tl.sum(q * z, 0)
                if DIVIDES:
                    out = tl.where(norm > least, out / norm, 0.0)
                else:
                    tl.store(NORM + row, norm.to(NORM.dtype.element_ty), mask=part == 0)
            tl.store(OUT + row * E + e, out.to(OUT.dtype.element_ty), mask=in_e)


def _after(state: Tensor, owned: bool) -> Tensor:
    """Return where a state goes: into itself, if each program owns what it writes and the state may be overwritten."""
    if owned and may_overwrite(state):
        return state
    return torch.empty(state.shape, dtype=state.dtype, device=state.device)


def _inner(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


class StepCount(NamedTuple):
    """Tokens that were written before a step (b), and where their number with it goes."""

    before: Tensor
    after: Tensor
    norm: bool  # divide outputs by the root of the weight of all tokens; the call has one decay a head


def linear_step(call: LinearCall, count: StepCount | None = None) -> LinearResult:
    """Compute a call of one token by one launch; without queries, out has no heads. Norms that divide out are not returned.

    States that may be overwritten are, and returned as they are; a norm state only where one program owns all of it.
    """
    q, k, v, state, log_decay, norm_state, valid, feature, scale, normalize, gain, root = call
    (b, g, n, f), e = k.shape, v.shape[-1]
    if n != 1:
        raise ValueError(f"a decoding step takes one token of every row, not {n}")
    if normalize and norm_state is None:
        raise ValueError("without a norm state there is no norm to divide by: normalize=False")
    q, k, v, state, log_decay, norm_state = (_inner(x) for x in (q, k, v, state, log_decay, norm_state))  # type: ignore[assignment]
    share = 0 if q is None else q.shape[1] // g
    config = dict(kernel_config("linear_step", "any", k.device))
    wide = min(config.pop("BE"), block_of(e, k.device))
    new_state = _after(state, True)
    new_norm = None if norm_state is None else _after(norm_state, e <= wide)
    out = v.new_empty(b, g * share, 1, e)
    norm = None if q is None or norm_state is None or normalize else norm_state.new_empty(b, g * share, 1, 1)
    decays = 0 if log_decay is None else 1 if log_decay.shape[-1] == 1 else 2
    strides: list[int] = []
    for x, dims in ((q, 2), (k, 2), (v, 2), (state, 3), (log_decay, 2), (norm_state, 2), (valid, 1)):
        strides += [0] * dims if x is None else x.stride()[:dims]
    constants = {
        "G": g,
        "SHARE": share,
        "F": f,
        "E": e,
        "BF": triton.next_power_of_2(f),
        "BE": wide,
        "KIND": FEATURES.index(feature),
        "DECAYS": decays,
        "NORMS": norm_state is not None,
        "DIVIDES": normalize,
        "READS": q is not None,
        "MASKED": valid is not None,
        "GATES": root > 0,
        "COUNTS": 0 if count is None else 2 if count.norm else 1,
        **config,
    }
    before, counted = (None, None) if count is None else count[:2]
    tensors = (q, k, v, state, log_decay, norm_state, valid, before, out, norm, new_state, new_norm, counted)
    numbers = (*strides, float(scale), LEAST_NORM, float(root))
    launch_kernel(linear_step_kernel, (-(-e // wide), b * g), tensors, numbers, constants)
    if gain is not None and q is not None:
        out = (out * gain_of_heads(gain, q.shape[1]).unsqueeze(-1)).to(out.dtype)
    return LinearResult(out, new_state, norm, new_norm)
