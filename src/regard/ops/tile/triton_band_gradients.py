"""Triton kernels of the gradients of a window, also with global tokens, as in `triton_bands`; formulas: `triton_gradients`."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_bands import BAND_NUMBERS, hide_pairs, offsets_of, own_tile, tokens_at, tokens_met
from regard.ops.tile.triton_kernels import LOWEST, load_tile, load_tile_transposed, store_tile
from regard.ops.triton_math import LOG2E


@triton.jit(do_not_specialize=BAND_NUMBERS)
def band_query_gradients(Q, K, V, OUT, LSE, D_OUT, D_LSE, PULL, DQ, PART, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn,
                         sob, soh, son, sdb, sdh, sdn, sgb, sgh, sgn,
                         n, m, shift, back, ahead, common, whole, reach, pieces, scale, H,
                         R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                         BM: tl.constexpr, BN: tl.constexpr, LEADS: tl.constexpr, ROOM: tl.constexpr, LSES: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradient of one tile of queries, and their pull."""
    tile, piece = own_tile(pieces, LEADS)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    line = (b * H + h) * n
    rows = tl.arange(0, BM)
    i = tile * BM + rows
    here = tl.minimum(i, n - 1)
    q = load_tile(Q + b * sqb + h * sqh, here, sqn, D, BD)
    d_out = load_tile(D_OUT + b * sdb + h * sdh, here, sdn, E, BE)
    out = load_tile(OUT + b * sob + h * soh, here, son, E, BE)
    pull = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if LSES:
        pull -= tl.load(D_LSE + line + here)
    tl.store(PULL + line + i, pull, mask=i < n)
    lse = tl.load(LSE + line + here)
    lse = tl.where(lse > LOWEST, lse * LOG2E, -LOWEST)
    lead, walk, met = tokens_met(piece, tile * BM + shift, back, ahead, common, reach, m, ROOM, BM, BN, LEADS)
    low, _, end_of_keys, _, _, _, begin, end = met
    factor = scale * LOG2E
    K += b * skb + h // R * skh
    V += b * svb + h // R * svh
    dq = tl.zeros([BM, BD], tl.float32)
    for z in range(walk[0], walk[1]):
        offsets = offsets_of(z, met, BN, LEADS)
        j = tokens_at(low, offsets, end_of_keys)
        k = load_tile_transposed(K, j, skn, D, BD)
        v = load_tile_transposed(V, j, svn, E, BE)
        s = tl.dot(q, k, input_precision=PRECISION)
        if (z < begin) | (z >= end):
            s = hide_pairs(s, rows + lead, z, offsets, met, LEADS)
        dp = tl.dot(d_out, v, input_precision=PRECISION)
        ds = tl.exp2(s * factor - lse[:, None]) * (dp - pull[:, None])
        dq = tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    if LEADS:
        if piece >= 0:
            number = (tl.program_id(1) * pieces + piece).to(tl.int64) * whole
            store_tile(PART + number * D, rows, D, whole, dq * scale, D, BD)
            n = 0
    store_tile(DQ + b * sgb + h * sgh, i, sgn, n, dq * scale, D, BD)


@triton.jit
def numbers_of_queries(at, z, met, S: tl.constexpr, EVEN: tl.constexpr, LEADS: tl.constexpr):
    """Load the log-sum-exp of queries, in base 2, and their pull. Queries without pairs get no weights."""
    _, _, LSE, PULL, _, _ = at
    low, _, length, _, _, _, _, _ = met
    offsets = offsets_of(z, met, S, LEADS)
    i = low + offsets
    if not EVEN:
        i = tokens_at(low, offsets, length)
    lse = tl.load(LSE + i)
    return tl.where(lse > LOWEST, lse * LOG2E, -LOWEST), tl.load(PULL + i)


@triton.jit
def window_key_step(dk, dv, own, at, met, numbers, z, LEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                    BE: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add what the queries of tile z give to the gradients of a tile of keys and values. Scores are transposed."""
    k, v, rows, factor = own
    lse, pull = numbers
    Q, D_OUT, _, _, sqn, sdn = at
    low, _, length, _, _, _, begin, end = met
    offsets = offsets_of(z, met, BM, LEADS)
    i = tokens_at(low, offsets, length)
    q = load_tile_transposed(Q, i, sqn, D, BD)
    d_out = load_tile(D_OUT, i, sdn, E, BE)
    s = tl.dot(k, q, input_precision=PRECISION)
    if (z < begin) | (z >= end):
        s = hide_pairs(s, rows, z, offsets, met, LEADS)
    p = tl.exp2(s * factor - lse[None, :])
    dp = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    ds = p * (dp - pull[None, :])
    dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=BAND_NUMBERS)
def band_key_gradients(Q, K, V, LSE, D_OUT, PULL, DK, DV, PART_K, PART_V, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn,
                       sdb, sdh, sdn, sgb, sgh, sgn, swb, swh, swn,
                       n, m, shift, back, ahead, common, whole, reach, pieces, scale, H, G,
                       R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                       BM: tl.constexpr, BN: tl.constexpr, LEADS: tl.constexpr, ROOM: tl.constexpr, EVEN: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradients of one tile of keys and values, summed over the query heads that share them.

    EVEN: tiles of queries begin at multiples of BM, and so does the end, so that several numbers are loaded at once. Those of the
    next queries are in registers: a pipeline copies each to shared memory by itself.
    """
    tile, piece = own_tile(pieces, LEADS)
    b = (tl.program_id(1) // G).to(tl.int64)
    g = (tl.program_id(1) % G).to(tl.int64)
    rows = tl.arange(0, BN)
    j = tile * BN + rows
    here = tl.minimum(j, m - 1)
    k = load_tile(K + b * skb + g * skh, here, skn, D, BD)
    v = load_tile(V + b * svb + g * svh, here, svn, E, BE)
    if EVEN:
        n = n // BM * BM
    lead, walk, met = tokens_met(piece, tile * BN - shift, ahead, back, common, reach, n, ROOM, BN, BM, LEADS)
    if EVEN:
        low, count, length, common, first, extra, begin, end = met
        met = (low // BM * BM, count, length, common, first, extra, begin, end)
    own = (k, v, rows + lead, scale * LOG2E)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    for h in range(g * R, g * R + R):
        line = (b * H + h) * n
        at = (Q + b * sqb + h * sqh, D_OUT + b * sdb + h * sdh, LSE + line, PULL + line, sqn, sdn)
        numbers = numbers_of_queries(at, walk[0], met, BM, EVEN, LEADS)
        for z in range(walk[0], walk[1]):
            later = numbers_of_queries(at, tl.minimum(z + 1, walk[1] - 1), met, BM, EVEN, LEADS)
            dk, dv = window_key_step(dk, dv, own, at, met, numbers, z, LEADS, D, E, BD, BE, BM, PRECISION)
            numbers = later
    if LEADS:
        if piece >= 0:
            number = (tl.program_id(1) * pieces + piece).to(tl.int64) * whole
            store_tile(PART_K + number * D, rows, D, whole, dk * scale, D, BD)
            store_tile(PART_V + number * E, rows, E, whole, dv, E, BE)
            m = 0
    store_tile(DK + b * sgb + g * sgh, j, sgn, m, dk * scale, D, BD)
    store_tile(DV + b * swb + g * swh, j, swn, m, dv, E, BE)
