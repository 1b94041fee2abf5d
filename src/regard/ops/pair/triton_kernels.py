"""Triton kernels of attention over all pairs: dot products under a relu, tables and factors. Additive scores have their own.

A row is a query head of the batch. Programs own tiles of queries and walk over tiles of keys, `step` keys each: BN, or with
factors the columns of y, so that the scores of a tile are a column of x times y. Scores under a softmax are base-2 logarithms.
Tiles whose pairs all exist have no masks. SEEN is how a causal query finds its keys: 0 not causal, 1 by arithmetic on places,
2 by positions that are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.triton_math import LOG2E, hash_keeps

BY_PLACE = tl.constexpr(1)
BY_POSITION = tl.constexpr(2)
LOWEST_TOP = tl.constexpr(-1.0e20)  # below every score: the maximum of no pairs so far
NO_PAIRS = tl.constexpr(1.0e30)  # log-sum-exp of a row without pairs: its weights become 0


@triton.jit
def pair_head(X, row, sb, sh, heads, SHARE: tl.constexpr):
    """Return the pointer to the head of a tensor (b h / SHARE ...) that a row reads."""
    b = row // heads
    h = row % heads // SHARE
    return X + b.to(tl.int64) * sb + h.to(tl.int64) * sh


@triton.jit
def pair_rows(X, i, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows i of a head, (rows BLOCK); columns behind SIZE are 0."""
    c = tl.arange(0, BLOCK)
    at = X + i.to(tl.int64)[:, None] * stride + c[None, :]
    if SIZE == BLOCK:
        return tl.load(at)
    return tl.load(at, mask=c[None, :] < SIZE, other=0.0)


@triton.jit
def write_pair_rows(X, i, stride, x, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = X + i.to(tl.int64)[:, None] * stride + c[None, :]
    tl.store(at, x.to(X.dtype.element_ty), mask=inside[:, None] & (c[None, :] < SIZE))


@triton.jit
def existing_pairs(at, key_at, there, VALID, j, SEEN: tl.constexpr, VALIDS: tl.constexpr):
    """Return which pairs exist: positions of queries and keys broadcast, and so does `there`, which keys are in the tile."""
    seen = there
    if VALIDS:
        seen = seen & (tl.load(VALID + j) != 0)
    if SEEN != 0:
        seen = seen & (key_at <= at)
    return seen


@triton.jit
def first_tiles(low, high, start, m, step, SEEN: tl.constexpr, MASKS: tl.constexpr):
    """Return how many tiles of keys queries low .. high - 1 see in full, and how many at all; with MASKS none counts as full."""
    bound = m
    whole = m
    if SEEN == BY_PLACE:
        bound = tl.minimum(m, high + start)
        whole = tl.minimum(m, low + start + 1)
    full = whole // step
    if MASKS:
        full = 0
    return full, (bound + step - 1) // step


@triton.jit
def pair_step(sums, own, keys, c, SHIFT: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr, TABLE: tl.constexpr,
              FACTORS: tl.constexpr, RELU: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, DROP: tl.constexpr,
              D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Add tile c of keys to the sums of a tile of queries: outputs (BM BE), weights and their number or maximum (BM)."""
    acc, total, top = sums
    q, y, X, T, part, at, drawn, factor, threshold = own
    K, V, VALID, KEY_AT, KEYED, skn, svn, m, step = keys
    r = tl.arange(0, BN)
    j = tl.minimum(c * step + r, m - 1)
    v = pair_rows(V, j, svn, E, BE)
    s = tl.zeros([q.shape[0], BN], tl.float32)
    if DOT:
        k = pair_rows(K, j, skn, D, BD)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    if TABLE:
        s += tl.load(T[:, None] + j[None, :]).to(tl.float32) * part
    if FACTORS:
        s += (tl.load(X + c).to(tl.float32) * LOG2E)[:, None] * y
    if MASKED:
        there = (r < step) & (c * step + r < m)
        key_at = j
        if SEEN == BY_POSITION:
            key_at = tl.load(KEY_AT + j)
        seen = existing_pairs(at[:, None], key_at[None, :], there[None, :], VALID, j[None, :], SEEN, VALIDS)
        s = tl.where(seen, s, float("-inf"))
    if RELU:
        p = tl.maximum(s, 0.0)
        total += tl.sum(p, 1)
        if MASKED:
            top += tl.sum(tl.where(s > float("-inf"), 1.0, 0.0), 1)
        else:
            top += SHIFT
    else:
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        top = new
    if DROP:
        p = tl.where(hash_keeps(drawn[:, None], tl.load(KEYED + j)[None, :], threshold), p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, top


@triton.jit(do_not_specialize=["n", "m", "start", "heads", "tiles", "rows", "threshold"])
def pair_forward(
    Q, K, V, OUT, STAT, TABLES, SHARES, XS, YS, AT, KEY_AT, VALID, DRAWN, KEYED,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, sth, stn, sxb, sxh, sxn, syb, syh, syn,
    n, m, step, start, heads, tiles, rows, scale, threshold, keep,
    SHARE: tl.constexpr, SHARE_K: tl.constexpr, DOT: tl.constexpr, TABLE: tl.constexpr, FACTORS: tl.constexpr,
    RELU: tl.constexpr, COUNT: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, MASKS: tl.constexpr, DROP: tl.constexpr,
    ATS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, Y: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile of queries, and STAT (rows n): their log-sum-exp, or the factor of their weights with RELU."""
    pid = tl.program_id(0)
    row = pid // tiles
    i = (tiles - 1 - pid % tiles) * BM + tl.arange(0, BM)  # causal: long tiles first
    here = tl.minimum(i, n - 1)
    b = (row // heads).to(tl.int64)
    wide = row.to(tl.int64)
    q = pair_rows(pair_head(Q, row, sqb, sqh, heads, 1), here, sqn, D, BD) if DOT else tl.zeros([BM, 16], tl.float32)
    at = here + start
    if ATS:
        at = tl.load(AT + b * n + here)
    T = TABLES + (row % heads).to(tl.int64) * sth + tl.minimum(at, rows - 1).to(tl.int64) * stn
    X = pair_head(XS, row, sxb, sxh, heads, 1) + here.to(tl.int64) * sxn
    y = pair_rows(pair_head(YS, row, syb, syh, heads, 1), here, syn, Y, BN).to(tl.float32) if FACTORS else q
    drawn = here
    if DROP:
        drawn = tl.load(DRAWN + wide * n + here)
    part = tl.load(SHARES + row % heads).to(tl.float32) * LOG2E if TABLE else 0.0
    own = (q, y, X, T, part, at, drawn, scale if RELU else scale * LOG2E, threshold)
    keys = (pair_head(K, row, skb, skh, heads, SHARE_K), pair_head(V, row, svb, svh, heads, SHARE), VALID + b * m,
            KEY_AT + b * m, KEYED, skn, svn, m, step)  # fmt: skip
    acc = tl.zeros([BM, BE], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.zeros([BM], tl.float32) if RELU else tl.full([BM], LOWEST_TOP, tl.float32)
    sums = (acc, total, top)
    first = (tiles - 1 - pid % tiles) * BM
    full, stop = first_tiles(first, first + BM, start, m, step, SEEN, MASKS)
    for c in range(0, full):
        sums = pair_step(sums, own, keys, c, BN, False, DOT, TABLE, FACTORS, RELU, SEEN, VALIDS, DROP,
                         D, E, BD, BE, BN, PRECISION)  # fmt: skip
    for c in range(full, stop):
        sums = pair_step(sums, own, keys, c, BN, True, DOT, TABLE, FACTORS, RELU, SEEN, VALIDS, DROP,
                         D, E, BD, BE, BN, PRECISION)  # fmt: skip
    acc, total, top = sums
    if COUNT:
        total = top
    some = total > 0
    whole = tl.where(some, total, 1.0)
    inside = i < n
    write_pair_rows(pair_head(OUT, row, sob, soh, heads, 1), i, son, acc * (keep / whole)[:, None], inside, E, BE)
    stat = 1.0 / whole if RELU else tl.where(some, top + tl.log2(whole), NO_PAIRS)
    tl.store(STAT + wide * n + i, stat, mask=inside)
