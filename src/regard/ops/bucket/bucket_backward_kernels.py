"""Triton kernels of the backward pass of bucketed attention: weights are computed again from the log-sum-exp of all rounds.

In every round programs of one kernel own tiles of queries, those of the other tiles of keys. Each adds the gradients of its tile
to what earlier rounds stored. Score tiles of key programs are computed transposed: no accumulator is ever transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import (
    HIDDEN,
    LONELY,
    earlier_places,
    earlier_ranges,
    head_at,
    load_tokens,
    number_of_places,
    other_places,
    seeing_places,
    store_tokens,
    within,
)
from regard.ops.triton_math import LOG2E, hash_keeps


@triton.jit(do_not_specialize=["n", "total", "reach", "heads", "rounds", "tiles", "threshold"])
def bucket_query_grads(
    Q, K, V, GRAD, LSE, DELTA, SHORT, PLACES, ASKING, THERE, SUM, DQ,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, sdb, sdh, sdn,
    n, total, reach, heads, rounds, tiles, scale, threshold, keep,
    SHARE: tl.constexpr, ROUND: tl.constexpr, LAST_ROUND: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    UNIT: tl.constexpr, DROP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile of queries in one round: SUM (rows n D) holds those of earlier rounds in float32, and the last
    round writes DQ.
    """
    total = total.to(tl.int64)
    pid = tl.program_id(0)
    row = pid // tiles
    wide = row.to(tl.int64)
    ORDER = PLACES + (wide * rounds + ROUND) * n
    MARKS = PLACES + 3 * total + wide * rounds * n
    Q = head_at(Q, row, sqb, sqh, heads, 1)
    K = head_at(K, row, skb, skh, heads, SHARE)
    V = head_at(V, row, svb, svh, heads, SHARE)
    GRAD = head_at(GRAD, row, sgb, sgh, heads, 1)
    DQ = head_at(DQ, row, sdb, sdh, heads, 1)
    SHORT += (row // SHARE).to(tl.int64) * n
    LSE += wide * n
    DELTA += wide * n
    SUM += wide * n * D
    p = pid % tiles * BM + tl.arange(0, BM)
    inside = p < n
    token = tl.load(ORDER + p, mask=inside, other=0)
    first = tl.load(ORDER + total + p, mask=inside, other=n)
    last = tl.load(ORDER + 2 * total + p, mask=inside, other=-1)
    low, high = other_places(p, first, last, reach, CAUSAL, OWN)
    number = number_of_places(low, high)
    ranges = earlier_ranges(MARKS, token, inside, n, total, reach, ROUND, CAUSAL, False)
    q = load_tokens(Q, token, sqn, inside, D, BD)
    grad = load_tokens(GRAD, token, sgn, inside, E, BE)
    lse = tl.load(LSE + token, mask=inside, other=LONELY)
    delta = tl.load(DELTA + token, mask=inside, other=0.0)
    if DROP:
        asking = tl.load(ASKING + wide * n + token, mask=inside, other=0)
    dq = tl.zeros([BM, BD], tl.float32)
    stop = tl.max(high) + 1
    for j0 in range(tl.min(low), stop, BN):
        j = j0 + tl.arange(0, BN)
        there = j < stop
        key = tl.load(ORDER + j, mask=there, other=0)
        k = load_tokens(K, key, skn, there, D, BD)
        v = load_tokens(V, key, svn, there, E, BE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if UNIT:
            short = tl.load(SHORT + key, mask=there, other=0.0)
            s *= (short * (scale * LOG2E))[None, :]
        else:
            s *= scale * LOG2E
        seen = within(j[None, :], low[:, None], number[:, None])
        if not OWN and not CAUSAL:
            seen = seen & (j[None, :] != p[:, None])
        at = earlier_places(MARKS, key, there, n, ROUND)
        for r in tl.static_range(ROUND):
            seen = seen & ~within(at[r][None, :], ranges[r][0][:, None], ranges[r][1][:, None])
        w = tl.exp2(tl.where(seen, s, HIDDEN) - lse[:, None])
        dw = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROP:
            kept = hash_keeps(asking[:, None], tl.load(THERE + key, mask=there, other=0)[None, :], threshold)
            dw = tl.where(kept, dw * keep, 0.0)
        ds = w * (dw - delta[:, None])
        if UNIT:
            ds *= short[None, :]
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq *= scale
    if ROUND > 0:
        dq += load_tokens(SUM, token, D, inside, D, BD)
    if LAST_ROUND:
        store_tokens(DQ, token, sdn, dq, inside, D, BD)
    else:
        store_tokens(SUM, token, D, dq, inside, D, BD)


@triton.jit(do_not_specialize=["n", "total", "reach", "heads", "rounds", "tiles", "threshold"])
def bucket_key_grads(
    Q, K, V, GRAD, LSE, DELTA, SHORT, PLACES, ASKING, THERE, SUM_K, SUM_V, DK, DV,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, sdkb, sdkh, sdkn, sdvb, sdvh, sdvn,
    n, total, reach, heads, rounds, tiles, scale, threshold, keep, shortest,
    SHARE: tl.constexpr, ROUND: tl.constexpr, LAST_ROUND: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    UNIT: tl.constexpr, DROP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile of keys and values in one round: SUM_K (rows n D) and SUM_V (rows n E) hold those of earlier
    rounds in float32. The last round writes DK and DV, with a head for every query head; gradients of unit keys become those
    of keys.
    """
    total = total.to(tl.int64)
    pid = tl.program_id(0)
    row = pid // tiles
    wide = row.to(tl.int64)
    ORDER = PLACES + (wide * rounds + ROUND) * n
    MARKS = PLACES + 3 * total + wide * rounds * n
    Q = head_at(Q, row, sqb, sqh, heads, 1)
    K = head_at(K, row, skb, skh, heads, SHARE)
    V = head_at(V, row, svb, svh, heads, SHARE)
    GRAD = head_at(GRAD, row, sgb, sgh, heads, 1)
    DK = head_at(DK, row, sdkb, sdkh, heads, 1)
    DV = head_at(DV, row, sdvb, sdvh, heads, 1)
    SHORT += (row // SHARE).to(tl.int64) * n
    LSE += wide * n
    DELTA += wide * n
    SUM_K += wide * n * D
    SUM_V += wide * n * E
    p = pid % tiles * BN + tl.arange(0, BN)
    there = p < n
    key = tl.load(ORDER + p, mask=there, other=0)
    first = tl.load(ORDER + total + p, mask=there, other=n)
    last = tl.load(ORDER + 2 * total + p, mask=there, other=-1)
    low, high = seeing_places(p, first, last, reach, CAUSAL, OWN)
    number = number_of_places(low, high)
    ranges = earlier_ranges(MARKS, key, there, n, total, reach, ROUND, CAUSAL, True)
    k = load_tokens(K, key, skn, there, D, BD)
    v = load_tokens(V, key, svn, there, E, BE)
    factor = tl.full([BN], scale * LOG2E, tl.float32)
    if UNIT:
        short = tl.load(SHORT + key, mask=there, other=0.0)
        factor *= short
    if DROP:
        keyed = tl.load(THERE + key, mask=there, other=0)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    stop = tl.max(high) + 1
    for i0 in range(tl.min(low), stop, BM):
        i = i0 + tl.arange(0, BM)
        inside = i < stop
        token = tl.load(ORDER + i, mask=inside, other=0)
        q = load_tokens(Q, token, sqn, inside, D, BD)
        grad = load_tokens(GRAD, token, sgn, inside, E, BE)
        lse = tl.load(LSE + token, mask=inside, other=LONELY)
        delta = tl.load(DELTA + token, mask=inside, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor[:, None]
        seen = within(i[None, :], low[:, None], number[:, None])
        if not OWN and not CAUSAL:
            seen = seen & (p[:, None] != i[None, :])
        at = earlier_places(MARKS, token, inside, n, ROUND)
        for r in tl.static_range(ROUND):
            seen = seen & ~within(at[r][None, :], ranges[r][0][:, None], ranges[r][1][:, None])
        w = tl.exp2(tl.where(seen, s, HIDDEN) - lse[None, :])
        dw = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = w
        if DROP:
            kept = hash_keeps(tl.load(ASKING + wide * n + token, mask=inside, other=0)[None, :], keyed[:, None], threshold)
            dropped = tl.where(kept, w * keep, 0.0)
            dw = tl.where(kept, dw * keep, 0.0)
        dv = tl.dot(dropped.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = w * (dw - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    dk *= scale
    if ROUND > 0:
        dk += load_tokens(SUM_K, key, D, there, D, BD)
        dv += load_tokens(SUM_V, key, E, there, E, BE)
    if not LAST_ROUND:
        store_tokens(SUM_K, key, D, dk, there, D, BD)
        store_tokens(SUM_V, key, E, dv, there, E, BE)
    else:
        if UNIT:
            unit = k.to(tl.float32) * short[:, None]
            along = tl.where(short < 1 / shortest, tl.sum(dk * unit, 1), 0.0)
            dk = (dk - unit * along[:, None]) * short[:, None]
        if not OWN:
            alone = there & (last >= 0) & (tl.load(LSE + key, mask=there, other=0.0) == LONELY)
            own_grad = load_tokens(GRAD, key, sgn, alone, E, BE).to(tl.float32)
            if DROP:
                kept = hash_keeps(tl.load(ASKING + wide * n + key, mask=there, other=0), keyed, threshold)
                own_grad = own_grad * tl.where(kept, keep, 0.0)[:, None]
            dv += own_grad
        store_tokens(DK, key, sdkn, dk, there, D, BD)
        store_tokens(DV, key, sdvn, dv, there, E, BE)
