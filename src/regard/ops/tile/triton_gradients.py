"""Triton kernels of the gradients of tile attention: one for queries, one for keys and values; see `triton_kernels`.

    P = exp2(S - lse),   dV = P^T dO,   dS = P (dO V^T - pull),   dQ = scale dS K,   dK = scale dS^T Q

with pull_i = dO_i . O_i - dlse_i. The kernel of queries runs first and writes pull. Keys compute S^T = K Q^T directly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_kernels import (
    FIELDS,
    LOG2E,
    LOWEST,
    TILE,
    adjust_scores,
    band_keys,
    band_queries,
    kept_pairs,
    load_columns,
    load_rows,
    residue_class,
    store_rows,
)


@triton.jit
def query_step(dq, q, d_out, lse, pull, query_keys, K, V, VALID, KEYS, y, x, bits, skn, svn, first_key, step, keys, m, shift,
               back, ahead, hole_back, hole_ahead, slope, threshold, kept,
               D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, EDGE: tl.constexpr, LISTED: tl.constexpr,
               CHECK: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr, DROP: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """Add what the keys number y give to the gradient of the queries number x."""
    j = first_key + y * step
    k = load_columns(K, j, skn, m, D, BD, CHECK)
    v = load_columns(V, j, svn, m, E, BE, CHECK)
    s = tl.dot(q, k, input_precision=PRECISION)
    seen = y[None, :] < keys
    if VALIDS:
        seen = seen & (tl.load(VALID + j, mask=j < m, other=0) != 0)[None, :]
    if LISTED:
        seen = seen & (((bits[:, None] >> (y % TILE)[None, :].to(tl.int64)) & 1) != 0)
    apart = x[:, None] - y[None, :] + shift
    s = adjust_scores(
        s, apart, seen, slope, step, back, ahead, hole_back, hole_ahead, EDGE, HOLE, CHECK or VALIDS or LISTED, SLOPED
    )
    p = tl.exp2(s - lse[:, None])
    dp = tl.dot(d_out, v, input_precision=PRECISION)
    if DROP:
        key_keys = tl.load(KEYS + j, mask=j < m, other=0)
        dp = tl.where(kept_pairs(query_keys[:, None], key_keys[None, :], threshold), dp * kept, 0.0)
    ds = p * (dp - pull[:, None])
    return tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)


@triton.jit
def query_gradients(Q, K, V, O, LSE, D_OUT, D_LSE, PULL, DQ, VALID, SLOPES, QUERY_KEYS, KEY_KEYS, ITEMS, ENTRIES, MASKS, PART,
                    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, sdb, sdh, sdn, sgb, sgh, sgn,
                    n, m, t, u, back, ahead, hole_back, hole_ahead, step, scale, threshold, kept, H, tiles, slots,
                    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, BAND: tl.constexpr, ITEMISED: tl.constexpr, SHARED: tl.constexpr,
                    MORE: tl.constexpr, STEPPED: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr,
                    DROP: tl.constexpr, LSES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradient of one tile of queries, and their pull. With MORE, it is added to what is there."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = -1
    start = 0
    middle = 0
    end = 0
    if ITEMISED:
        item = ITEMS + tile * FIELDS
        tile = tl.load(item + 1)
        start = tl.load(item + 2)
        middle = tl.load(item + 3)
        end = tl.load(item + 4)
        slot = tl.load(item + 5)
        back = tl.load(item + 6)
        ahead = tl.load(item + 7)
        if SHARED:
            b = row // H
            h = row % H
        else:
            b = row
            h = tl.load(item)
    else:
        b = row // H
        h = row % H
    g = h // R
    if STEPPED:
        first_query, first_key, queries, keys, shift = residue_class(tile // tiles, t, u, n, m, step)
        tile = tile % tiles
    else:
        first_query = 0
        first_key = 0
        queries = n
        keys = m
        shift = t - u
        step = 1
    Q += b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
    K += b.to(tl.int64) * skb + g.to(tl.int64) * skh
    V += b.to(tl.int64) * svb + g.to(tl.int64) * svh
    O += b.to(tl.int64) * sob + h.to(tl.int64) * soh
    D_OUT += b.to(tl.int64) * sdb + h.to(tl.int64) * sdh
    DQ += b.to(tl.int64) * sgb + h.to(tl.int64) * sgh
    VALID += b.to(tl.int64) * m
    line = (b * H + h).to(tl.int64) * n
    m0 = tile * BM
    rows = tl.arange(0, BM)
    x = m0 + rows
    i = first_query + x * step
    q = load_rows(Q, i, sqn, n, D, BD, True)
    q = (q * (scale * LOG2E)).to(q.dtype)
    d_out = load_rows(D_OUT, i, sdn, n, E, BE, True)
    out = load_rows(O, i, son, n, E, BE, True)
    pull = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if LSES:
        pull -= tl.load(D_LSE + line + i, mask=i < n, other=0.0)
    tl.store(PULL + line + i, pull, mask=i < n)
    lse = tl.load(LSE + line + i, mask=i < n, other=LOWEST)
    lse = tl.where(lse > LOWEST, lse * LOG2E, -LOWEST)  # a row without pairs: all its weights come out 0
    slope = 0.0
    if SLOPED:
        slope = tl.load(SLOPES + h) * LOG2E
    query_keys = rows
    if DROP:
        query_keys = tl.load(QUERY_KEYS + line + i, mask=i < n, other=0)
    dq = tl.zeros([BM, BD], tl.float32)
    y0 = tl.arange(0, BN)
    none = x.to(tl.int64)
    if BAND:
        low, inner, outer, high = band_keys(m0, shift, back, ahead, keys, BM, BN)
        for j0 in range(low, inner, BN):
            dq = query_step(dq, q, d_out, lse, pull, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, none, skn, svn, first_key, step,
                            keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, kept, D, E, BD, BE,
                            True, False, True, HOLE, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
        for j0 in range(inner, outer, BN):
            dq = query_step(dq, q, d_out, lse, pull, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, none, skn, svn, first_key, step,
                            keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, kept, D, E, BD, BE,
                            False, False, False, HOLE, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
        for j0 in range(outer, high, BN):
            dq = query_step(dq, q, d_out, lse, pull, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, none, skn, svn, first_key, step,
                            keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, kept, D, E, BD, BE,
                            True, False, True, HOLE, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
    if ITEMISED:
        for z in range(start * SUB, middle * SUB):
            j0 = tl.load(ENTRIES + z // SUB * 2) * TILE + z % SUB * BN
            dq = query_step(dq, q, d_out, lse, pull, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, none, skn, svn, first_key, step,
                            keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, kept, D, E, BD, BE,
                            False, False, False, False, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
        for z in range(middle * SUB, end * SUB):
            entry = ENTRIES + z // SUB * 2
            j0 = tl.load(entry) * TILE + z % SUB * BN
            bits = tl.load(MASKS + tl.load(entry + 1) * TILE + rows)
            dq = query_step(dq, q, d_out, lse, pull, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, bits, skn, svn, first_key, step,
                            keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, kept, D, E, BD, BE,
                            False, True, True, False, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
    dq = dq * scale
    if slot >= 0:
        at = (row * slots + slot).to(tl.int64) * BM
        c = tl.arange(0, BD)
        tl.store(PART + (at + rows)[:, None] * BD + c[None, :], dq)
    else:
        if MORE:
            dq += load_rows(DQ, i, sgn, n, D, BD, True).to(tl.float32)
        store_rows(DQ, i, sgn, n, dq, D, BD)


@triton.jit
def key_step(dk, dv, k, v, key_keys, valid, Q, D_OUT, LSE, PULL, QUERY_KEYS, x, y, bits, sqn, sdn, first_query, step, queries, n, shift,
             back, ahead, hole_back, hole_ahead, slope, threshold, kept, scale,
             D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, EDGE: tl.constexpr, LISTED: tl.constexpr,
             CHECK: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr, DROP: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Add what the queries number x give to the gradients of the keys and values number y. Scores are transposed: (keys queries)."""
    i = first_query + x * step
    q = load_columns(Q, i, sqn, n, D, BD, CHECK)
    d_out = load_rows(D_OUT, i, sdn, n, E, BE, CHECK)
    lse = tl.load(LSE + i, mask=i < n, other=LOWEST)
    lse = tl.where(lse > LOWEST, lse * LOG2E, -LOWEST)
    pull = tl.load(PULL + i, mask=i < n, other=0.0)
    s = tl.dot(k, q, input_precision=PRECISION) * (scale * LOG2E)
    seen = x[None, :] < queries
    if VALIDS:
        seen = seen & valid[:, None]
    if LISTED:
        seen = seen & (((bits[None, :] >> (y % TILE)[:, None].to(tl.int64)) & 1) != 0)
    apart = x[None, :] - y[:, None] + shift
    s = adjust_scores(
        s, apart, seen, slope, step, back, ahead, hole_back, hole_ahead, EDGE, HOLE, CHECK or VALIDS or LISTED, SLOPED
    )
    p = tl.exp2(s - lse[None, :])
    dp = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    if DROP:
        query_keys = tl.load(QUERY_KEYS + i, mask=i < n, other=0)
        keep = kept_pairs(query_keys[None, :], key_keys[:, None], threshold)
        dp = tl.where(keep, dp * kept, 0.0)
        dv = tl.dot(tl.where(keep, p * kept, 0.0).to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    else:
        dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    ds = p * (dp - pull[None, :])
    dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradients(Q, K, V, LSE, D_OUT, PULL, DK, DV, VALID, SLOPES, QUERY_KEYS, KEY_KEYS, ITEMS, ENTRIES, MASKS, PART_K, PART_V,
                  sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sdb, sdh, sdn, sgb, sgh, sgn, swb, swh, swn,
                  n, m, t, u, back, ahead, hole_back, hole_ahead, step, scale, threshold, kept, H, G, tiles, slots,
                  R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, BAND: tl.constexpr, ITEMISED: tl.constexpr, SHARED: tl.constexpr,
                  MORE: tl.constexpr, STEPPED: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr,
                  DROP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradients of one tile of keys and values, summed over the query heads that share them."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = -1
    start = 0
    middle = 0
    end = 0
    first_head = 0
    last_head = R
    if ITEMISED:
        item = ITEMS + tile * FIELDS
        tile = tl.load(item + 1)
        start = tl.load(item + 2)
        middle = tl.load(item + 3)
        end = tl.load(item + 4)
        slot = tl.load(item + 5)
        back = tl.load(item + 6)
        ahead = tl.load(item + 7)
        if SHARED:
            b = row // G
            g = row % G
        else:  # the item of one query head
            b = row
            head = tl.load(item)
            g = head // R
            first_head = head % R
            last_head = first_head + 1
    else:
        b = row // G
        g = row % G
    if STEPPED:
        first_query, first_key, queries, keys, shift = residue_class(tile // tiles, t, u, n, m, step)
        tile = tile % tiles
    else:
        first_query = 0
        first_key = 0
        queries = n
        keys = m
        shift = t - u
        step = 1
    K += b.to(tl.int64) * skb + g.to(tl.int64) * skh
    V += b.to(tl.int64) * svb + g.to(tl.int64) * svh
    DK += b.to(tl.int64) * sgb + g.to(tl.int64) * sgh
    DV += b.to(tl.int64) * swb + g.to(tl.int64) * swh
    n0 = tile * BN
    rows = tl.arange(0, BN)
    y = n0 + rows
    j = first_key + y * step
    k = load_rows(K, j, skn, m, D, BD, True)
    v = load_rows(V, j, svn, m, E, BE, True)
    valid = y < keys
    if VALIDS:
        valid = valid & (tl.load(VALID + b.to(tl.int64) * m + j, mask=j < m, other=0) != 0)
    key_keys = rows
    if DROP:
        key_keys = tl.load(KEY_KEYS + j, mask=j < m, other=0)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    x0 = tl.arange(0, BM)
    none = x0.to(tl.int64)
    for r in range(first_head, last_head):
        h = g * R + r
        queries_of = Q + b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
        d_out_of = D_OUT + b.to(tl.int64) * sdb + h.to(tl.int64) * sdh
        line = (b * H + h).to(tl.int64) * n
        slope = 0.0
        if SLOPED:
            slope = tl.load(SLOPES + h) * LOG2E
        if BAND:
            low, inner, outer, high = band_queries(n0, shift, back, ahead, queries, BM, BN)
            for i0 in range(low, inner, BM):
                dk, dv = key_step(dk, dv, k, v, key_keys, valid, queries_of, d_out_of, LSE + line, PULL + line, QUERY_KEYS + line,
                                  i0 + x0, y, none, sqn, sdn, first_query, step, queries, n, shift, back, ahead,
                                  hole_back, hole_ahead, slope, threshold, kept, scale, D, E, BD, BE,
                                  True, False, True, HOLE, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
            for i0 in range(inner, outer, BM):
                dk, dv = key_step(dk, dv, k, v, key_keys, valid, queries_of, d_out_of, LSE + line, PULL + line, QUERY_KEYS + line,
                                  i0 + x0, y, none, sqn, sdn, first_query, step, queries, n, shift, back, ahead,
                                  hole_back, hole_ahead, slope, threshold, kept, scale, D, E, BD, BE,
                                  False, False, False, HOLE, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
            for i0 in range(outer, high, BM):
                dk, dv = key_step(dk, dv, k, v, key_keys, valid, queries_of, d_out_of, LSE + line, PULL + line, QUERY_KEYS + line,
                                  i0 + x0, y, none, sqn, sdn, first_query, step, queries, n, shift, back, ahead,
                                  hole_back, hole_ahead, slope, threshold, kept, scale, D, E, BD, BE,
                                  True, False, True, HOLE, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
        if ITEMISED:
            for z in range(start * SUB, middle * SUB):
                i0 = tl.load(ENTRIES + z // SUB * 2) * TILE + z % SUB * BM
                dk, dv = key_step(dk, dv, k, v, key_keys, valid, queries_of, d_out_of, LSE + line, PULL + line, QUERY_KEYS + line,
                                  i0 + x0, y, none, sqn, sdn, first_query, step, queries, n, shift, back, ahead,
                                  hole_back, hole_ahead, slope, threshold, kept, scale, D, E, BD, BE,
                                  False, False, False, False, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
            for z in range(middle * SUB, end * SUB):
                entry = ENTRIES + z // SUB * 2
                x1 = z % SUB * BM + x0
                bits = tl.load(MASKS + tl.load(entry + 1) * TILE + x1)
                dk, dv = key_step(dk, dv, k, v, key_keys, valid, queries_of, d_out_of, LSE + line, PULL + line, QUERY_KEYS + line,
                                  tl.load(entry) * TILE + x1, y, bits, sqn, sdn, first_query, step, queries, n, shift, back, ahead,
                                  hole_back, hole_ahead, slope, threshold, kept, scale, D, E, BD, BE,
                                  False, True, True, False, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
    dk = dk * scale
    if slot >= 0:
        at = (row * slots + slot).to(tl.int64) * BN
        c = tl.arange(0, BD)
        e = tl.arange(0, BE)
        tl.store(PART_K + (at + rows)[:, None] * BD + c[None, :], dk)
        tl.store(PART_V + (at + rows)[:, None] * BE + e[None, :], dv)
    else:
        if MORE:
            dk += load_rows(DK, j, sgn, m, D, BD, True).to(tl.float32)
            dv += load_rows(DV, j, swn, m, E, BE, True).to(tl.float32)
        store_rows(DK, j, sgn, m, dk, D, BD)
        store_rows(DV, j, swn, m, dv, E, BE)
