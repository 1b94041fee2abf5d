"""Triton kernels of a window, low <= j <= high for every query, alone or with leading global tokens: no padding, bias or dropout.

A program owns B rows. Row r meets N = back + ahead + 1 neighbours, the offsets r .. r + N - 1 from the first neighbour of row 0.
Tiles of S offsets begin there or one token before. One loop walks them, with a mask where a scalar condition demands one: those
with all pairs inside need none.

With LEADS, there are two kinds of leading tokens beside the window, and no list or table:

    common    tokens that all rows meet: tiles before those of the window, with the tokens before the window of each row
    whole     rows that meet all tokens: programs of their own, each of which walks a piece of ROOM tokens; `triton_edges` merges

Programs of windows compute whole rows too, what they write for them is replaced. `triton_kernels` computes all other cases.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_kernels import LOWEST, closed_range, inside_range, load_tile, load_tile_transposed, store_tile
from regard.ops.triton_math import LN2, LOG2E

BAND_NUMBERS = ("n", "m", "shift", "back", "ahead", "common", "whole", "reach", "pieces")  # compiled for all values
ENDLESS = tl.constexpr(1 << 29)  # more tokens than there are


@triton.jit
def window_of(start, back, ahead, length, B: tl.constexpr, S: tl.constexpr):
    """Return the token at offset 0, the lead of row 0, the offsets of a row, and tiles: first, last, begin and end.

    Tiles first .. last - 1 overlap the sequence, begin .. end - 1 need no mask. start: the token beside row 0.
    A lead of one token where N + 1 is a multiple of S, as for |i - j| < N / 2, leaves no mask to the tiles between both edges. It
    is also there where tiles begin at multiples of S by it.
    """
    count = back + ahead + 1
    lead = tl.where(((count + 1) % S == 0) | ((start - back - 1) % S == 0), 1, 0)
    low = start - back - lead
    behind = tl.maximum(length - low, 0)
    before = tl.maximum(-low, 0)
    last = tl.minimum((behind + S - 1) // S, (count + lead + B + S - 2) // S)
    first = tl.minimum(before // S, last)
    begin = tl.minimum((tl.maximum(before, B - 1 + lead) + S - 1) // S, last)
    end = tl.minimum(tl.maximum(tl.minimum(behind, count + lead) // S, begin), last)
    return low, lead, count, first, last, begin, end


@triton.jit
def piece_of(low, start, reach, length, B: tl.constexpr, S: tl.constexpr):
    """Return what `window_of` does, for rows that meet all tokens from `reach` before them on; low: the first of a piece."""
    lead = start - reach - low
    last = (length - low + S - 1) // S
    first = tl.minimum(tl.maximum(lead, 0) // S, last)
    begin = tl.minimum((tl.maximum(lead + B - 1, 0) + S - 1) // S, last)
    end = tl.maximum((length - low) // S, begin)
    return low, lead, tl.full([], ENDLESS, tl.int32), first, last, begin, end


@triton.jit
def own_tile(pieces, LEADS: tl.constexpr):
    """Return the tile of rows that a program owns, and its piece where that is one of the first programs; -1: the window."""
    tile = tl.program_id(0)
    piece = -1
    if LEADS:
        piece = tl.where(tile < pieces, tile, -1)
        tile = tl.maximum(tile - pieces, 0)
    return tile, piece


@triton.jit
def tokens_met(piece, start, back, ahead, common, reach, length, ROOM: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
               LEADS: tl.constexpr):  # fmt: skip
    """Return the lead of row 0, a range of tiles to walk, and what `offsets_of` and `hide_pairs` take."""
    low, lead, count, first, last, begin, end = window_of(start, back, ahead, length, B, S)
    extra = 0
    if LEADS:
        if piece >= 0:
            length = tl.minimum(piece * ROOM + ROOM, length)
            low, lead, count, first, last, begin, end = piece_of(piece * ROOM, start, reach, length, B, S)
        else:
            extra = tl.where(low + lead + B > 1, (common + S - 1) // S, 0)
    return lead, (first - extra, last), (low, count, length, common, first, extra, begin, end)


@triton.jit
def offsets_of(z, met, S: tl.constexpr, LEADS: tl.constexpr):
    """Return the offsets of the tokens of a tile."""
    low, _, _, _, first, extra, _, _ = met
    begin = z * S
    if LEADS:
        begin = tl.where(z < first, (z - first + extra) * S - low, begin)
    return begin + tl.arange(0, S)


@triton.jit
def tokens_at(low, offsets, length):
    """Return the numbers of the tokens at some offsets; those outside of the sequence are the nearest inside."""
    return tl.minimum(tl.maximum(low + offsets, 0), length - 1)


@triton.jit
def hide_pairs(s, rows, z, offsets, met, LEADS: tl.constexpr):
    """Return scores (rows offsets) of tile z with -inf for pairs outside of the window or the sequence."""
    low, count, length, common, first, _, _, _ = met
    begin = tl.maximum(rows, -low)
    end = tl.minimum(rows + count, length - low)
    if LEADS:
        begin = tl.where(z < first, -low, begin)
        end = tl.where(z < first, tl.minimum(rows, common - low), end)
    begin, width = closed_range(begin, end - 1)
    return tl.where(inside_range(offsets[None, :], begin[:, None], width[:, None]), s, float("-inf"))


@triton.jit
def add_scores(sums, s, factor):
    """Return the weights of a tile of scores, in units of 1 / factor, and how much the sums before it fade."""
    total, top = sums
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s * factor - (new * factor)[:, None])
    fade = tl.exp2((top - new) * factor)
    return p, fade, (total * fade + tl.sum(p, 1), new)


@triton.jit(do_not_specialize=BAND_NUMBERS)
def band_forward(Q, K, V, OUT, LSE, PART, PART_LSE, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son,
                 n, m, shift, back, ahead, common, whole, reach, pieces, scale, H,
                 R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr, LEADS: tl.constexpr, ROOM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the outputs and log-sum-exp of one tile of queries. scale > 0: the largest product has the largest score."""
    tile, piece = own_tile(pieces, LEADS)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    rows = tl.arange(0, BM)
    i = tile * BM + rows
    q = load_tile(Q + b * sqb + h * sqh, tl.minimum(i, n - 1), sqn, D, BD)
    factor = scale * LOG2E
    K += b * skb + h // R * skh
    V += b * svb + h // R * svh
    acc = tl.zeros([BM, BE], tl.float32)
    sums = (tl.zeros([BM], tl.float32), tl.full([BM], LOWEST, tl.float32))
    lead, walk, met = tokens_met(piece, tile * BM + shift, back, ahead, common, reach, m, ROOM, BM, BN, LEADS)
    low, _, end_of_keys, _, _, _, begin, end = met
    for z in range(walk[0], walk[1]):
        offsets = offsets_of(z, met, BN, LEADS)
        j = tokens_at(low, offsets, end_of_keys)
        k = load_tile_transposed(K, j, skn, D, BD)
        v = load_tile(V, j, svn, E, BE)
        s = tl.dot(q, k, input_precision=PRECISION)
        if (z < begin) | (z >= end):
            s = hide_pairs(s, rows + lead, z, offsets, met, LEADS)
        p, fade, sums = add_scores(sums, s, factor)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    total, top = sums
    some = total > 0
    total = tl.where(some, total, 1.0)
    out = acc / total[:, None]
    lse = tl.where(some, top * scale + tl.log2(total) * LN2, LOWEST)
    line = (b * H + h) * n
    if LEADS:
        if piece >= 0:
            number = (tl.program_id(1) * pieces + piece).to(tl.int64) * whole
            store_tile(PART + number * E, rows, E, whole, out, E, BE)
            tl.store(PART_LSE + number + rows, lse, mask=rows < whole)
            n = 0
    store_tile(OUT + b * sob + h * soh, i, son, n, out, E, BE)
    tl.store(LSE + line + i, lse, mask=i < n)
