"""Triton kernels of additive attention, sum_f w_f tanh(a_if + b_jf), without a tensor of pairs and features.

tanh(a + b) = 1 - 2 r with r = 1 / (1 + exp(2 a) exp(2 b)): exponentials are of single tokens, so that a pair and a feature cost
one product and a share of a reciprocal, one for two features: 1/x and 1/y are y and x times 1/(x y). The sum of w is the same for
all pairs and changes no softmax. Gradients: tanh' = 4 r (1 - r).

Exponentials are (rows features tokens), in float32; features are even in number, and tokens filled up with zeros to `rooms` of
queries and `room` of keys, so that tiles need no bounds. Tiles are (others, own): a program owns tokens of
the last dimension, so that sums over the others stay inside of a thread. Products of gradients and values are made in the same
way, column by column of transposed tensors: the result of a matrix product is laid out otherwise. No atomics: gradients of
features are added in memory that no other program writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.pair.triton_kernels import BY_PLACE, BY_POSITION, LOWEST_TOP, NO_PAIRS, existing_pairs, pair_head, pair_rows
from regard.ops.triton_math import hash_keeps

LARGEST_SUM = tl.constexpr(4.611686018427388e18)  # 2^62: two of them are no overflow, and tanh is 1 up to 2^-61


@triton.jit
def inverse(x, FAST: tl.constexpr):
    """Return 1 / x of numbers that are no less than 1; FAST: by the instruction that PyTorch's division begins with."""
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 1.0 / x


@triton.jit
def both_sums(OWN, OTHER, f, own, other, own_size, other_size):
    """Return 1 + exp(2 (a + b)) of features f and f + 1, (others own)."""
    OWN += f * own_size
    OTHER += f * other_size
    a = tl.load(OTHER + other)[:, None] * tl.load(OWN + own)[None, :] + 1.0
    b = tl.load(OTHER + other_size + other)[:, None] * tl.load(OWN + own_size + own)[None, :] + 1.0
    return tl.minimum(a, LARGEST_SUM), tl.minimum(b, LARGEST_SUM)


@triton.jit
def additive_scores(OWN, OTHER, W, own, other, own_size, other_size, FEATURES: tl.constexpr, OWNS: tl.constexpr,
                    OTHERS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Return the scores of a tile (others own), base-2 logarithms; W: weights times -2 / log(2)."""
    s = tl.zeros([OTHERS, OWNS], tl.float32)
    for f in range(0, FEATURES, 2):
        a, b = both_sums(OWN, OTHER, f, own, other, own_size, other_size)
        s += (tl.load(W + f) * b + tl.load(W + f + 1) * a) * inverse(a * b, FAST)
    return s


@triton.jit
def column_products(OWN, OTHER, own, other, own_size, other_size, COLUMNS: tl.constexpr, OWNS: tl.constexpr,
                    OTHERS: tl.constexpr):  # fmt: skip
    """Return the products of tokens of two tensors (columns tokens), (others own)."""
    s = tl.zeros([OTHERS, OWNS], tl.float32)
    for c in range(0, COLUMNS):
        s += tl.load(OTHER + c * other_size + other)[:, None] * tl.load(OWN + c * own_size + own)[None, :]
    return s


@triton.jit(do_not_specialize=["n", "m", "start", "heads", "tiles", "threshold"])
def additive_forward(
    UQ, UK, W, V, OUT, STAT, AT, KEY_AT, VALID, DRAWN, KEYED, svb, svh, svn, sob, soh, son,
    n, m, rooms, room, start, heads, tiles, threshold, keep,
    SHARE: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, DROP: tl.constexpr, FEATURES: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile of queries, and their log-sum-exp into STAT (rows n)."""
    pid = tl.program_id(0)
    row = pid // tiles
    first = (tiles - 1 - pid % tiles) * BM  # causal: long tiles first
    i = first + tl.arange(0, BM)
    here = tl.minimum(i, n - 1)
    b = (row // heads).to(tl.int64)
    wide = row.to(tl.int64)
    UQ += wide * rooms * FEATURES
    UK += wide * room * FEATURES
    W += row % heads * FEATURES
    V = pair_head(V, row, svb, svh, heads, SHARE)
    at = here + start
    if SEEN == BY_POSITION:
        at = tl.load(AT + b * n + here)
    drawn = here
    if DROP:
        drawn = tl.load(DRAWN + wide * n + here)
    acc = tl.zeros([BE, BM], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], LOWEST_TOP, tl.float32)
    stop = m
    if SEEN == BY_PLACE:
        stop = tl.minimum(m, first + BM + start)
    for j0 in range(0, stop, BN):
        number = j0 + tl.arange(0, BN)
        j = tl.minimum(number, m - 1)
        s = additive_scores(UQ, UK, W, i, number, rooms, room, FEATURES, BM, BN, FAST)
        key_at = j
        if SEEN == BY_POSITION:
            key_at = tl.load(KEY_AT + b * m + j)
        seen = existing_pairs(at[None, :], key_at[:, None], (number < m)[:, None], VALID + b * m, j[:, None], SEEN, VALIDS)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 0))
        p = tl.exp2(s - new[None, :])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(p, 0)
        top = new
        if DROP:
            p = tl.where(hash_keeps(drawn[None, :], tl.load(KEYED + j)[:, None], threshold), p, 0.0)
        v = pair_rows(V, j, svn, E, BE)
        acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * fade[None, :], input_precision=PRECISION)
    some = total > 0
    whole = tl.where(some, total, 1.0)
    OUT = pair_head(OUT, row, sob, soh, heads, 1)
    write_columns(OUT, i, son, acc * (keep / whole)[None, :], i < n, E, BE)
    tl.store(STAT + wide * n + i, tl.where(some, top + tl.log2(whole), NO_PAIRS), mask=i < n)


@triton.jit
def write_columns(X, i, stride, x, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store x (BLOCK tokens), transposed, as the first SIZE columns of rows i."""
    c = tl.arange(0, BLOCK)
    at = X + i.to(tl.int64)[None, :] * stride + c[:, None]
    tl.store(at, x.to(X.dtype.element_ty), mask=inside[None, :] & (c[:, None] < SIZE))


@triton.jit
def add_to(X, x):
    tl.store(X, tl.load(X) + x)


@triton.jit
def add_feature_grads(OWN, OTHER, GRADS, SUMS, ds, own, other, own_size, other_size, FEATURES: tl.constexpr,
                      FAST: tl.constexpr, WITH_SUMS: tl.constexpr):  # fmt: skip
    """Add a tile of score gradients (others own) to those of its own features, up to their weights: sums of ds r (1 - r).

    GRADS and SUMS (features own_size): those sums, and WITH_SUMS those of ds r.
    """
    for f in range(0, FEATURES, 2):
        a, b = both_sums(OWN, OTHER, f, own, other, own_size, other_size)
        r = inverse(a * b, FAST)
        first = ds * (r * b)
        second = ds * (r * a)
        add_to(GRADS + f * own_size + own, tl.sum(first - first * (r * b), 0))
        add_to(GRADS + (f + 1) * own_size + own, tl.sum(second - second * (r * a), 0))
        if WITH_SUMS:
            add_to(SUMS + f * own_size + own, tl.sum(first, 0))
            add_to(SUMS + (f + 1) * own_size + own, tl.sum(second, 0))


@triton.jit(do_not_specialize=["n", "m", "start", "heads", "tiles", "threshold"])
def additive_query_grads(
    UQ, UK, W, VT, OUT, GRAD, GT, STAT, DELTA, GRADS, SUMS, AT, KEY_AT, VALID, DRAWN, KEYED,
    sob, soh, son, sgb, sgh, sgn, n, m, rooms, room, start, heads, tiles, threshold, keep,
    SHARE: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, DROP: tl.constexpr, FEATURES: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile of queries to GRADS and SUMS (rows features n), which are 0, and write DELTA (rows n)."""
    pid = tl.program_id(0)
    row = pid // tiles
    first = (tiles - 1 - pid % tiles) * BM
    i = first + tl.arange(0, BM)
    inside = i < n
    here = tl.minimum(i, n - 1)
    b = (row // heads).to(tl.int64)
    wide = row.to(tl.int64)
    UQ += wide * rooms * FEATURES
    UK += wide * room * FEATURES
    GRADS += wide * rooms * FEATURES
    SUMS += wide * rooms * FEATURES
    W += row % heads * FEATURES
    GT += wide * rooms * E
    VT += wide // SHARE * room * E
    grad = pair_rows(pair_head(GRAD, row, sgb, sgh, heads, 1), here, sgn, E, BE)
    out = pair_rows(pair_head(OUT, row, sob, soh, heads, 1), here, son, E, BE)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(DELTA + wide * n + i, delta, mask=inside)
    stat = tl.load(STAT + wide * n + here)
    at = here + start
    if SEEN == BY_POSITION:
        at = tl.load(AT + b * n + here)
    drawn = here
    if DROP:
        drawn = tl.load(DRAWN + wide * n + here)
    stop = m
    if SEEN == BY_PLACE:
        stop = tl.minimum(m, first + BM + start)
    for j0 in range(0, stop, BN):
        number = j0 + tl.arange(0, BN)
        j = tl.minimum(number, m - 1)
        s = additive_scores(UQ, UK, W, i, number, rooms, room, FEATURES, BM, BN, FAST)
        key_at = j
        if SEEN == BY_POSITION:
            key_at = tl.load(KEY_AT + b * m + j)
        seen = existing_pairs(at[None, :], key_at[:, None], (number < m)[:, None], VALID + b * m, j[:, None], SEEN, VALIDS)
        p = tl.exp2(tl.where(seen, s, float("-inf")) - stat[None, :])
        dw = column_products(GT, VT, i, number, rooms, room, E, BM, BN)
        if DROP:
            dw = tl.where(hash_keeps(drawn[None, :], tl.load(KEYED + j)[:, None], threshold), dw * keep, 0.0)
        ds = p * (dw - delta[None, :])
        add_feature_grads(UQ, UK, GRADS, SUMS, ds, i, number, rooms, room, FEATURES, FAST, True)
        tl.debug_barrier()  # the next tile reads what this one added


@triton.jit(do_not_specialize=["n", "m", "start", "heads", "tiles", "threshold"])
def additive_key_grads(
    UQ, UK, W, VT, GRAD, GT, STAT, DELTA, GRADS, DV, AT, KEY_AT, VALID, DRAWN, KEYED,
    sgb, sgh, sgn, sdb, sdh, sdn, n, m, rooms, room, start, heads, tiles, threshold, keep,
    SHARE: tl.constexpr, SEEN: tl.constexpr, VALIDS: tl.constexpr, DROP: tl.constexpr, FEATURES: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile of keys to GRADS (rows features m), which are 0, and write those of values, for every row."""
    pid = tl.program_id(0)
    row = pid // tiles
    first = pid % tiles * BN
    number = first + tl.arange(0, BN)
    there = number < m
    j = tl.minimum(number, m - 1)
    b = (row // heads).to(tl.int64)
    wide = row.to(tl.int64)
    UQ += wide * rooms * FEATURES
    UK += wide * room * FEATURES
    GRADS += wide * room * FEATURES
    W += row % heads * FEATURES
    GRAD = pair_head(GRAD, row, sgb, sgh, heads, 1)
    GT += wide * rooms * E
    VT += wide // SHARE * room * E
    key_at = j
    if SEEN == BY_POSITION:
        key_at = tl.load(KEY_AT + b * m + j)
    keyed = j
    if DROP:
        keyed = tl.load(KEYED + j)
    dv = tl.zeros([BE, BN], tl.float32)
    begin = 0
    if SEEN == BY_PLACE:
        begin = tl.maximum(first - start, 0) // BM * BM
    for i0 in range(begin, n, BM):
        i = i0 + tl.arange(0, BM)
        here = tl.minimum(i, n - 1)
        s = additive_scores(UK, UQ, W, number, i, room, rooms, FEATURES, BN, BM, FAST)
        at = here + start
        if SEEN == BY_POSITION:
            at = tl.load(AT + b * n + here)
        seen = existing_pairs(at[:, None], key_at[None, :], (i < n)[:, None], VALID + b * m, j[None, :], SEEN, VALIDS)
        stat = tl.load(STAT + wide * n + here)
        delta = tl.load(DELTA + wide * n + here)
        p = tl.exp2(tl.where(seen, s, float("-inf")) - stat[:, None])
        grad = pair_rows(GRAD, here, sgn, E, BE)
        dw = column_products(VT, GT, number, i, room, rooms, E, BN, BM)
        dropped = p
        if DROP:
            kept = hash_keeps(tl.load(DRAWN + wide * n + here)[:, None], keyed[None, :], threshold)
            dropped = tl.where(kept, p * keep, 0.0)
            dw = tl.where(kept, dw * keep, 0.0)
        dv = tl.dot(tl.trans(grad), dropped.to(grad.dtype), dv, input_precision=PRECISION)
        ds = p * (dw - delta[:, None])
        add_feature_grads(UK, UQ, GRADS, GRADS, ds, number, i, room, rooms, FEATURES, FAST, False)
        tl.debug_barrier()  # the next tile reads what this one added
    write_columns(pair_head(DV, row, sdb, sdh, heads, 1), number, sdn, dv, there, E, BE)
