"""Triton kernels of the gradients of attention over all pairs: scores are computed again from what the forward pass kept.

    weights   A = exp2(s - STAT), or relu(s) STAT
    scores    ds = A (dA - delta), or 1[s > 0] STAT (dA - delta), with delta the product of an output and its gradient; 0 by count

Programs of one kernel own tiles of queries, of the next tiles of keys, whose scores are computed transposed, and of the last
tiles of a table, which walk over the batch. No atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.pair.triton_kernels import (
    BY_PLACE,
    BY_POSITION,
    existing_pairs,
    first_tiles,
    pair_head,
    pair_rows,
    write_pair_rows,
)
from regard.ops.triton_math import LOG2E, hash_keeps


@triton.jit
def score_grads(s, stat, dw, delta, RELU: tl.constexpr):
    """Return the weights of a tile and the gradients of its scores; stat and delta broadcast."""
    if RELU:
        p = tl.maximum(s, 0.0) * stat
        return p, tl.where(s > 0, stat * (dw - delta), 0.0)
    p = tl.exp2(s - stat)
    return p, p * (dw - delta)


@triton.jit
def query_grad_step(sums, own, keys, c, MASKED: tl.constexpr, DOT: tl.constexpr, TABLE: tl.constexpr, FACTORS: tl.constexpr,
                    RELU: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, DROP: tl.constexpr, D: tl.constexpr,
                    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add tile c of keys to the gradients of a tile of queries and of its y; write that of column c of x."""
    dq, dy = sums
    q, grad, y, X, DX, T, part, at, drawn, stat, delta, inside, factor, threshold, keep = own
    K, V, VALID, KEY_AT, KEYED, skn, svn, m, step = keys
    r = tl.arange(0, BN)
    j = tl.minimum(c * step + r, m - 1)
    v = pair_rows(V, j, svn, E, BE)
    s = tl.zeros([grad.shape[0], BN], tl.float32)
    x = delta
    k = v
    if DOT:
        k = pair_rows(K, j, skn, D, BD)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    if TABLE:
        s += tl.load(T[:, None] + j[None, :]).to(tl.float32) * part
    if FACTORS:
        x = tl.load(X + c).to(tl.float32)
        s += (x * LOG2E)[:, None] * y
    if MASKED:
        there = (r < step) & (c * step + r < m)
        key_at = j
        if SEEN == BY_POSITION:
            key_at = tl.load(KEY_AT + j)
        seen = existing_pairs(at[:, None], key_at[None, :], there[None, :], VALID, j[None, :], SEEN, VALIDS)
        s = tl.where(seen, s, float("-inf"))
    dw = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    if DROP:
        dw = tl.where(hash_keeps(drawn[:, None], tl.load(KEYED + j)[None, :], threshold), dw * keep, 0.0)
    _, ds = score_grads(s, stat[:, None], dw, delta[:, None], RELU)
    if FACTORS:
        tl.store(DX + c, tl.sum(ds * y, 1), mask=inside)
        dy += ds * x[:, None]
    if DOT:
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, dy


@triton.jit(do_not_specialize=["n", "m", "start", "heads", "tiles", "rows", "threshold"])
def pair_query_grads(
    Q, K, V, OUT, GRAD, STAT, DELTA, DQ, DXS, DYS, TABLES, SHARES, XS, YS, AT, KEY_AT, VALID, DRAWN, KEYED,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, sgb, sgh, sgn, sdb, sdh, sdn,
    sth, stn, sxb, sxh, sxn, syb, syh, syn,
    n, m, step, start, heads, tiles, rows, scale, threshold, keep,
    SHARE: tl.constexpr, SHARE_K: tl.constexpr, DOT: tl.constexpr, TABLE: tl.constexpr, FACTORS: tl.constexpr,
    RELU: tl.constexpr, COUNT: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, MASKS: tl.constexpr, DROP: tl.constexpr,
    ATS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of queries, of its factors DXS (rows n X) and DYS (rows n Y), and DELTA (rows n)."""
    pid = tl.program_id(0)
    row = pid // tiles
    first = (tiles - 1 - pid % tiles) * BM
    i = first + tl.arange(0, BM)
    here = tl.minimum(i, n - 1)
    inside = i < n
    b = (row // heads).to(tl.int64)
    wide = row.to(tl.int64)
    grad = pair_rows(pair_head(GRAD, row, sgb, sgh, heads, 1), here, sgn, E, BE)
    delta = tl.zeros([BM], tl.float32)
    if not COUNT:
        out = pair_rows(pair_head(OUT, row, sob, soh, heads, 1), here, son, E, BE)
        delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(DELTA + wide * n + i, delta, mask=inside)
    q = pair_rows(pair_head(Q, row, sqb, sqh, heads, 1), here, sqn, D, BD) if DOT else grad
    at = here + start
    if ATS:
        at = tl.load(AT + b * n + here)
    T = TABLES + (row % heads).to(tl.int64) * sth + tl.minimum(at, rows - 1).to(tl.int64) * stn
    XP = pair_head(XS, row, sxb, sxh, heads, 1) + here.to(tl.int64) * sxn
    y = pair_rows(pair_head(YS, row, syb, syh, heads, 1), here, syn, Y, BN).to(tl.float32) if FACTORS else delta
    drawn = here
    if DROP:
        drawn = tl.load(DRAWN + wide * n + here)
    stat = tl.load(STAT + wide * n + here)
    factor = scale if RELU else scale * LOG2E
    DX = DXS + (wide * n + here) * X
    part = tl.load(SHARES + row % heads).to(tl.float32) * LOG2E if TABLE else 0.0
    own = (q, grad, y, XP, DX, T, part, at, drawn, stat, delta, inside, factor, threshold, keep)
    keys = (pair_head(K, row, skb, skh, heads, SHARE_K), pair_head(V, row, svb, svh, heads, SHARE), VALID + b * m,
            KEY_AT + b * m, KEYED, skn, svn, m, step)  # fmt: skip
    dq = tl.zeros([BM, BD if DOT else 16], tl.float32)
    dy = tl.zeros([BM, BN if FACTORS else 16], tl.float32)
    sums = (dq, dy)
    full, stop = first_tiles(first, first + BM, start, m, step, SEEN, MASKS)
    for c in range(0, full):
        sums = query_grad_step(sums, own, keys, c, False, DOT, TABLE, FACTORS, RELU, SEEN, VALIDS, DROP,
                               D, E, BD, BE, BN, PRECISION)  # fmt: skip
    for c in range(full, stop):
        sums = query_grad_step(sums, own, keys, c, True, DOT, TABLE, FACTORS, RELU, SEEN, VALIDS, DROP,
                               D, E, BD, BE, BN, PRECISION)  # fmt: skip
    dq, dy = sums
    if DOT:
        write_pair_rows(pair_head(DQ, row, sdb, sdh, heads, 1), i, sdn, dq * scale, inside, D, BD)
    if FACTORS:
        write_pair_rows(DYS + wide * n * Y, i, Y, dy, inside, Y, BN)


@triton.jit
def key_grad_step(sums, own, queries, i0, MASKED: tl.constexpr, DOT: tl.constexpr, TABLE: tl.constexpr, FACTORS: tl.constexpr,
                  RELU: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, ATS: tl.constexpr, DROP: tl.constexpr,
                  D: tl.constexpr, E: tl.constexpr, Y: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add the queries from i0 on to the gradients of a tile of keys and values, by transposed scores (BN BM)."""
    dk, dv = sums
    k, v, c, j, there, key_at, keyed, VALID = own
    Q, GRAD, STAT, DELTA, T, part, X, YS, AT, DRAWN, sqn, sgn, stn, sxn, syn, n, start, rows, factor, threshold, keep = queries
    i = i0 + tl.arange(0, BM)
    here = tl.minimum(i, n - 1)
    grad = pair_rows(GRAD, here, sgn, E, BE)
    stat = tl.load(STAT + here)
    delta = tl.load(DELTA + here)
    at = here + start
    if ATS:
        at = tl.load(AT + here)
    s = tl.zeros([BN, BM], tl.float32)
    q = grad
    if DOT:
        q = pair_rows(Q, here, sqn, D, BD)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
    if TABLE:
        line = T + tl.minimum(at, rows - 1).to(tl.int64) * stn
        s += tl.load(line[None, :] + j[:, None]).to(tl.float32) * part
    if FACTORS:
        r = tl.arange(0, BN)
        y = tl.load(YS + (here.to(tl.int64) * syn)[None, :] + r[:, None], mask=r[:, None] < Y, other=0.0)
        x = tl.load(X + here.to(tl.int64) * sxn + c).to(tl.float32)
        s += (x * LOG2E)[None, :] * y.to(tl.float32)
    if MASKED:
        seen = existing_pairs(at[None, :], key_at[:, None], there[:, None] & (i < n)[None, :], VALID, j[:, None], SEEN, VALIDS)
        s = tl.where(seen, s, float("-inf"))
    dw = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    if DROP:
        kept = hash_keeps(tl.load(DRAWN + here)[None, :], keyed[:, None], threshold)
        dw = tl.where(kept, dw * keep, 0.0)
        p, ds = score_grads(s, stat[None, :], dw, delta[None, :], RELU)
        p = tl.where(kept, p * keep, 0.0)
    else:
        p, ds = score_grads(s, stat[None, :], dw, delta[None, :], RELU)
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
    if DOT:
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["n", "m", "start", "heads", "tiles", "rows", "threshold"])
def pair_key_grads(
    Q, K, V, GRAD, STAT, DELTA, DK, DV, TABLES, SHARES, XS, YS, AT, KEY_AT, VALID, DRAWN, KEYED,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, sdkb, sdkh, sdkn, sdvb, sdvh, sdvn,
    sth, stn, sxb, sxh, sxn, syb, syh, syn,
    n, m, step, start, heads, tiles, rows, scale, threshold, keep,
    SHARE: tl.constexpr, SHARE_K: tl.constexpr, DOT: tl.constexpr, TABLE: tl.constexpr, FACTORS: tl.constexpr,
    RELU: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, MASKS: tl.constexpr, DROP: tl.constexpr, ATS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, Y: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of keys and values, with a head for every query head."""
    pid = tl.program_id(0)
    row = pid // tiles
    c = pid % tiles
    r = tl.arange(0, BN)
    number = c * step + r
    there = (r < step) & (number < m)
    j = tl.minimum(number, m - 1)
    b = (row // heads).to(tl.int64)
    wide = row.to(tl.int64)
    v = pair_rows(pair_head(V, row, svb, svh, heads, SHARE), j, svn, E, BE)
    k = pair_rows(pair_head(K, row, skb, skh, heads, SHARE_K), j, skn, D, BD) if DOT else v
    key_at = j
    if SEEN == BY_POSITION:
        key_at = tl.load(KEY_AT + b * m + j)
    keyed = j
    if DROP:
        keyed = tl.load(KEYED + j)
    part = tl.load(SHARES + row % heads).to(tl.float32) * LOG2E if TABLE else 0.0
    own = (k, v, c, j, there, key_at, keyed, VALID + b * m)
    queries = (pair_head(Q, row, sqb, sqh, heads, 1), pair_head(GRAD, row, sgb, sgh, heads, 1), STAT + wide * n,
               DELTA + wide * n, TABLES + (row % heads).to(tl.int64) * sth, part, pair_head(XS, row, sxb, sxh, heads, 1),
               pair_head(YS, row, syb, syh, heads, 1), AT + b * n, DRAWN + wide * n, sqn, sgn, stn, sxn, syn, n, start, rows,
               scale if RELU else scale * LOG2E, threshold, keep)  # fmt: skip
    dk = tl.zeros([BN, BD if DOT else 16], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    sums = (dk, dv)
    first = 0
    full = 0  # queries from here on see the whole tile
    if SEEN == BY_PLACE:
        first = tl.maximum(c * step - start, 0) // BM * BM
        full = (tl.maximum(c * step + step - 1 - start, 0) + BM - 1) // BM * BM
    stop = n // BM * BM
    full = tl.minimum(full, stop)
    if MASKS:
        full = stop
    for i0 in range(first, full, BM):
        sums = key_grad_step(sums, own, queries, i0, True, DOT, TABLE, FACTORS, RELU, SEEN, VALIDS, ATS, DROP,
                             D, E, Y, BD, BE, BM, BN, PRECISION)  # fmt: skip
    for i0 in range(full, stop, BM):
        sums = key_grad_step(sums, own, queries, i0, False, DOT, TABLE, FACTORS, RELU, SEEN, VALIDS, ATS, DROP,
                             D, E, Y, BD, BE, BM, BN, PRECISION)  # fmt: skip
    for i0 in range(tl.maximum(stop, first), n, BM):
        sums = key_grad_step(sums, own, queries, i0, True, DOT, TABLE, FACTORS, RELU, SEEN, VALIDS, ATS, DROP,
                             D, E, Y, BD, BE, BM, BN, PRECISION)  # fmt: skip
    dk, dv = sums
    if DOT:
        write_pair_rows(pair_head(DK, row, sdkb, sdkh, heads, 1), number, sdkn, dk * scale, there, D, BD)
    write_pair_rows(pair_head(DV, row, sdvb, sdvh, heads, 1), number, sdvn, dv, there, E, BE)


@triton.jit(do_not_specialize=["n", "m", "start", "heads", "tiles", "key_tiles", "batch", "rows", "threshold"])
def pair_table_grads(
    Q, K, V, GRAD, STAT, DELTA, DT, PARTS, TABLES, SHARES, VALID, DRAWN, KEYED,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, sth, stn, sdh, sdn,
    n, m, start, heads, tiles, key_tiles, batch, rows, scale, threshold, keep,
    SHARE: tl.constexpr, SHARE_K: tl.constexpr, DOT: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, DROP: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a tile of a head's table, summed over the batch, and into PARTS that of the head's share.

    Queries begin at row `start`.
    """
    pid = tl.program_id(0)
    h = pid // (tiles * key_tiles)
    i0 = pid // key_tiles % tiles * BM
    j0 = pid % key_tiles * BN
    i = i0 + tl.arange(0, BM)
    number = j0 + tl.arange(0, BN)
    here = tl.minimum(i, n - 1)
    j = tl.minimum(number, m - 1)
    at = here + start
    T = TABLES + h.to(tl.int64) * sth + tl.minimum(at, rows - 1).to(tl.int64) * stn
    share = tl.load(SHARES + h).to(tl.float32)
    base = tl.load(T[:, None] + j[None, :]).to(tl.float32)
    total = tl.zeros([BM, BN], tl.float32)
    stop = batch
    if SEEN == BY_PLACE:
        stop = tl.where(j0 <= i0 + BM - 1 + start, batch, 0)
    for b in range(0, stop):
        row = b * heads + h
        line = row.to(tl.int64) * n
        grad = pair_rows(pair_head(GRAD, row, sgb, sgh, heads, 1), here, sgn, E, BE)
        v = pair_rows(pair_head(V, row, svb, svh, heads, SHARE), j, svn, E, BE)
        s = base * (share * LOG2E)
        if DOT:
            q = pair_rows(pair_head(Q, row, sqb, sqh, heads, 1), here, sqn, D, BD)
            k = pair_rows(pair_head(K, row, skb, skh, heads, SHARE_K), j, skn, D, BD)
            s += tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        seen = existing_pairs(at[:, None], j[None, :], (number < m)[None, :], VALID + (row // heads).to(tl.int64) * m, j[None, :],
                          SEEN, VALIDS)  # fmt: skip
        s = tl.where(seen, s, float("-inf"))
        dw = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROP:
            drawn = tl.load(DRAWN + line + here)
            dw = tl.where(hash_keeps(drawn[:, None], tl.load(KEYED + j)[None, :], threshold), dw * keep, 0.0)
        stat = tl.load(STAT + line + here)
        delta = tl.load(DELTA + line + here)
        _, ds = score_grads(s, stat[:, None], dw, delta[:, None], False)
        total += ds
    DT += h.to(tl.int64) * sdh
    inside = ((i < n) & (at < rows))[:, None] & (number < m)[None, :]  # only padding is behind the last row
    total = tl.where(inside, total, 0.0)
    tl.store(PARTS + pid, tl.sum(tl.sum(total * base, 1), 0))
    tl.store(DT + at.to(tl.int64)[:, None] * sdn + j[None, :], (total * share).to(DT.dtype.element_ty), mask=inside)
