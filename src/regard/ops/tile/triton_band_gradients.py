"""Triton kernels of the gradients of a plain window, in forms as in `triton_bands`; formulas are in `triton_gradients`."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_bands import BAND_NUMBERS, ONE_LOOP, hide_pairs, tokens_at, window_of
from regard.ops.tile.triton_kernels import LOWEST, load_tile, load_tile_transposed, store_tile
from regard.ops.triton_math import LOG2E

SPLIT = tl.constexpr(3)
# As form 2, with two numbers of each of the next queries in registers: a pipeline copies each to shared memory by itself.
CARRIED = tl.constexpr(4)


@triton.jit
def window_query_step(dq, own, at, window, z, MASK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
               BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add what the keys of tile z give to the gradient of a tile of queries. MASK: 0 never, 1 always, 2 where needed."""
    q, d_out, lse, pull, rows, factor = own
    K, V, skn, svn, m = at
    low, count, begin, end = window
    offsets = z * BN + tl.arange(0, BN)
    j = low + offsets
    if MASK != 0:
        j = tokens_at(low, offsets, m)
    k = load_tile_transposed(K, j, skn, D, BD)
    v = load_tile_transposed(V, j, svn, E, BE)
    s = tl.dot(q, k, input_precision=PRECISION)
    if MASK == 1:
        s = hide_pairs(s, rows, offsets, low, count, m)
    if MASK == 2:
        if (z < begin) | (z >= end):
            s = hide_pairs(s, rows, offsets, low, count, m)
    dp = tl.dot(d_out, v, input_precision=PRECISION)
    ds = tl.exp2(s * factor - lse[:, None]) * (dp - pull[:, None])
    return tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=BAND_NUMBERS)
def band_query_gradients(Q, K, V, OUT, LSE, D_OUT, D_LSE, PULL, DQ, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son,
                         sdb, sdh, sdn, sgb, sgh, sgn, n, m, shift, back, ahead, wide, scale, H,
                         R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                         BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr, LSES: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradient of one tile of queries, and their pull."""
    tile = tl.program_id(0)
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
    low, lead, count, first, last, begin, end = window_of(tile * BM + shift, back, ahead, wide, m, BM, BN)
    own = (q, d_out, lse, pull, rows + lead, scale * LOG2E)
    at = (K + b * skb + h // R * skh, V + b * svb + h // R * svh, skn, svn, m)
    window = (low, count, begin, end)
    dq = tl.zeros([BM, BD], tl.float32)
    if FORM == ONE_LOOP:
        for z in range(first, last):
            dq = window_query_step(dq, own, at, window, z, 2, D, E, BD, BE, BN, PRECISION)
    else:
        for z in range(begin, end):
            dq = window_query_step(dq, own, at, window, z, 0, D, E, BD, BE, BN, PRECISION)
        for x in range(first, last - (end - begin)):
            z = x + tl.where(x < begin, 0, end - begin)
            dq = window_query_step(dq, own, at, window, z, 1, D, E, BD, BE, BN, PRECISION)
    store_tile(DQ + b * sgb + h * sgh, i, sgn, n, dq * scale, D, BD)


@triton.jit
def numbers_of_queries(at, low, offsets, EVEN: tl.constexpr):
    """Load the log-sum-exp of queries, in base 2, and their pull."""
    _, _, LSE, PULL, _, _, n = at
    i = low + offsets
    if not EVEN:
        i = tokens_at(low, offsets, n)
    return tl.load(LSE + i) * LOG2E, tl.load(PULL + i)


@triton.jit
def window_key_step(dk, dv, own, at, window, numbers, z, MASK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
             BE: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add what the queries of tile z give to the gradients of a tile of keys and values. Scores are transposed."""
    k, v, rows, factor = own
    lse, pull = numbers
    Q, D_OUT, LSE, PULL, sqn, sdn, n = at
    low, count, begin, end = window
    offsets = z * BM + tl.arange(0, BM)
    i = low + offsets
    if MASK != 0:
        i = tokens_at(low, offsets, n)
    q = load_tile_transposed(Q, i, sqn, D, BD)
    d_out = load_tile(D_OUT, i, sdn, E, BE)
    s = tl.dot(k, q, input_precision=PRECISION)
    if MASK == 1:
        s = hide_pairs(s, rows, offsets, low, count, n)
    if MASK == 2:
        if (z < begin) | (z >= end):
            s = hide_pairs(s, rows, offsets, low, count, n)
    p = tl.exp2(s * factor - lse[None, :])  # a row without pairs has no score but -inf
    dp = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    ds = p * (dp - pull[None, :])
    dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=BAND_NUMBERS)
def band_key_gradients(Q, K, V, LSE, D_OUT, PULL, DK, DV, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn,
                       sdb, sdh, sdn, sgb, sgh, sgn, swb, swh, swn, n, m, shift, back, ahead, wide, scale, H, G,
                       R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                       BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradients of one tile of keys and values, summed over the query heads that share them.

    EVEN: tiles of queries begin at multiples of BM, and so does the end, so that several numbers are loaded at once.
    """
    tile = tl.program_id(0)
    b = (tl.program_id(1) // G).to(tl.int64)
    g = (tl.program_id(1) % G).to(tl.int64)
    rows = tl.arange(0, BN)
    j = tile * BN + rows
    here = tl.minimum(j, m - 1)
    k = load_tile(K + b * skb + g * skh, here, skn, D, BD)
    v = load_tile(V + b * svb + g * svh, here, svn, E, BE)
    low, lead, count, first, last, begin, end = window_of(tile * BN - shift, ahead, back, wide, n, BN, BM)
    if EVEN:
        low = low // BM * BM
        n = n // BM * BM
    own = (k, v, rows + lead, scale * LOG2E)
    window = (low, count, begin, end)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    x0 = tl.arange(0, BM)
    for h in range(g * R, g * R + R):
        line = (b * H + h) * n
        at = (Q + b * sqb + h * sqh, D_OUT + b * sdb + h * sdh, LSE + line, PULL + line, sqn, sdn, n)
        if FORM == SPLIT:
            for z in range(begin, end):
                numbers = numbers_of_queries(at, low, z * BM + x0, True)
                dk, dv = window_key_step(dk, dv, own, at, window, numbers, z, 0, D, E, BD, BE, BM, PRECISION)
            for x in range(first, last - (end - begin)):
                z = x + tl.where(x < begin, 0, end - begin)
                numbers = numbers_of_queries(at, low, z * BM + x0, EVEN)
                dk, dv = window_key_step(dk, dv, own, at, window, numbers, z, 1, D, E, BD, BE, BM, PRECISION)
        elif FORM == CARRIED:
            numbers = numbers_of_queries(at, low, first * BM + x0, EVEN)
            for z in range(first, last):
                later = numbers_of_queries(at, low, tl.minimum(z + 1, last - 1) * BM + x0, EVEN)
                dk, dv = window_key_step(dk, dv, own, at, window, numbers, z, 2, D, E, BD, BE, BM, PRECISION)
                numbers = later
        else:
            for z in range(first, last):
                numbers = numbers_of_queries(at, low, z * BM + x0, EVEN)
                dk, dv = window_key_step(dk, dv, own, at, window, numbers, z, 2, D, E, BD, BE, BM, PRECISION)
    store_tile(DK + b * sgb + g * sgh, j, sgn, m, dk * scale, D, BD)
    store_tile(DV + b * swb + g * swh, j, swn, m, dv, E, BE)
