"""Triton kernels of the running softmax over tokens: see `running_softmax.py` for the formulas.

A program has a segment of C tokens and all features of HB heads, and goes from token to token: tops and sums stay in registers,
and a step is a few operations on a row. Those before every segment come from a scan over the tops and sums of segments, so that
both passes find them again from the keys. A top of no token is NO_TOP, finite, so that no difference of two is undefined; tensors
of callers have -inf.

Gradients: with dz_i = -mix_i dmix_i / z_i, summed over the queries of a key-value head,
    dk_j = key_j (dkey_j + G_j),   G_j = sum_{i >= j} exp(top_j - top_i) dz_i,   dq = mix dmix - softmax(q) sum_f mix dmix
G comes from sums of segments and a scan in the other direction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.linear.triton_tiles import SMALLEST_LOG, exp_of

NO_TOP = tl.constexpr(-1e30)


@triton.jit
def _join_tops(top_a, sum_a, top_b, sum_b):
    """Add sums that are in units of their tops."""
    top = tl.maximum(top_a, top_b)
    return top, sum_a * exp_of(top_a - top) + sum_b * exp_of(top_b - top)


@triton.jit
def _then_sums(keep_a, a, keep_b, b):
    return keep_a * keep_b, b + keep_b * a


@triton.jit
def _finite_top(top):
    return tl.maximum(top, NO_TOP)


@triton.jit
def _heads_of_segment(G, n, segs, f: tl.constexpr, BF: tl.constexpr, HB: tl.constexpr, C: tl.constexpr):
    """Return the batch, key-value heads (HB, 1), features (1, BF), which of them exist, the segment, its first token and length.

    Programs beside each other have heads of the same tokens, which lie side by side in memory.
    """
    pid = tl.program_id(0)
    tiles = (G + HB - 1) // HB
    rest = pid // tiles
    g, c = pid % tiles * HB + tl.arange(0, HB)[:, None], tl.arange(0, BF)[None, :]
    b, seg = (rest // segs).to(tl.int64), rest % segs
    first = (seg * C).to(tl.int64)
    return b, g, c, (g < G) & (c < f), seg, first, tl.minimum(n - first, C).to(tl.int32)


@triton.jit
def _running_exponents(K, VALID, mask, HAS_VALID: tl.constexpr):
    """Load the keys of a token as exponents: NO_TOP where there is none."""
    x = tl.load(K, mask=mask, other=NO_TOP).to(tl.float32)
    if HAS_VALID:
        x = tl.where(tl.load(VALID) != 0, x, NO_TOP)
    return _finite_top(x)


@triton.jit
def _raise_top(x, top):
    """Return the top with a token of exponents x, the feature of that token in its units, and what is left of sums before it."""
    new = tl.maximum(top, x)
    return new, tl.where(x > NO_TOP, exp_of(x - new), 0.0), exp_of(top - new)


@triton.jit(do_not_specialize=["n", "segs"])
def running_segments(
    K, VALID, TOPS, SUMS, skb, skh, skn, n, segs, G,
    f: tl.constexpr, BF: tl.constexpr, HB: tl.constexpr, C: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Store the largest exponents of a segment in TOPS (b g segs f), and its sum in those units in SUMS."""
    b, g, c, mask, seg, first, count = _heads_of_segment(G, n, segs, f, BF, HB, C)
    K += b * skb + first * skn + g * skh + c
    top = tl.full([HB, BF], NO_TOP, tl.float32)
    z = tl.zeros([HB, BF], tl.float32)
    for t in range(count):
        top, key, kept = _raise_top(_running_exponents(K + t * skn, VALID + b * n + first + t, mask, HAS_VALID), top)
        z = z * kept + key
    at = ((b * G + g) * segs + seg) * f + c
    tl.store(TOPS + at, top, mask=mask)
    tl.store(SUMS + at, z, mask=mask)


@triton.jit(do_not_specialize=["segs"])
def running_scan(TOPS, SUMS, FIRST_TOP, FIRST, TOP, Z, LAST_TOP, LAST, segs, f: tl.constexpr, BF: tl.constexpr, SB: tl.constexpr):
    """Store tops and sums before every segment and behind the last in TOP, Z (b g segs+1 f), and behind in LAST_TOP, LAST."""
    pid, parts = tl.program_id(0), (f + BF - 1) // BF
    bg = (pid // parts).to(tl.int64)
    c, r = pid % parts * BF + tl.arange(0, BF), tl.arange(0, SB)
    own = bg * f + c
    top = _finite_top(tl.load(FIRST_TOP + own, mask=c < f, other=0.0))
    z = tl.load(FIRST + own, mask=c < f, other=0.0)
    into = bg * (segs + 1) * f
    tl.store(TOP + into + c, top, mask=c < f)
    tl.store(Z + into + c, z, mask=c < f)
    for low in range(0, segs, SB):
        s = low + r
        mask = (s[:, None] < segs) & (c[None, :] < f)
        at = (bg * segs + s[:, None]) * f + c[None, :]
        x, sums = tl.load(TOPS + at, mask=mask, other=NO_TOP), tl.load(SUMS + at, mask=mask, other=0.0)
        tops, sums = tl.associative_scan((x, sums), 0, _join_tops)
        tops, sums = _join_tops(tops, sums, top[None, :], z[None, :])
        behind = into + (s[:, None] + 1) * f + c[None, :]
        tl.store(TOP + behind, tops, mask=mask)
        tl.store(Z + behind, sums, mask=mask)
        top = tl.max(tops, 0)
        z = tl.sum(tl.where(r[:, None] == SB - 1, sums, 0.0), 0)
    tl.store(LAST_TOP + own, tl.where(top > NO_TOP, top, float("-inf")), mask=c < f)
    tl.store(LAST + own, z, mask=c < f)


@triton.jit
def _row_softmax(Q, mask, c, f: tl.constexpr):
    """Load rows of queries and return their softmax over features, float32."""
    q = tl.load(Q, mask=mask, other=0.0).to(tl.float32)
    q = tl.where(c < f, q, float("-inf"))
    q = exp_of(q - tl.max(q, 1)[:, None])
    return q * (1.0 / tl.sum(q, 1))[:, None]


@triton.jit(do_not_specialize=["n", "segs"])
def running_features(
    Q, K, VALID, TOP, Z, MIX, KEYS, DECAY, sqb, sqh, sqn, skb, skh, skn, n, segs, G, R,
    f: tl.constexpr, BF: tl.constexpr, HB: tl.constexpr, C: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Store KEYS and DECAY (b n g f) of a segment, and MIX (b n h f) of R query heads of each head, from sums before it."""
    b, g, c, mask, seg, first, count = _heads_of_segment(G, n, segs, f, BF, HB, C)
    K += b * skb + first * skn + g * skh + c
    Q += b * sqb + first * sqn + g * R * sqh + c
    at = ((b * G + g) * (segs + 1) + seg) * f + c
    top = tl.load(TOP + at, mask=mask, other=NO_TOP)
    z = tl.load(Z + at, mask=mask, other=0.0)
    for t in range(count):
        new, key, kept = _raise_top(_running_exponents(K + t * skn, VALID + b * n + first + t, mask, HAS_VALID), top)
        z = z * kept + key
        into = ((b * n + first + t) * G + g) * f + c
        tl.store(KEYS + into, key.to(KEYS.dtype.element_ty), mask=mask)
        tl.store(DECAY + into, tl.where(top > NO_TOP, tl.maximum(top - new, SMALLEST_LOG), 0.0), mask=mask)
        top = new
        share = 1.0 / tl.maximum(z, 1.0)
        for r in range(R):
            mix = _row_softmax(Q + t * sqn + r * sqh, mask, c, f) * share
            tl.store(MIX + ((b * n + first + t) * (G * R) + g * R + r) * f + c, mix.to(MIX.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "segs"])
def running_grad_sums(
    K, VALID, TOP, Z, MIX, DMIX, SUMS, skb, skh, skn, sgb, sgh, sgn, n, segs, G, R,
    f: tl.constexpr, BF: tl.constexpr, HB: tl.constexpr, C: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Store the sum of dz over a segment in SUMS (b g segs f), in units of the top before it."""
    b, g, c, mask, seg, first, count = _heads_of_segment(G, n, segs, f, BF, HB, C)
    K += b * skb + first * skn + g * skh + c
    DMIX += b * sgb + first * sgn + g * R * sgh + c
    at = ((b * G + g) * (segs + 1) + seg) * f + c
    base = tl.load(TOP + at, mask=mask, other=NO_TOP)
    z = tl.load(Z + at, mask=mask, other=0.0)
    top = base
    total = tl.zeros([HB, BF], tl.float32)
    for t in range(count):
        top, key, kept = _raise_top(_running_exponents(K + t * skn, VALID + b * n + first + t, mask, HAS_VALID), top)
        z = z * kept + key
        moved = tl.zeros([HB, BF], tl.float32)
        for r in range(R):
            mix = tl.load(MIX + ((b * n + first + t) * (G * R) + g * R + r) * f + c, mask=mask, other=0.0).to(tl.float32)
            moved += mix * tl.load(DMIX + t * sgn + r * sgh, mask=mask, other=0.0).to(tl.float32)
        total -= tl.where(z > 0.5, moved * (1.0 / tl.maximum(z, 1.0)), 0.0) * exp_of(base - top)
    tl.store(SUMS + ((b * G + g) * segs + seg) * f + c, total, mask=mask)


@triton.jit(do_not_specialize=["segs"])
def running_grad_scan(SUMS, TOP, DLAST, NEXT, DFIRST, segs, f: tl.constexpr, BF: tl.constexpr, SB: tl.constexpr):
    """Store in NEXT (b g segs f) the sum of dz behind every segment, from DLAST (b g f), and in DFIRST that of all tokens."""
    pid, parts = tl.program_id(0), (f + BF - 1) // BF
    bg = (pid // parts).to(tl.int64)
    c, r = pid % parts * BF + tl.arange(0, BF), tl.arange(0, SB)
    carry = tl.load(DLAST + bg * f + c, mask=c < f, other=0.0)
    tl.store(NEXT + (bg * segs + segs - 1) * f + c, carry, mask=c < f)
    for low in range(0, segs, SB):
        s = segs - 1 - low - r
        mask = (s[:, None] >= 0) & (c[None, :] < f)
        at = (bg * segs + s[:, None]) * f + c[None, :]
        tops = TOP + (bg * (segs + 1) + s[:, None]) * f + c[None, :]
        rise = tl.load(tops, mask=mask, other=0.0) - tl.load(tops + f, mask=mask, other=0.0)
        kept, sums = tl.associative_scan((exp_of(rise), tl.load(SUMS + at, mask=mask, other=0.0)), 0, _then_sums)
        sums += kept * carry[None, :]
        tl.store(NEXT + at - f, sums, mask=mask & (s[:, None] > 0))
        carry = tl.sum(tl.where(r[:, None] == SB - 1, sums, 0.0), 0)
    tl.store(DFIRST + bg * f + c, carry, mask=c < f)


@triton.jit(do_not_specialize=["n", "segs"])
def running_grads(
    Q, MIX, KEYS, DECAY, DMIX, DKEYS, NEXT, DQ, DK, sqb, sqh, sqn, sgb, sgh, sgn, sdb, sdh, sdn, n, segs, G, R,
    f: tl.constexpr, BF: tl.constexpr, HB: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store the gradients of queries and keys of a segment, DQ (b n h f) and DK (b n g f), from the last token to the first.

    1 / z is what the mix is of the softmax. A token that sees nothing adds to the sums of absent tokens alone.
    """
    b, g, c, mask, seg, first, count = _heads_of_segment(G, n, segs, f, BF, HB, C)
    Q += b * sqb + first * sqn + g * R * sqh + c
    DMIX += b * sgb + first * sgn + g * R * sgh + c
    DKEYS += b * sdb + first * sdn + g * sdh + c
    later = tl.load(NEXT + ((b * G + g) * segs + seg) * f + c, mask=mask, other=0.0)
    kept = tl.full([HB, BF], 1.0, tl.float32)
    for back in range(count):
        t = count - 1 - back
        own = ((b * n + first + t) * G + g) * f + c
        dkeys = tl.load(DKEYS + t * sdn, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(KEYS + own, mask=mask, other=0.0).to(tl.float32)
        decay = tl.load(DECAY + own, mask=mask, other=0.0)
        later = later * kept
        for r in range(R):
            of_query = ((b * n + first + t) * (G * R) + g * R + r) * f + c
            mix = tl.load(MIX + of_query, mask=mask, other=0.0).to(tl.float32)
            moved = mix * tl.load(DMIX + t * sgn + r * sgh, mask=mask, other=0.0).to(tl.float32)
            p = _row_softmax(Q + t * sqn + r * sqh, mask, c, f)
            dq = moved - p * tl.sum(moved, 1)[:, None]
            tl.store(DQ + of_query, dq.to(DQ.dtype.element_ty), mask=mask)
            later -= tl.where(p > 0, moved * (mix / tl.where(p > 0, p, 1.0)), 0.0)
        tl.store(DK + own, (key * (dkeys + later)).to(DK.dtype.element_ty), mask=mask)
        kept = exp_of(decay)
