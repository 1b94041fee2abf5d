"""Triton kernels of the backward pass of bucketed attention: weights are computed again from the log-sum-exp of all rounds.

One launch a round: some programs own tiles of queries, the others tiles of keys. Each adds the gradients of its tile to what
earlier rounds stored. Score tiles of key programs are computed transposed: no accumulator is ever transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import (
    HIDDEN,
    LOG2E,
    LONELY,
    earlier_places,
    earlier_ranges,
    head_at,
    kept_weights_of,
    load_rows,
    seeing_places,
    seen_places,
    store_rows,
)


@triton.jit
def query_grads(
    tile, row, Q, K, V, GRAD, LSE, DELTA, SHORT, ORDER, MARKS, ASKING, THERE, SUM_Q, DQ,
    sqn, skn, svn, sgn, sdq, n, total, reach, scale, threshold, keep,
    ROUND: tl.constexpr, LAST_ROUND: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr, UNIT: tl.constexpr,
    DROP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile of queries in one round."""
    p = tile * BM + tl.arange(0, BM)
    inside = p < n
    token = tl.load(ORDER + p, mask=inside, other=0)
    first = tl.load(ORDER + total + p, mask=inside, other=n)
    last = tl.load(ORDER + 2 * total + p, mask=inside, other=-1)
    low, high = seen_places(p, first, last, reach, CAUSAL)
    ranges = earlier_ranges(MARKS, token, inside, n, total, ROUND)
    q = load_rows(Q, token, sqn, inside, D, BD)
    grad = load_rows(GRAD, token, sgn, inside, E, BE)
    lse = tl.load(LSE + token, mask=inside, other=LONELY)
    delta = tl.load(DELTA + token, mask=inside, other=0.0)
    if DROP:
        asking = tl.load(ASKING + token, mask=inside, other=0)
    dq = tl.zeros([BM, BD], tl.float32)
    for j0 in range(tl.min(low), tl.max(high) + 1, BN):
        j = j0 + tl.arange(0, BN)
        there = j < n
        key = tl.load(ORDER + j, mask=there, other=0)
        k = load_rows(K, key, skn, there, D, BD)
        v = load_rows(V, key, svn, there, E, BE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        if UNIT:
            short = tl.load(SHORT + key, mask=there, other=0.0)
            s *= short[None, :]
        seen = (j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None])
        if not OWN:
            seen = seen & (j[None, :] != p[:, None])
        at = earlier_places(MARKS, key, there, n, ROUND)
        for r in tl.static_range(ROUND):
            seen = seen & ((at[r][None, :] < ranges[r][0][:, None]) | (at[r][None, :] > ranges[r][1][:, None]))
        w = tl.exp2(tl.where(seen, s, HIDDEN) - lse[:, None])
        dw = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROP:
            kept = kept_weights_of(asking[:, None], tl.load(THERE + key, mask=there, other=0)[None, :], threshold)
            dw = tl.where(kept, dw * keep, 0.0)
        ds = w * (dw - delta[:, None])
        if UNIT:
            ds *= short[None, :]
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq *= scale
    if ROUND > 0:
        dq += load_rows(SUM_Q, token, D, inside, D, BD)
    if LAST_ROUND:
        store_rows(DQ, token, sdq, dq, inside, D, BD)
    else:
        store_rows(SUM_Q, token, D, dq, inside, D, BD)


@triton.jit
def key_grads(
    tile, row, Q, K, V, GRAD, LSE, DELTA, SHORT, ORDER, MARKS, ASKING, THERE, SUM_K, SUM_V, DK, DV,
    sqn, skn, svn, sgn, sdk, sdv, n, total, reach, scale, threshold, keep, shortest,
    ROUND: tl.constexpr, LAST_ROUND: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr, UNIT: tl.constexpr,
    DROP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile of keys and values in one round. Those of unit keys become those of keys in the last."""
    p = tile * BN + tl.arange(0, BN)
    there = p < n
    key = tl.load(ORDER + p, mask=there, other=0)
    first = tl.load(ORDER + total + p, mask=there, other=n)
    last = tl.load(ORDER + 2 * total + p, mask=there, other=-1)
    low, high = seeing_places(p, first, last, reach, CAUSAL)
    at = earlier_places(MARKS, key, there, n, ROUND)
    k = load_rows(K, key, skn, there, D, BD)
    v = load_rows(V, key, svn, there, E, BE)
    factor = tl.full([BN], scale * LOG2E, tl.float32)
    if UNIT:
        short = tl.load(SHORT + key, mask=there, other=0.0)
        factor *= short
    if DROP:
        keyed = tl.load(THERE + key, mask=there, other=0)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    for i0 in range(tl.min(low), tl.max(high) + 1, BM):
        i = i0 + tl.arange(0, BM)
        inside = i < n
        token = tl.load(ORDER + i, mask=inside, other=0)
        from_place, to_place = seen_places(
            i,
            tl.load(ORDER + total + i, mask=inside, other=n),
            tl.load(ORDER + 2 * total + i, mask=inside, other=-1),
            reach,
            CAUSAL,
        )
        q = load_rows(Q, token, sqn, inside, D, BD)
        grad = load_rows(GRAD, token, sgn, inside, E, BE)
        lse = tl.load(LSE + token, mask=inside, other=LONELY)
        delta = tl.load(DELTA + token, mask=inside, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor[:, None]
        seen = (p[:, None] >= from_place[None, :]) & (p[:, None] <= to_place[None, :])
        if not OWN:
            seen = seen & (p[:, None] != i[None, :])
        ranges = earlier_ranges(MARKS, token, inside, n, total, ROUND)
        for r in tl.static_range(ROUND):
            seen = seen & ((at[r][:, None] < ranges[r][0][None, :]) | (at[r][:, None] > ranges[r][1][None, :]))
        w = tl.exp2(tl.where(seen, s, HIDDEN) - lse[None, :])
        dw = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = w
        if DROP:
            kept = kept_weights_of(tl.load(ASKING + token, mask=inside, other=0)[None, :], keyed[:, None], threshold)
            dropped = tl.where(kept, w * keep, 0.0)
            dw = tl.where(kept, dw * keep, 0.0)
        dv = tl.dot(dropped.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = w * (dw - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    dk *= scale
    if ROUND > 0:
        dk += load_rows(SUM_K, key, D, there, D, BD)
        dv += load_rows(SUM_V, key, E, there, E, BE)
    if not LAST_ROUND:
        store_rows(SUM_K, key, D, dk, there, D, BD)
        store_rows(SUM_V, key, E, dv, there, E, BE)
    else:
        if UNIT:
            unit = k.to(tl.float32) * short[:, None]
            along = tl.where(short < 1 / shortest, tl.sum(dk * unit, 1), 0.0)
            dk = (dk - unit * along[:, None]) * short[:, None]
        if not OWN:
            alone = there & (last >= 0) & (tl.load(LSE + key, mask=there, other=0.0) == LONELY)
            own_grad = load_rows(GRAD, key, sgn, alone, E, BE).to(tl.float32)
            if DROP:
                kept = kept_weights_of(tl.load(ASKING + key, mask=there, other=0), keyed, threshold)
                own_grad = own_grad * tl.where(kept, keep, 0.0)[:, None]
            dv += own_grad
        store_rows(DK, key, sdk, dk, there, D, BD)
        store_rows(DV, key, sdv, dv, there, E, BE)


@triton.jit(do_not_specialize=["n", "total", "reach", "heads", "rounds", "query_tiles", "key_tiles", "threshold"])
def bucket_backward(
    Q, K, V, GRAD, LSE, DELTA, SHORT, PLACES, ASKING, THERE, SUM_Q, SUM_K, SUM_V, DQ, DK, DV,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, sdqb, sdqh, sdqn, sdkb, sdkh, sdkn, sdvb, sdvh, sdvn,
    n, total, reach, heads, rounds, query_tiles, key_tiles, scale, threshold, keep, shortest,
    SHARE: tl.constexpr, ROUND: tl.constexpr, LAST_ROUND: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    UNIT: tl.constexpr, DROP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr, BM1: tl.constexpr, BN1: tl.constexpr, BM2: tl.constexpr, BN2: tl.constexpr,
):  # fmt: skip
    """Add the gradients of one round: of a tile of keys (BN1, by BM1 queries at a time) or of queries (BM2, by BN2 keys).

    SUM_Q, SUM_K, SUM_V (rows n .) hold the gradients of earlier rounds in float32. The last round writes DQ, and DK and DV with
    a head for every query head.
    """
    pid = tl.program_id(0)
    tiles = query_tiles + key_tiles
    row = pid // tiles
    tile = pid % tiles
    wide = row.to(tl.int64)
    ORDER = PLACES + (wide * rounds + ROUND) * n
    MARKS = PLACES + 3 * total + wide * rounds * n
    Q = head_at(Q, row, sqb, sqh, heads, 1)
    K = head_at(K, row, skb, skh, heads, SHARE)
    V = head_at(V, row, svb, svh, heads, SHARE)
    GRAD = head_at(GRAD, row, sgb, sgh, heads, 1)
    SHORT += (row // SHARE).to(tl.int64) * n
    LSE += wide * n
    DELTA += wide * n
    ASKING += wide * n
    if tile < key_tiles:
        key_grads(
            tile, row, Q, K, V, GRAD, LSE, DELTA, SHORT, ORDER, MARKS, ASKING, THERE,
            SUM_K + wide * n * D, SUM_V + wide * n * E, head_at(DK, row, sdkb, sdkh, heads, 1),
            head_at(DV, row, sdvb, sdvh, heads, 1),
            sqn, skn, svn, sgn, sdkn, sdvn, n, total, reach, scale, threshold, keep, shortest,
            ROUND, LAST_ROUND, CAUSAL, OWN, UNIT, DROP, D, E, BD, BE, PRECISION, BM1, BN1,
        )  # fmt: skip
    else:
        query_grads(
            tile - key_tiles, row, Q, K, V, GRAD, LSE, DELTA, SHORT, ORDER, MARKS, ASKING, THERE,
            SUM_Q + wide * n * D, head_at(DQ, row, sdqb, sdqh, heads, 1),
            sqn, skn, svn, sgn, sdqn, n, total, reach, scale, threshold, keep,
            ROUND, LAST_ROUND, CAUSAL, OWN, UNIT, DROP, D, E, BD, BE, PRECISION, BM2, BN2,
        )  # fmt: skip
