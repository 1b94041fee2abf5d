"""Triton kernels of the gradients of tile attention: one for queries, one for keys and values; see `triton_kernels`.

    P = exp2(S - lse),   dV = P^T dO,   dS = P (dO V^T - pull),   dQ = scale dS K,   dK = scale dS^T Q

with pull_i = dO_i . O_i - dlse_i. The kernel of queries runs first and writes pull. Keys compute S^T = K Q^T directly.
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
from regard.ops.tile.triton_kernels import (
    BAND_MASK,
    BITS_MASK,
    LIST_TILE,
    LOWEST,
    RUN_TIME_NUMBERS,
    band_of_queries,
    closed_range,
    inside_range,
    load_tile,
    load_tile_transposed,
    locate,
    scores_of_keys,
    store_part,
    store_tile,
)
from regard.ops.triton_math import LOG2E, hash_keeps


@triton.jit
def query_step(sums, own, at, classes, y, word, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
               SIDE: tl.constexpr, MASK: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr,
               SLOPED: tl.constexpr, CLASSED: tl.constexpr, MASSED: tl.constexpr, DROP: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """Add what the keys number y give to the gradients of a tile of queries and of their outer classes."""
    dq, first, last = sums
    BY_QUERY, INNER, lines, inside, MASSES, mass_lines, clip = classes
    q, x, ranges, query_keys, slope, threshold, kept, d_out, lse, pull = own
    K, V, VALID, KEYS, skn, svn, first_key, shift, step, m = at
    j = tl.minimum(first_key + y * step, m - 1)
    k = load_tile_transposed(K, j, skn, D, BD)
    v = load_tile_transposed(V, j, svn, E, BE)
    valid = y < 0
    if VALIDS:
        valid = tl.load(VALID + j) != 0
    s = scores_of_keys(q, k, x, y, ranges, word, valid, slope, BY_QUERY, lines, shift, step, clip,
                       SIDE, MASK, HOLE, VALIDS, SLOPED, CLASSED, PRECISION)  # fmt: skip
    p = tl.exp2(s - lse[:, None])
    dp = tl.dot(d_out, v, input_precision=PRECISION)
    if MASSED:
        dp = add_by_class(dp, MASSES, mass_lines, 1.0, x[:, None], y[None, :], shift, step, clip, SIDE)
    if DROP:
        dp = tl.where(hash_keeps(query_keys[:, None], tl.load(KEYS + j)[None, :], threshold), dp * kept, 0.0)
    ds = p * (dp - pull[:, None])
    if CLASSED:
        first, last = collect_classes(
            first, last, ds, ds, s, INNER, lines, inside, x[:, None], y[None, :], shift, step, clip, SIDE
        )
    dq = tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    return dq, first, last


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def query_gradients(Q, K, V, OUT, LSE, D_OUT, D_LSE, PULL, DQ, VALID, SLOPES, QUERY_KEYS, KEY_KEYS, ITEMS, ENTRIES, MASKS,
                    BY_QUERY, PART, INNER, OUTER, PART_OUTER,
                    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, sdb, sdh, sdn, sgb, sgh, sgn,
                    n, m, t, u, back, ahead, hole_back, hole_ahead, step, clip, scale, threshold, kept, H, tiles, slots,
                    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
                    ITEMISED: tl.constexpr, SHARED: tl.constexpr,
                    MORE: tl.constexpr, STEPPED: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr,
                    CLASSED: tl.constexpr, MASSED: tl.constexpr, DROP: tl.constexpr, LSES: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradient of one tile of queries, and their pull. With MORE, it is added to what is there.

    With CLASSED, also the gradients of their numbers by class: inner classes, and the sums of the two outer ones.
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
    d_out = load_tile(D_OUT + b * sdb + h * sdh, here, sdn, E, BE)
    out = load_tile(OUT + b * sob + h * soh, here, son, E, BE)
    pull = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if LSES:
        pull -= tl.load(D_LSE + line + here)
    tl.store(PULL + line + i, pull, mask=i < n)
    lse = tl.load(LSE + line + here)
    lse = tl.where(lse > LOWEST, lse * LOG2E, -LOWEST)  # a row without pairs: all its weights come out 0
    slope = 0.0
    if SLOPED:
        slope = tl.load(SLOPES + h) * LOG2E
    query_keys = rows
    if DROP:
        query_keys = tl.load(QUERY_KEYS + line + here)
    ranges = band_of_queries(x, band, (hole_back, hole_ahead), residue)
    own = (q, x, ranges, query_keys, slope, threshold, kept, d_out, lse, pull)
    at = (K + b * skb + g * skh, V + b * svb + g * svh, VALID + b * m, KEY_KEYS, skn, svn, first_key, shift, step, m)
    dq = tl.zeros([BM, BD], tl.float32)
    y0 = tl.arange(0, BN)
    low = tl.maximum(tile * BM + shift - back, 0) // BN * BN
    high = tl.minimum(tile * BM + BM + shift + ahead, keys)
    classes = (BY_QUERY, INNER, i, i, D_OUT, i, clip)
    if CLASSED or MASSED:
        first_line = line * (2 * clip + 1)
        lines = (here * (2 * clip + 1))[:, None]
        masses = D_OUT + b * sdb + h * sdh + E
        classes = (BY_QUERY + first_line, INNER + first_line, lines, (i < n)[:, None], masses, (here * sdn)[:, None], clip)
    zero = tl.zeros([BM], tl.float32)
    sums = (dq, zero, zero)
    if CLASSED or MASSED:
        begin, end = near_tiles(tile * BM + shift, tile * BM + BM - 1 + shift, clip, step, low, high, BN)
        for j0 in range(low, begin, BN):
            sums = query_step(sums, own, at, classes, j0 + y0, rows, D, E, BD, BE,
                              LAST_CLASS, 1, HOLE, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
        for j0 in range(end, high, BN):
            sums = query_step(sums, own, at, classes, j0 + y0, rows, D, E, BD, BE,
                              FIRST_CLASS, 1, HOLE, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
        low = begin
        high = end
    for j0 in range(low, high, BN):
        sums = query_step(sums, own, at, classes, j0 + y0, rows, D, E, BD, BE,
                          0, 1, HOLE, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
    if ITEMISED:
        y0 = tl.arange(0, LIST_TILE // SUB)
        for z in range(first * SUB, middle * SUB):
            j0 = tl.load(ENTRIES + z // SUB * 2) * LIST_TILE + z % SUB * (LIST_TILE // SUB)
            sums = query_step(sums, own, at, classes, j0 + y0, rows, D, E, BD, BE,
                              0, 0, False, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
        for z in range(middle * SUB, last * SUB):
            entry = ENTRIES + z // SUB * 2
            j0 = tl.load(entry) * LIST_TILE + z % SUB * (LIST_TILE // SUB)
            word = tl.load(MASKS + (tl.load(entry + 1) * 2 + z % SUB * (LIST_TILE // SUB) // 32) * LIST_TILE + rows)
            sums = query_step(sums, own, at, classes, j0 + y0, word, D, E, BD, BE,
                              0, 2, False, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
    dq, outer_first, outer_last = sums
    dq = dq * scale
    DQ += b * sgb + h * sgh
    if slot >= 0:
        number = tl.program_id(1) * slots + slot
        store_part(PART, number, dq, BM, BD)
        if CLASSED:
            store_pair(PART_OUTER, number.to(tl.int64) * BM + rows, outer_first, outer_last, rows >= 0)
    else:
        if MORE:
            dq += load_tile(DQ, here, sgn, D, BD).to(tl.float32)
        if CLASSED:
            if MORE:
                before_first, before_last = load_pair(OUTER, line + here)
                outer_first += before_first
                outer_last += before_last
            store_pair(OUTER, line + i, outer_first, outer_last, i < n)
        store_tile(DQ, i, sgn, n, dq, D, BD)


@triton.jit
def key_step(dk, dv, own, at, classes, x, words, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
             SIDE: tl.constexpr, MASK: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr,
             SLOPED: tl.constexpr, CLASSED: tl.constexpr, MASSED: tl.constexpr, DROP: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Add what the queries number x give to the gradients of a tile of keys and values. Scores are transposed: (keys queries)."""
    k, v, y, ranges, key_keys, valid, slope, threshold, kept, scale = own
    Q, D_OUT, LSE, PULL, QUERY_KEYS, sqn, sdn, first_query, shift, step, n = at
    BY_QUERY, clip = classes
    low, width, hole_low, hole_width = ranges
    i = tl.minimum(first_query + x * step, n - 1)
    q = load_tile_transposed(Q, i, sqn, D, BD)
    d_out = load_tile(D_OUT, i, sdn, E, BE)
    lse = tl.load(LSE + i)
    lse = tl.where(lse > LOWEST, lse * LOG2E, -LOWEST)
    pull = tl.load(PULL + i)
    s = tl.dot(k, q, input_precision=PRECISION) * (scale * LOG2E)
    if SLOPED:
        s -= slope * tl.abs((x[None, :] - y[:, None] + shift) * step).to(tl.float32)
    if CLASSED:
        s = add_by_class(s, BY_QUERY, (i * (2 * clip + 1))[None, :], LOG2E, x[None, :], y[:, None], shift, step, clip, SIDE)
    if MASK == BAND_MASK:
        s = tl.where(inside_range(x[None, :], low[:, None], width[:, None]), s, float("-inf"))
    if MASK == BITS_MASK:
        early, late = words
        word = tl.where((y % LIST_TILE < 32)[:, None], early[None, :], late[None, :])
        s = tl.where(((word >> (y % 32)[:, None]) & 1) != 0, s, float("-inf"))
    if HOLE:
        s = tl.where(inside_range(x[None, :], hole_low[:, None], hole_width[:, None]), float("-inf"), s)
    if VALIDS:
        s = tl.where(valid[:, None], s, float("-inf"))
    p = tl.exp2(s - lse[None, :])
    dp = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    if MASSED:
        dp = add_by_class(dp, D_OUT + E, (i * sdn)[None, :], 1.0, x[None, :], y[:, None], shift, step, clip, SIDE)
    if DROP:
        keep = hash_keeps(tl.load(QUERY_KEYS + i)[None, :], key_keys[:, None], threshold)
        dp = tl.where(keep, dp * kept, 0.0)
        dv = tl.dot(tl.where(keep, p * kept, 0.0).to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    else:
        dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    ds = p * (dp - pull[None, :])
    dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def key_gradients(Q, K, V, LSE, D_OUT, PULL, DK, DV, VALID, SLOPES, QUERY_KEYS, KEY_KEYS, ITEMS, ENTRIES, MASKS,
                  BY_QUERY, PART_K, PART_V,
                  sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, sgb, sgh, sgn, swb, swh, swn,
                  n, m, t, u, back, ahead, hole_back, hole_ahead, step, clip, scale, threshold, kept, H, G, tiles, slots,
                  R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
                  ITEMISED: tl.constexpr, SHARED: tl.constexpr,
                  MORE: tl.constexpr, STEPPED: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr,
                  CLASSED: tl.constexpr, MASSED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradients of one tile of keys and values, summed over the query heads that share them."""
    place, band, residue = locate(ITEMS, back, ahead, t, u, n, m, G, tiles, step, ITEMISED, SHARED, STEPPED)
    b, g, tile, first, middle, last, slot = place
    back, ahead = band
    first_query, first_key, queries, keys, shift, step = residue
    first_head = g * R
    last_head = g * R + R
    if ITEMISED:
        if not SHARED:  # the item is of one query head
            first_head = g
            last_head = g + 1
            g = g // R
    rows = tl.arange(0, BN)
    y = tile * BN + rows
    j = first_key + y * step
    here = tl.minimum(j, m - 1)
    k = load_tile(K + b * skb + g * skh, here, skn, D, BD)
    v = load_tile(V + b * svb + g * svh, here, svn, E, BE)
    valid = y < 0
    if VALIDS:
        valid = tl.load(VALID + b * m + here) != 0
    key_keys = rows
    if DROP:
        key_keys = tl.load(KEY_KEYS + here)
    low, width = closed_range(tl.maximum(y - shift - ahead, 0), tl.minimum(y - shift + back, queries - 1))
    hole_low, hole_width = closed_range(y - shift - hole_ahead, y - shift + hole_back)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    x0 = tl.arange(0, BM)
    start = tl.maximum(tile * BN - shift - ahead, 0) // BM * BM
    stop = tl.minimum(tile * BN + BN - shift + back, queries)
    for h in range(first_head, last_head):
        line = (b * H + h) * n
        slope = 0.0
        if SLOPED:
            slope = tl.load(SLOPES + h) * LOG2E
        own = (k, v, y, (low, width, hole_low, hole_width), key_keys, valid, slope, threshold, kept, scale)
        at = (Q + b * sqb + h * sqh, D_OUT + b * sdb + h * sdh, LSE + line, PULL + line, QUERY_KEYS + line,
              sqn, sdn, first_query, shift, step, n)  # fmt: skip
        none = (x0, x0)
        classes = (BY_QUERY, clip)
        if CLASSED:
            classes = (BY_QUERY + line * (2 * clip + 1), clip)
        begin = start
        end = stop
        if CLASSED or MASSED:
            begin, end = near_tiles(tile * BN - shift, tile * BN + BN - 1 - shift, clip, step, start, stop, BM)
            for i0 in range(start, begin, BM):
                dk, dv = key_step(dk, dv, own, at, classes, i0 + x0, none, D, E, BD, BE,
                                  FIRST_CLASS, 1, HOLE, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
            for i0 in range(end, stop, BM):
                dk, dv = key_step(dk, dv, own, at, classes, i0 + x0, none, D, E, BD, BE,
                                  LAST_CLASS, 1, HOLE, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
        for i0 in range(begin, end, BM):
            dk, dv = key_step(dk, dv, own, at, classes, i0 + x0, none, D, E, BD, BE,
                              0, 1, HOLE, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
        if ITEMISED:
            x2 = tl.arange(0, LIST_TILE // SUB)
            none = (x2, x2)
            for z in range(first * SUB, middle * SUB):
                i0 = tl.load(ENTRIES + z // SUB * 2) * LIST_TILE + z % SUB * (LIST_TILE // SUB)
                dk, dv = key_step(dk, dv, own, at, classes, i0 + x2, none, D, E, BD, BE,
                                  0, 0, False, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
            for z in range(middle * SUB, last * SUB):
                entry = ENTRIES + z // SUB * 2
                x1 = z % SUB * (LIST_TILE // SUB) + x2
                bits = MASKS + tl.load(entry + 1) * 2 * LIST_TILE + x1
                words = (tl.load(bits), tl.load(bits + LIST_TILE))
                i0 = tl.load(entry) * LIST_TILE
                dk, dv = key_step(dk, dv, own, at, classes, i0 + x1, words, D, E, BD, BE,
                                  0, 2, False, VALIDS, SLOPED, CLASSED, MASSED, DROP, PRECISION)  # fmt: skip
    dk = dk * scale
    DK += b * sgb + g * sgh
    DV += b * swb + g * swh
    if slot >= 0:
        number = tl.program_id(1) * slots + slot
        store_part(PART_K, number, dk, BN, BD)
        store_part(PART_V, number, dv, BN, BE)
    else:
        if MORE:
            dk += load_tile(DK, here, sgn, D, BD).to(tl.float32)
            dv += load_tile(DV, here, swn, E, BE).to(tl.float32)
        store_tile(DK, j, sgn, m, dk, D, BD)
        store_tile(DV, j, swn, m, dv, E, BE)
