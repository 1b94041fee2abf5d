"""Triton kernels of the running softmax over tokens: see `running_softmax.py` for the formulas.

A segment is a tile of C tokens, and a program has one of them with all features. Tops and sums before every segment come from a
scan over the tops and sums of segments, so that both passes find those of every token from its keys. A top of no token is NO_TOP,
finite, so that no difference of two is undefined; tensors of callers have -inf.

Gradients: with dz_i = -mix_i dmix_i / z_i, summed over the queries of a key-value head,
    dk_j = key_j (dkey_j + G_j),   G_j = sum_{i >= j} exp(top_j - top_i) dz_i,   dq = mix (dmix - z sum_f mix dmix)
G comes from a scan in the other direction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.linear.triton_tiles import SMALLEST_LOG, column_mask, exp_of, present

NO_TOP = tl.constexpr(-1e30)


@triton.jit
def _join(top_a, sum_a, top_b, sum_b):
    """Add sums that are in units of their tops."""
    top = tl.maximum(top_a, top_b)
    return top, sum_a * exp_of(top_a - top) + sum_b * exp_of(top_b - top)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _to_earlier(top_late, late, top, own):
    """Add a later sum to that of an earlier token, in units in which it is smaller."""
    return top, own + late * exp_of(top - top_late)


@triton.jit
def _then(keep_a, a, keep_b, b):
    return keep_a * keep_b, b + keep_b * a


@triton.jit
def _finite(top):
    return tl.maximum(top, NO_TOP)


@triton.jit
def _place(G, segs, C: tl.constexpr):
    """Return the batch, the key-value head, their joint number, the segment and its tokens; neighbours have one segment."""
    pid = tl.program_id(0)
    g, rest = pid % G, pid // G
    seg, b = rest % segs, (rest // segs).to(tl.int64)
    return b, g, b * G + g, seg, seg * C + tl.arange(0, C)


@triton.jit
def _logs(K, VALID, i, skn, c, n, f: tl.constexpr, HAS_VALID: tl.constexpr):
    """Load keys of tokens i as exponents, NO_TOP where there is none, and whether there is one."""
    there = present(VALID, i, n, HAS_VALID)[:, None]
    x = tl.load(K + i[:, None] * skn + c[None, :], mask=column_mask(there, c, f), other=float("-inf")).to(tl.float32)
    return tl.where(x > NO_TOP, x, NO_TOP), x > NO_TOP


@triton.jit
def _running(x, there, top, z):
    """Return tops and sums (tokens, features) up to each token, from those before the tile."""
    own_top, own = tl.associative_scan((x, there.to(tl.float32)), 0, _join)
    return _join(own_top, own, top[None, :], z[None, :])


@triton.jit(do_not_specialize=["n", "segs"])
def running_segments(
    K, VALID, TOPS, SUMS, skb, skh, skn, n, segs, G,
    f: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Store the largest exponents of a segment in TOPS (b g segs f), and its sum in those units in SUMS."""
    b, g, bg, seg, i = _place(G, segs, C)
    c = tl.arange(0, BF)
    x, there = _logs(K + b * skb + g * skh, VALID + b * n, i, skn, c, n, f, HAS_VALID)
    top = tl.max(x, 0)
    at = (bg * segs + seg) * f + c
    tl.store(TOPS + at, top, mask=c < f)
    tl.store(SUMS + at, tl.sum(tl.where(there, exp_of(x - top[None, :]), 0.0), 0), mask=c < f)


@triton.jit(do_not_specialize=["segs"])
def running_scan(TOPS, SUMS, FIRST_TOP, FIRST, TOP, Z, LAST_TOP, LAST, segs, f: tl.constexpr, BF: tl.constexpr, SB: tl.constexpr):
    """Store tops and sums before every segment and behind the last in TOP, Z (b g segs+1 f), and behind in LAST_TOP, LAST."""
    bg = tl.program_id(0).to(tl.int64)
    c, r = tl.arange(0, BF), tl.arange(0, SB)
    own = bg * f + c
    top = _finite(tl.load(FIRST_TOP + own, mask=c < f, other=0.0))
    z = tl.load(FIRST + own, mask=c < f, other=0.0)
    into = bg * (segs + 1) * f
    tl.store(TOP + into + c, top, mask=c < f)
    tl.store(Z + into + c, z, mask=c < f)
    for low in range(0, segs, SB):
        s = low + r
        mask = (s[:, None] < segs) & (c[None, :] < f)
        at = (bg * segs + s[:, None]) * f + c[None, :]
        x, sums = tl.load(TOPS + at, mask=mask, other=NO_TOP), tl.load(SUMS + at, mask=mask, other=0.0)
        tops, sums = tl.associative_scan((x, sums), 0, _join)
        tops, sums = _join(tops, sums, top[None, :], z[None, :])
        behind = into + (s[:, None] + 1) * f + c[None, :]
        tl.store(TOP + behind, tops, mask=mask)
        tl.store(Z + behind, sums, mask=mask)
        top = tl.max(tops, 0)
        z = tl.sum(tl.where(r[:, None] == SB - 1, sums, 0.0), 0)
    tl.store(LAST_TOP + own, tl.where(top > NO_TOP, top, float("-inf")), mask=c < f)
    tl.store(LAST + own, z, mask=c < f)


@triton.jit(do_not_specialize=["n", "segs"])
def running_features(
    Q, K, VALID, TOP, Z, MIX, KEYS, DECAY, sqb, sqh, sqn, skb, skh, skn, n, segs, G, R,
    f: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Store KEYS and DECAY (b n g f) of a segment, and MIX (b n h f) of its R query heads, from tops and sums before it."""
    b, g, bg, seg, i = _place(G, segs, C)
    c, inside = tl.arange(0, BF), (i < n)[:, None]
    mask = column_mask(inside, c, f)
    K += b * skb + g * skh
    x, there = _logs(K, VALID + b * n, i, skn, c, n, f, HAS_VALID)
    at = (bg * (segs + 1) + seg) * f + c
    base = tl.load(TOP + at, mask=c < f, other=NO_TOP)
    top, z = _running(x, there, base, tl.load(Z + at, mask=c < f, other=0.0))
    # the tops of the tokens before: the same keys, one token later
    late, _there = _logs(K, VALID + b * n, tl.where(i > seg * C, i - 1, n), skn, c, n, f, HAS_VALID)
    before = tl.maximum(tl.associative_scan(late, 0, _larger), base[None, :])
    into = ((b * n + i[:, None]) * G + g) * f + c[None, :]
    tl.store(KEYS + into, tl.where(there, exp_of(x - top), 0.0).to(KEYS.dtype.element_ty), mask=mask)
    tl.store(DECAY + into, tl.where(before > NO_TOP, tl.maximum(before - top, SMALLEST_LOG), 0.0), mask=mask)
    norm = tl.maximum(z, 1.0)
    for h in range(g * R, g * R + R):
        q = tl.load(Q + b * sqb + h * sqh + i[:, None] * sqn + c[None, :], mask=mask, other=0.0).to(tl.float32)
        q = tl.where(c[None, :] < f, q, float("-inf"))
        q = exp_of(q - tl.max(q, 1)[:, None])
        mix = q / (tl.sum(q, 1)[:, None] * norm)
        tl.store(MIX + ((b * n + i[:, None]) * (G * R) + h) * f + c[None, :], mix.to(MIX.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "segs"])
def running_grad_sums(
    K, VALID, TOP, Z, MIX, DMIX, SUMS, skb, skh, skn, sgb, sgh, sgn, n, segs, G, R,
    f: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Store the sum of dz over a segment in SUMS (b g segs f), in units of the top before it."""
    b, g, bg, seg, i = _place(G, segs, C)
    c = tl.arange(0, BF)
    mask = column_mask((i < n)[:, None], c, f)
    x, there = _logs(K + b * skb + g * skh, VALID + b * n, i, skn, c, n, f, HAS_VALID)
    at = (bg * (segs + 1) + seg) * f + c
    base = tl.load(TOP + at, mask=c < f, other=NO_TOP)
    top, z = _running(x, there, base, tl.load(Z + at, mask=c < f, other=0.0))
    moved = tl.zeros([C, BF], tl.float32)
    for h in range(g * R, g * R + R):
        mix = tl.load(MIX + ((b * n + i[:, None]) * (G * R) + h) * f + c[None, :], mask=mask, other=0.0).to(tl.float32)
        moved += mix * tl.load(DMIX + b * sgb + h * sgh + i[:, None] * sgn + c[None, :], mask=mask, other=0.0).to(tl.float32)
    dz = tl.where(z > 0.5, -moved / tl.maximum(z, 1.0), 0.0)
    tl.store(SUMS + (bg * segs + seg) * f + c, tl.sum(dz * exp_of(base[None, :] - top), 0), mask=c < f)


@triton.jit(do_not_specialize=["segs"])
def running_grad_scan(SUMS, TOP, DLAST, NEXT, DFIRST, segs, f: tl.constexpr, BF: tl.constexpr, SB: tl.constexpr):
    """Store in NEXT (b g segs f) the sum of dz behind every segment, from DLAST (b g f), and in DFIRST that of all tokens."""
    bg = tl.program_id(0).to(tl.int64)
    c, r = tl.arange(0, BF), tl.arange(0, SB)
    carry = tl.load(DLAST + bg * f + c, mask=c < f, other=0.0)
    tl.store(NEXT + (bg * segs + segs - 1) * f + c, carry, mask=c < f)
    for low in range(0, segs, SB):
        s = segs - 1 - low - r
        mask = (s[:, None] >= 0) & (c[None, :] < f)
        at = (bg * segs + s[:, None]) * f + c[None, :]
        tops = TOP + (bg * (segs + 1) + s[:, None]) * f + c[None, :]
        rise = tl.load(tops, mask=mask, other=0.0) - tl.load(tops + f, mask=mask, other=0.0)
        kept, sums = tl.associative_scan((exp_of(rise), tl.load(SUMS + at, mask=mask, other=0.0)), 0, _then)
        sums += kept * carry[None, :]
        tl.store(NEXT + at - f, sums, mask=mask & (s[:, None] > 0))
        carry = tl.sum(tl.where(r[:, None] == SB - 1, sums, 0.0), 0)
    tl.store(DFIRST + bg * f + c, carry, mask=c < f)


@triton.jit(do_not_specialize=["n", "segs"])
def running_grads(
    K, VALID, TOP, Z, MIX, DMIX, DKEYS, NEXT, DQ, DK, skb, skh, skn, sgb, sgh, sgn, sdb, sdh, sdn, n, segs, G, R,
    f: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Store the gradients of queries and keys, DQ (b n h f) and DK (b n g f)."""
    b, g, bg, seg, i = _place(G, segs, C)
    c = tl.arange(0, BF)
    mask = column_mask((i < n)[:, None], c, f)
    x, there = _logs(K + b * skb + g * skh, VALID + b * n, i, skn, c, n, f, HAS_VALID)
    at = (bg * (segs + 1) + seg) * f + c
    base = tl.load(TOP + at, mask=c < f, other=NO_TOP)
    top, z = _running(x, there, base, tl.load(Z + at, mask=c < f, other=0.0))
    norm = tl.maximum(z, 1.0)
    moved = tl.zeros([C, BF], tl.float32)
    for h in range(g * R, g * R + R):
        own = ((b * n + i[:, None]) * (G * R) + h) * f + c[None, :]
        mix = tl.load(MIX + own, mask=mask, other=0.0).to(tl.float32)
        each = mix * tl.load(DMIX + b * sgb + h * sgh + i[:, None] * sgn + c[None, :], mask=mask, other=0.0).to(tl.float32)
        moved += each
        tl.store(DQ + own, (each - mix * norm * tl.sum(each, 1)[:, None]).to(DQ.dtype.element_ty), mask=mask)
    dz = tl.where(z > 0.5, -moved / norm, 0.0)
    _top, later = tl.associative_scan((top, dz), 0, _to_earlier, reverse=True)
    end = tl.load(TOP + at + f, mask=c < f, other=NO_TOP)
    behind = tl.load(NEXT + (bg * segs + seg) * f + c, mask=c < f, other=0.0)
    later += exp_of(top - end[None, :]) * behind[None, :]
    dkeys = tl.load(DKEYS + b * sdb + g * sdh + i[:, None] * sdn + c[None, :], mask=mask, other=0.0).to(tl.float32)
    dk = tl.where(there, exp_of(x - top) * (dkeys + later), 0.0)
    tl.store(DK + ((b * n + i[:, None]) * G + g) * f + c[None, :], dk.to(DK.dtype.element_ty), mask=mask)
