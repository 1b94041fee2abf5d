"""Triton kernels of tile attention: a band by arithmetic, other pairs by lists of tiles, any length, no atomics.

A program owns a tile of queries (forward, gradient of q) or of keys (gradients of k and v) and walks the tiles it meets:

    a band       low <= j <= high for every query i: loop bounds from the number of the tile, one comparison for each pair
    a list       numbers of tiles, first those that hold all their pairs, then those with a mask of one bit for each pair

Items tell a program what to compute where that is not the same arithmetic for all: see `regard.patterns.tile_list`. With STEPPED,
programs work inside residue classes: token = first + step * number, and distances are counted in steps.

Scores are in base 2: exp2 and log2 are one instruction. A masked score is -inf and a running maximum is finite, so no NaN
arises. Rows behind the end are read as the last row and masked: loads need no condition. Only operands that were loaded are
transposed: Triton 3.6 miscompiles products with a transposed accumulator on Hopper cards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_classes import (
    FIRST_CLASS,
    LAST_CLASS,
    add_by_class,
    collect_classes,
    load_pair,
    near_tiles,
    store_pair,
)
from regard.ops.triton_math import LN2, LOG2E, hash_keeps

LOWEST = tl.constexpr(-1.0e30)
NOWHERE = tl.constexpr(1 << 30)
LIST_TILE = tl.constexpr(64)  # queries and keys of a tile of a list
# Compiled for all values:
RUN_TIME_NUMBERS = ("n", "m", "t", "u", "back", "ahead", "hole_back", "hole_ahead", "step", "tiles", "slots", "clip")
FIELDS = tl.constexpr(8)  # numbers of an item
BAND_MASK = tl.constexpr(1)  # what hides pairs of a tile: the range of keys of a query
BITS_MASK = tl.constexpr(2)  # or a bit for each pair; 0: nothing


@triton.jit
def load_tile(P, rows, stride, C: tl.constexpr, BC: tl.constexpr):
    """Load rows (r) of a matrix with C columns as (r BC)."""
    c = tl.arange(0, BC)
    at = P + rows[:, None] * stride + c[None, :]
    if BC > C:
        x = tl.load(at, mask=c[None, :] < C, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def load_tile_transposed(P, rows, stride, C: tl.constexpr, BC: tl.constexpr):
    """Load rows (r) of a matrix with C columns, transposed: (BC r)."""
    c = tl.arange(0, BC)
    at = P + rows[None, :] * stride + c[:, None]
    if BC > C:
        x = tl.load(at, mask=c[:, None] < C, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def store_tile(P, rows, stride, end, x, C: tl.constexpr, BC: tl.constexpr):
    """Store (r BC) into rows of a matrix with C columns, except behind the end."""
    c = tl.arange(0, BC)
    at = P + rows[:, None] * stride + c[None, :]
    tl.store(at, x.to(P.dtype.element_ty), mask=(rows[:, None] < end) & (c[None, :] < C))


@triton.jit
def store_part(PART, number, x, B: tl.constexpr, BC: tl.constexpr):
    """Store (B BC) as one of the parts that are merged afterwards."""
    rows = number.to(tl.int64) * B + tl.arange(0, B)
    tl.store(PART + rows[:, None] * BC + tl.arange(0, BC)[None, :], x)


@triton.jit
def inside_range(x, low, width):
    """Return where low <= x <= low + width, by one comparison of unsigned integers."""
    return (x - low).to(tl.uint32) <= width.to(tl.uint32)


@triton.jit
def closed_range(low, high):
    """Return the begin and the width of a range, such that an empty one holds no number."""
    empty = high < low
    return tl.where(empty, NOWHERE, low), tl.where(empty, 0, high - low)


@triton.jit
def locate(ITEMS, back, ahead, t, u, n, m, H, tiles, step, ITEMISED: tl.constexpr, SHARED: tl.constexpr, STEPPED: tl.constexpr):
    """Return what a program computes: row of the batch, head, tile, entries of its list, slot, band, and its residue class.

    The class: first query and key, numbers of queries and keys, steps between the first ones, and the step.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1)
    b = row // H
    h = row % H
    first = 0
    middle = 0
    last = 0
    slot = -1
    if ITEMISED:
        item = ITEMS + tile * FIELDS
        tile = tl.load(item + 1)
        first = tl.load(item + 2)
        middle = tl.load(item + 3)
        last = tl.load(item + 4)
        slot = tl.load(item + 5)
        back = tl.load(item + 6)
        ahead = tl.load(item + 7)
        if not SHARED:
            b = row
            h = tl.load(item)
    if STEPPED:
        number = tile // tiles
        tile = tile % tiles
        first_query = (number - t % step + step) % step
        first_key = (number - u % step + step) % step
        queries = (n - first_query + step - 1) // step
        keys = (m - first_key + step - 1) // step
        shift = (t - u + first_query - first_key) // step  # exact
    else:
        first_query = 0
        first_key = 0
        queries = n
        keys = m
        shift = t - u
        step = 1
    place = (b.to(tl.int64), h.to(tl.int64), tile, first, middle, last, slot)
    return place, (back, ahead), (first_query, first_key, queries, keys, shift, step)


@triton.jit
def band_of_queries(x, band, hole, residue):
    """Return the keys that each query number x may see, and those of the hole: begin and width of both ranges."""
    back, ahead = band
    hole_back, hole_ahead = hole
    _, _, _, keys, shift, _ = residue
    low, width = closed_range(tl.maximum(x + shift - back, 0), tl.minimum(x + shift + ahead, keys - 1))
    hole_low, hole_width = closed_range(x + shift - hole_back, x + shift + hole_ahead)
    return low, width, hole_low, hole_width


@triton.jit
def scores_of_keys(q, k, x, y, ranges, word, valid, slope, BY_QUERY, lines, shift, step, clip, SIDE: tl.constexpr,
                   MASK: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr, CLASSED: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Return the scores (queries keys) of a tile, hidden pairs -inf. ranges: those of the queries; word (queries): 32 bits."""
    low, width, hole_low, hole_width = ranges
    s = tl.dot(q, k, input_precision=PRECISION)
    if SLOPED:
        s -= slope * tl.abs((x[:, None] - y[None, :] + shift) * step).to(tl.float32)
    if CLASSED:
        s = add_by_class(s, BY_QUERY, lines, LOG2E, x[:, None], y[None, :], shift, step, clip, SIDE)
    if MASK == BAND_MASK:
        s = tl.where(inside_range(y[None, :], low[:, None], width[:, None]), s, float("-inf"))
    if MASK == BITS_MASK:
        s = tl.where(((word[:, None] >> (y % 32)[None, :]) & 1) != 0, s, float("-inf"))
    if HOLE:
        s = tl.where(inside_range(y[None, :], hole_low[:, None], hole_width[:, None]), float("-inf"), s)
    if VALIDS:
        s = tl.where(valid[None, :], s, float("-inf"))
    return s


@triton.jit
def forward_step(sums, own, at, classes, y, word, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                 SIDE: tl.constexpr, MASK: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr,
                 SLOPED: tl.constexpr, CLASSED: tl.constexpr, MASSED: tl.constexpr, DROP: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Add the keys number y to the sums of a tile of queries: outputs (BM BE), weights, largest score, outer classes (BM)."""
    acc, total, top, first, last = sums
    q, x, ranges, query_keys, slope, threshold = own
    BY_QUERY, INNER, lines, inside, clip = classes
    K, V, VALID, KEYS, skn, svn, first_key, shift, step, m = at
    j = tl.minimum(first_key + y * step, m - 1)
    k = load_tile_transposed(K, j, skn, D, BD)
    v = load_tile(V, j, svn, E, BE)
    valid = y < 0
    if VALIDS:
        valid = tl.load(VALID + j) != 0
    s = scores_of_keys(q, k, x, y, ranges, word, valid, slope, BY_QUERY, lines, shift, step, clip,
                       SIDE, MASK, HOLE, VALIDS, SLOPED, CLASSED, PRECISION)  # fmt: skip
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    fade = tl.exp2(top - new)
    total = total * fade + tl.sum(p, 1)
    if DROP:
        keep = hash_keeps(query_keys[:, None], tl.load(KEYS + j)[None, :], threshold)
        p = tl.where(keep, p, 0.0)
        if MASSED:
            s = tl.where(keep, s, float("-inf"))
    if MASSED:
        first, last = collect_classes(
            first * fade, last * fade, p, s, s, INNER, lines, inside, x[:, None], y[None, :], shift, step, clip, SIDE
        )
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, total, new, first, last


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def tile_forward(Q, K, V, OUT, LSE, VALID, SLOPES, QUERY_KEYS, KEY_KEYS, ITEMS, ENTRIES, MASKS, BY_QUERY,
                 PART, PART_LSE, INNER, OUTER, PART_OUTER, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son,
                 n, m, t, u, back, ahead, hole_back, hole_ahead, step, clip, scale, threshold, kept, H, tiles, slots,
                 R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, ITEMISED: tl.constexpr, SHARED: tl.constexpr,
                 MORE: tl.constexpr, STEPPED: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr,
                 CLASSED: tl.constexpr, MASSED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the outputs and log-sum-exp of one tile of queries. With MORE, what is there already counts too.

    With MASSED, also the scores of kept pairs by inner class, and the weights of the outer classes: see `write_masses`.
    """
    place, band, residue = locate(ITEMS, back, ahead, t, u, n, m, H, tiles, step, ITEMISED, SHARED, STEPPED)
    b, h, tile, first, middle, last, slot = place
    back, ahead = band
    first_query, first_key, queries, keys, shift, step = residue
    g = h // R
    line = (b * H + h) * n
    rows = tl.arange(0, BM)
    x = tile * BM + rows
    i = first_query + x * step
    here = tl.minimum(i, n - 1)
    q = load_tile(Q + b * sqb + h * sqh, here, sqn, D, BD)
    q = (q * (scale * LOG2E)).to(q.dtype)
    slope = 0.0
    if SLOPED:
        slope = tl.load(SLOPES + h) * LOG2E
    query_keys = rows
    if DROP:
        query_keys = tl.load(QUERY_KEYS + line + here)
    ranges = band_of_queries(x, band, (hole_back, hole_ahead), residue)
    acc = tl.zeros([BM, BE], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], LOWEST, tl.float32)
    OUT += b * sob + h * soh
    if MORE:
        acc = load_tile(OUT, here, son, E, BE).to(tl.float32) / kept
        top = tl.load(LSE + line + here) * LOG2E
        total += tl.where(top > LOWEST, 1.0, 0.0)
    classes = (BY_QUERY, INNER, i, i, clip)
    outer_first = tl.zeros([BM], tl.float32)
    outer_last = outer_first
    if CLASSED or MASSED:
        first_line = line * (2 * clip + 1)
        lines = (here * (2 * clip + 1))[:, None]
        classes = (BY_QUERY + first_line, INNER + first_line, lines, (i < n)[:, None], clip)
        if MORE and MASSED:
            outer_first, outer_last = load_pair(OUTER, line + here)
    own = (q, x, ranges, query_keys, slope, threshold)
    at = (K + b * skb + g * skh, V + b * svb + g * svh, VALID + b * m, KEY_KEYS, skn, svn, first_key, shift, step, m)
    y0 = tl.arange(0, BN)
    low = tl.maximum(tile * BM + shift - back, 0) // BN * BN
    high = tl.minimum(tile * BM + BM + shift + ahead, keys)
    sums = (acc, total, top, outer_first, outer_last)
    if CLASSED or MASSED:
        begin, end = near_tiles(tile * BM + shift, tile * BM + BM - 1 + shift, clip, step, low, high, BN)
        for j0 in range(low, begin, BN):
            sums = forward_step(sums, own, at, classes, j0 + y0, rows, D, E, BD, BE,
                                LAST_CLASS, 1, HOLE, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
        for j0 in range(end, high, BN):
            sums = forward_step(sums, own, at, classes, j0 + y0, rows, D, E, BD, BE,
                                FIRST_CLASS, 1, HOLE, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
        low = begin
        high = end
    for j0 in range(low, high, BN):
        sums = forward_step(sums, own, at, classes, j0 + y0, rows, D, E, BD, BE,
                            0, 1, HOLE, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
    if ITEMISED:
        y0 = tl.arange(0, LIST_TILE // SUB)
        for z in range(first * SUB, middle * SUB):
            j0 = tl.load(ENTRIES + z // SUB * 2) * LIST_TILE + z % SUB * (LIST_TILE // SUB)
            sums = forward_step(sums, own, at, classes, j0 + y0, rows, D, E, BD, BE,
                                0, 0, False, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
        for z in range(middle * SUB, last * SUB):
            entry = ENTRIES + z // SUB * 2
            j0 = tl.load(entry) * LIST_TILE + z % SUB * (LIST_TILE // SUB)
            word = tl.load(MASKS + (tl.load(entry + 1) * 2 + z % SUB * (LIST_TILE // SUB) // 32) * LIST_TILE + rows)
            sums = forward_step(sums, own, at, classes, j0 + y0, word, D, E, BD, BE,
                                0, 2, False, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
    acc, total, top, outer_first, outer_last = sums
    some = total > 0
    whole = tl.where(some, total, 1.0)
    outer_first = outer_first / whole
    outer_last = outer_last / whole
    out = acc * (kept / whole)[:, None]
    lse = tl.where(some, (top + tl.log2(whole)) * LN2, LOWEST)
    if slot >= 0:
        number = tl.program_id(1) * slots + slot
        store_part(PART, number, out, BM, BE)
        tl.store(PART_LSE + number.to(tl.int64) * BM + rows, lse)
        if MASSED:
            store_pair(PART_OUTER, number.to(tl.int64) * BM + rows, outer_first, outer_last, rows >= 0)
    else:
        store_tile(OUT, i, son, n, out, E, BE)
        tl.store(LSE + line + i, lse, mask=i < n)
        if MASSED:
            store_pair(OUTER, line + i, outer_first, outer_last, i < n)
