"""Triton kernels of the gradients of tile attention: one for queries, one for keys and values; see `triton_kernels`.

    P = exp2(S - lse),   dV = P^T dO,   dS = P (dO V^T - pull),   dQ = scale dS K,   dK = scale dS^T Q

with pull_i = dO_i . O_i - dlse_i. The kernel of queries runs first and writes pull. Keys compute S^T = K Q^T directly.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def query_step(dq, own, at, y, word, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
               MASK: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr, DROP: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """Add what the keys number y give to the gradient of a tile of queries."""
    q, x, ranges, query_keys, slope, threshold, kept, d_out, lse, pull = own
    K, V, VALID, KEYS, skn, svn, first_key, shift, step, m = at
    j = tl.minimum(first_key + y * step, m - 1)
    k = load_tile_transposed(K, j, skn, D, BD)
    v = load_tile_transposed(V, j, svn, E, BE)
    valid = y < 0
    if VALIDS:
        valid = tl.load(VALID + j) != 0
    s = scores_of_keys(q, k, x, y, ranges, word, valid, slope, shift, step, MASK, HOLE, VALIDS, SLOPED, PRECISION)
    p = tl.exp2(s - lse[:, None])
    dp = tl.dot(d_out, v, input_precision=PRECISION)
    if DROP:
        dp = tl.where(hash_keeps(query_keys[:, None], tl.load(KEYS + j)[None, :], threshold), dp * kept, 0.0)
    ds = p * (dp - pull[:, None])
    return tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def query_gradients(Q, K, V, OUT, LSE, D_OUT, D_LSE, PULL, DQ, VALID, SLOPES, QUERY_KEYS, KEY_KEYS, ITEMS, ENTRIES, MASKS, PART,
                    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, sdb, sdh, sdn, sgb, sgh, sgn,
                    n, m, t, u, back, ahead, hole_back, hole_ahead, step, scale, threshold, kept, H, tiles, slots,
                    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
                    ITEMISED: tl.constexpr, SHARED: tl.constexpr,
                    MORE: tl.constexpr, STEPPED: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr,
                    DROP: tl.constexpr, LSES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradient of one tile of queries, and their pull. With MORE, it is added to what is there."""
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
    for j0 in range(low, high, BN):
        dq = query_step(dq, own, at, j0 + y0, rows, D, E, BD, BE, 1, HOLE, VALIDS, SLOPED, DROP, PRECISION)
    if ITEMISED:
        for z in range(first * SUB, middle * SUB):
            y = tl.load(ENTRIES + z // SUB * 2) * LIST_TILE + z % SUB * BN + y0
            dq = query_step(dq, own, at, y, rows, D, E, BD, BE, 0, False, VALIDS, SLOPED, DROP, PRECISION)
        for z in range(middle * SUB, last * SUB):
            entry = ENTRIES + z // SUB * 2
            y = tl.load(entry) * LIST_TILE + z % SUB * BN + y0
            word = tl.load(MASKS + (tl.load(entry + 1) * 2 + z % SUB * BN // 32) * LIST_TILE + rows)
            dq = query_step(dq, own, at, y, word, D, E, BD, BE, 2, False, VALIDS, SLOPED, DROP, PRECISION)
    dq = dq * scale
    DQ += b * sgb + h * sgh
    if slot >= 0:
        store_part(PART, tl.program_id(1) * slots + slot, dq, BM, BD)
    else:
        if MORE:
            dq += load_tile(DQ, here, sgn, D, BD).to(tl.float32)
        store_tile(DQ, i, sgn, n, dq, D, BD)


@triton.jit
def key_step(dk, dv, own, at, x, words, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
             MASK: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr, DROP: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Add what the queries number x give to the gradients of a tile of keys and values. Scores are transposed: (keys queries)."""
    k, v, y, ranges, key_keys, valid, slope, threshold, kept, scale = own
    Q, D_OUT, LSE, PULL, QUERY_KEYS, sqn, sdn, first_query, shift, step, n = at
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
def key_gradients(Q, K, V, LSE, D_OUT, PULL, DK, DV, VALID, SLOPES, QUERY_KEYS, KEY_KEYS, ITEMS, ENTRIES, MASKS, PART_K, PART_V,
                  sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, sgb, sgh, sgn, swb, swh, swn,
                  n, m, t, u, back, ahead, hole_back, hole_ahead, step, scale, threshold, kept, H, G, tiles, slots,
                  R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
                  ITEMISED: tl.constexpr, SHARED: tl.constexpr,
                  MORE: tl.constexpr, STEPPED: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr,
                  DROP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
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
    end = tl.minimum(tile * BN + BN - shift + back, queries)
    for h in range(first_head, last_head):
        line = (b * H + h) * n
        slope = 0.0
        if SLOPED:
            slope = tl.load(SLOPES + h) * LOG2E
        own = (k, v, y, (low, width, hole_low, hole_width), key_keys, valid, slope, threshold, kept, scale)
        at = (Q + b * sqb + h * sqh, D_OUT + b * sdb + h * sdh, LSE + line, PULL + line, QUERY_KEYS + line,
              sqn, sdn, first_query, shift, step, n)  # fmt: skip
        none = (x0, x0)
        for i0 in range(start, end, BM):
            dk, dv = key_step(dk, dv, own, at, i0 + x0, none, D, E, BD, BE, 1, HOLE, VALIDS, SLOPED, DROP, PRECISION)
        if ITEMISED:
            for z in range(first * SUB, middle * SUB):
                x = tl.load(ENTRIES + z // SUB * 2) * LIST_TILE + z % SUB * BM + x0
                dk, dv = key_step(dk, dv, own, at, x, none, D, E, BD, BE, 0, False, VALIDS, SLOPED, DROP, PRECISION)
            for z in range(middle * SUB, last * SUB):
                entry = ENTRIES + z // SUB * 2
                x1 = z % SUB * BM + x0
                bits = MASKS + tl.load(entry + 1) * 2 * LIST_TILE + x1
                words = (tl.load(bits), tl.load(bits + LIST_TILE))
                x = tl.load(entry) * LIST_TILE + x1
                dk, dv = key_step(dk, dv, own, at, x, words, D, E, BD, BE, 2, False, VALIDS, SLOPED, DROP, PRECISION)
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
