"""Triton kernels of a plain window, low <= j <= high for every query: no padding, bias, dropout, lists or residue classes.

A program owns B rows. Row r meets N = back + ahead + 1 neighbours, the offsets r .. r + N - 1 from the first neighbour of row 0.
Tiles of S offsets begin there or one token before: all programs meet equally many. Those with all pairs inside need no mask.

    FORM 2    one loop, a mask where a scalar condition demands one
    FORM 3    a loop without masks, then one over the tiles at both edges of the window and at the ends of the sequence
    FORM 4    as 3, but offsets o and o + W of the two edges, W >= N, are one tile: no row meets both, so a score is chosen
              before the exponential and a weight after it; exponentials are taken of W offsets instead of W + B

`triton_kernels` computes all other cases, and these too: `form` 1 of a configuration.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_kernels import LOWEST, closed_range, inside_range, load_tile, load_tile_transposed, store_tile
from regard.ops.triton_math import LN2, LOG2E

BAND_NUMBERS = ("n", "m", "shift", "back", "ahead", "wide")  # compiled for all values
ONE_LOOP = tl.constexpr(2)
MERGED = tl.constexpr(4)


@triton.jit
def window_of(start, back, ahead, wide, length, B: tl.constexpr, S: tl.constexpr):
    """Return the token at offset 0, the lead of row 0, the offsets of a row, and tiles: first, last, begin and end.

    Tiles first .. last - 1 overlap the sequence, begin .. end - 1 need no mask. start: the token beside row 0. wide: W.
    With a lead of one token where W > N, the tiles between both edges need no mask if W = N + 1, as for |i - j| < W / 2. It is
    also there where tiles begin at multiples of S by it.
    """
    count = back + ahead + 1
    lead = tl.where((wide > count) | ((start - back - 1) % S == 0), 1, 0)
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
    begin, width = closed_range(tl.maximum(rows, -low), tl.minimum(rows + count, length - low) - 1)
    return tl.where(inside_range(offsets[None, :], begin[:, None], width[:, None]), s, float("-inf"))


@triton.jit
def hide_ends(s, near, low, offsets, wide, length):
    """Return merged scores with -inf for keys outside of the sequence; near: those that belong to the first of both edges."""
    early = low + offsets
    late = early + wide
    there = tl.where(near, ((early >= 0) & (early < length))[None, :], ((late >= 0) & (late < length))[None, :])
    return tl.where(there, s, float("-inf"))


@triton.jit
def add_scores(sums, s, factor):
    """Return the weights of a tile of scores, in units of 1 / factor, and how much the sums before it fade."""
    total, top = sums
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s * factor - (new * factor)[:, None])
    fade = tl.exp2((top - new) * factor)
    return p, fade, (total * fade + tl.sum(p, 1), new)


@triton.jit
def masked_tiles(acc, sums, q, K, V, rows, window, first, last, skip, skn, svn, factor, D: tl.constexpr, E: tl.constexpr,
                 BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add tiles first .. last - 1, except those of a range, with masks."""
    low, count, m = window
    begin, end = skip
    for x in range(first, last - (end - begin)):
        offsets = (x + tl.where(x < begin, 0, end - begin)) * BN + tl.arange(0, BN)
        j = tokens_at(low, offsets, m)
        k = load_tile_transposed(K, j, skn, D, BD)
        v = load_tile(V, j, svn, E, BE)
        s = hide_pairs(tl.dot(q, k, input_precision=PRECISION), rows, offsets, low, count, m)
        p, fade, sums = add_scores(sums, s, factor)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, sums


@triton.jit
def merged_edges(acc, sums, q, K, V, rows, window, e, wide, skn, svn, factor, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                 BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add the tiles at offsets e and e + wide as one: a row meets an offset of the first, or of the second, or neither."""
    low, count, m = window
    o = e + tl.arange(0, BN)
    j = tokens_at(low, o, m)
    late = tokens_at(low, o + wide, m)
    near = o[None, :] >= rows[:, None]
    s = tl.dot(q, load_tile_transposed(K, late, skn, D, BD), input_precision=PRECISION)
    s = tl.where(o[None, :] < (rows + count - wide)[:, None], s, float("-inf"))
    s = tl.where(near, tl.dot(q, load_tile_transposed(K, j, skn, D, BD), input_precision=PRECISION), s)
    if (low < 0) | (low + wide + tl.maximum(BM, BN) > m):
        s = hide_ends(s, near, low, o, wide, m)
    p, fade, sums = add_scores(sums, s, factor)
    v = load_tile(V, j, svn, E, BE)
    acc = tl.dot(tl.where(near, p, 0.0).to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    v = load_tile(V, late, svn, E, BE)
    acc = tl.dot(tl.where(near, 0.0, p).to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, sums


@triton.jit(do_not_specialize=BAND_NUMBERS)
def band_forward(Q, K, V, OUT, LSE, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son,
                 n, m, shift, back, ahead, wide, scale, H, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                 BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Write the outputs and log-sum-exp of one tile of queries. scale > 0: the largest product has the largest score."""
    tile = tl.program_id(0)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    rows = tl.arange(0, BM)
    c = tl.arange(0, BN)
    i = tile * BM + rows
    q = load_tile(Q + b * sqb + h * sqh, tl.minimum(i, n - 1), sqn, D, BD)
    factor = scale * LOG2E
    K += b * skb + h // R * skh
    V += b * svb + h // R * svh
    acc = tl.zeros([BM, BE], tl.float32)
    sums = (tl.zeros([BM], tl.float32), tl.full([BM], LOWEST, tl.float32))
    low, lead, count, first, last, begin, end = window_of(tile * BM + shift, back, ahead, wide, m, BM, BN)
    rows += lead
    window = (low, count, m)
    if FORM == ONE_LOOP:
        for z in range(first, last):
            j = tokens_at(low, z * BN + c, m)
            k = load_tile_transposed(K, j, skn, D, BD)
            v = load_tile(V, j, svn, E, BE)
            s = tl.dot(q, k, input_precision=PRECISION)
            if (z < begin) | (z >= end):
                s = hide_pairs(s, rows, z * BN + c, low, count, m)
            p, fade, sums = add_scores(sums, s, factor)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    if FORM == MERGED:
        for e in tl.range(0, BM, BN, num_stages=1):
            acc, sums = merged_edges(acc, sums, q, K, V, rows, window, e, wide, skn, svn, factor,
                                     D, E, BD, BE, BM, BN, PRECISION)  # fmt: skip
        first = tl.maximum(first, max(BM // BN, 1))
        last = tl.maximum(tl.minimum(last, wide // BN), first)
        begin = tl.minimum(begin, last)
        end = tl.minimum(tl.maximum(end, begin), last)
    if FORM != ONE_LOOP:
        for z in range(begin, end):
            j = low + z * BN + c
            k = load_tile_transposed(K, j, skn, D, BD)
            v = load_tile(V, j, svn, E, BE)
            p, fade, sums = add_scores(sums, tl.dot(q, k, input_precision=PRECISION), factor)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        acc, sums = masked_tiles(acc, sums, q, K, V, rows, window, first, last, (begin, end), skn, svn, factor,
                                 D, E, BD, BE, BN, PRECISION)  # fmt: skip
    total, top = sums
    some = total > 0
    total = tl.where(some, total, 1.0)
    store_tile(OUT + b * sob + h * soh, i, son, n, acc / total[:, None], E, BE)
    lse = tl.where(some, top * scale + tl.log2(total) * LN2, LOWEST)
    tl.store(LSE + (b * H + h) * n + i, lse, mask=i < n)
