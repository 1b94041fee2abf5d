"""Triton kernels of a plain window, low <= j <= high for every query: no padding, bias, dropout, lists or residue classes.

A program owns B rows. Row r meets N = back + ahead + 1 neighbours, the offsets r .. r + N - 1 from the first neighbour of row 0. Tiles
of S offsets begin there, not at multiples of S: all programs meet equally many. Those with all pairs inside come without a mask.

    FORM 2    one loop, a mask where a scalar condition demands one
    FORM 3    a loop without masks, then one over the tiles at both edges of the window and at the ends of the sequence
    FORM 4    as 3, but offsets o and o + W of the two edges, W >= N, are one tile: no row meets both, so a score is chosen
              before the exponential and a weight after it; exponentials are taken of W offsets instead of W + B
    FORM 5    as 4, with the scores of the next tile computed beside the exponentials of this one

`triton_kernels` computes all other cases, and these too: `form` 1 of a configuration.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_kernels import LOWEST, load_tile, load_tile_transposed, store_tile
from regard.ops.triton_math import LN2, LOG2E

BAND_NUMBERS = ("n", "m", "shift", "back", "ahead", "wide")  # compiled for all values
ONE_LOOP = tl.constexpr(2)
AHEAD_FORM = tl.constexpr(5)


@triton.jit
def window_of(start, back, ahead, wide, length, B: tl.constexpr, S: tl.constexpr):
    """Return the token at offset 0, the lead of row 0, the offsets of a row, and tiles: first, last, begin and end.

    Tiles first .. last - 1 overlap the sequence, begin .. end - 1 need no mask. start: the token beside row 0. wide: W.
    With a lead of one token where W > N, the tiles between both edges need no mask if W = N + 1, as for |i - j| < W / 2.
    """
    count = back + ahead + 1
    lead = tl.minimum(wide - count, 1)
    low = start - back - lead
    behind = tl.maximum(length - low, 0)
    before = tl.maximum(-low, 0)
    last = tl.minimum((behind + S - 1) // S, (wide + B + S - 1) // S)
    first = tl.minimum(before // S, last)
    begin = tl.minimum((tl.maximum(before, B - 1 + lead) + S - 1) // S, last)
    end = tl.minimum(tl.maximum(tl.minimum(behind, count + lead) // S, begin), last)
    return low, lead, count, first, last, begin, end


@triton.jit
def tokens_at(low, offsets, length):
    """Return the numbers of the tokens at some offsets; those outside of the sequence are the nearest inside."""
    return tl.minimum(tl.maximum(low + offsets, 0), length - 1)


@triton.jit
def hide_pairs(s, rows, offsets, low, count, length):
    """Return scores (rows offsets) with -inf for pairs outside of the window or the sequence."""
    token = low + offsets
    there = ((token >= 0) & (token < length))[None, :]
    apart = offsets[None, :] - rows[:, None]
    return tl.where(there & (apart >= 0) & (apart < count), s, float("-inf"))


@triton.jit
def hide_ends(s, near, low, offsets, wide, length):
    """Return merged scores with -inf for keys outside of the sequence; near: those that belong to the first of both edges."""
    early = low + offsets
    late = early + wide
    there = tl.where(near, ((early >= 0) & (early < length))[None, :], ((late >= 0) & (late < length))[None, :])
    return tl.where(there, s, float("-inf"))


@triton.jit
def add_scores(sums, s):
    """Return the weights of a tile of scores and how much the sums before it fade."""
    total, top = sums
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    fade = tl.exp2(top - new)
    return p, fade, (total * fade + tl.sum(p, 1), new)


@triton.jit(do_not_specialize=BAND_NUMBERS)
def band_forward(Q, K, V, OUT, LSE, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son,
                 n, m, shift, back, ahead, wide, scale, H, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                 BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Write the outputs and log-sum-exp of one tile of queries."""
    tile = tl.program_id(0)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    rows = tl.arange(0, BM)
    c = tl.arange(0, BN)
    i = tile * BM + rows
    q = load_tile(Q + b * sqb + h * sqh, tl.minimum(i, n - 1), sqn, D, BD)
    q = (q * (scale * LOG2E)).to(q.dtype)
    K += b * skb + h // R * skh
    V += b * svb + h // R * svh
    acc = tl.zeros([BM, BE], tl.float32)
    sums = (tl.zeros([BM], tl.float32), tl.full([BM], LOWEST, tl.float32))
    low, lead, count, first, last, begin, end = window_of(tile * BM + shift, back, ahead, wide, m, BM, BN)
    rows += lead
    if FORM == ONE_LOOP:
        for z in range(first, last):
            j = tokens_at(low, z * BN + c, m)
            k = load_tile_transposed(K, j, skn, D, BD)
            v = load_tile(V, j, svn, E, BE)
            s = tl.dot(q, k, input_precision=PRECISION)
            if (z < begin) | (z >= end):
                s = hide_pairs(s, rows, z * BN + c, low, count, m)
            p, fade, sums = add_scores(sums, s)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    else:
        if FORM == AHEAD_FORM:
            next_key = tl.where(begin < end, begin * BN, 0)
            k = load_tile_transposed(K, tokens_at(low, next_key + c, m), skn, D, BD)
            s = tl.dot(q, k, input_precision=PRECISION)
            for z in range(begin, end):
                v = load_tile(V, low + z * BN + c, svn, E, BE)
                next_key = tl.where(z + 1 < end, (z + 1) * BN, 0)  # behind the last one: the first edge
                k = load_tile_transposed(K, tokens_at(low, next_key + c, m), skn, D, BD)
                s_next = tl.dot(q, k, input_precision=PRECISION)
                p, fade, sums = add_scores(sums, s)
                acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
                s = s_next
        else:
            for z in range(begin, end):
                j = low + z * BN + c
                k = load_tile_transposed(K, j, skn, D, BD)
                v = load_tile(V, j, svn, E, BE)
                p, fade, sums = add_scores(sums, tl.dot(q, k, input_precision=PRECISION))
                acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        if FORM == 3:
            for x in range(first, last - (end - begin)):
                z = x + tl.where(x < begin, 0, end - begin)
                j = tokens_at(low, z * BN + c, m)
                k = load_tile_transposed(K, j, skn, D, BD)
                v = load_tile(V, j, svn, E, BE)
                s = hide_pairs(tl.dot(q, k, input_precision=PRECISION), rows, z * BN + c, low, count, m)
                p, fade, sums = add_scores(sums, s)
                acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        else:
            whole = (low >= 0) & (low + wide + tl.maximum(BM, BN) <= m)
            for e in tl.static_range(0, BM, BN):
                o = e + c
                j = tokens_at(low, o, m)
                late = tokens_at(low, o + wide, m)
                if FORM != AHEAD_FORM or e > 0:
                    s = tl.dot(q, load_tile_transposed(K, j, skn, D, BD), input_precision=PRECISION)
                s_late = tl.dot(q, load_tile_transposed(K, late, skn, D, BD), input_precision=PRECISION)
                near = o[None, :] >= rows[:, None]
                s_late = tl.where(o[None, :] < (rows + count - wide)[:, None], s_late, float("-inf"))
                s = tl.where(near, s, s_late)
                if not whole:
                    s = hide_ends(s, near, low, o, wide, m)
                p, fade, sums = add_scores(sums, s)
                v = load_tile(V, j, svn, E, BE)
                acc = tl.dot(tl.where(near, p, 0.0).to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
                v = load_tile(V, late, svn, E, BE)
                acc = tl.dot(tl.where(near, 0.0, p).to(v.dtype), v, acc, input_precision=PRECISION)
            for x in range(0, 2):  # tiles across an end of the sequence
                z = tl.where(x == 0, begin - 1, end)
                if (z >= tl.maximum(BM // BN, 1)) & (z < tl.minimum(wide // BN, last)):
                    j = tokens_at(low, z * BN + c, m)
                    k = load_tile_transposed(K, j, skn, D, BD)
                    s = hide_pairs(tl.dot(q, k, input_precision=PRECISION), rows, z * BN + c, low, count, m)
                    p, fade, sums = add_scores(sums, s)
                    v = load_tile(V, j, svn, E, BE)
                    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    total, top = sums
    some = total > 0
    total = tl.where(some, total, 1.0)
    store_tile(OUT + b * sob + h * soh, i, son, n, acc / total[:, None], E, BE)
    lse = tl.where(some, (top + tl.log2(total)) * LN2, LOWEST)
    tl.store(LSE + (b * H + h) * n + i, lse, mask=i < n)
