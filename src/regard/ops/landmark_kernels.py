"""Triton kernels of what nystrom computes of landmarks alone: their means, the pseudo-inverse, and the gradients of both.

See `regard.ops.landmark_attention`. One program has all matrices of a head, padded to BS x BS, in float32. A matrix is loaded
transposed where a product needs it so: products of tiles that were computed and transposed are wrong on some cards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import head_at, load_tokens, store_tokens
from regard.ops.triton_math import LOG2E


@triton.jit
def segment_start(c, n, s):
    """Return the first of n tokens of segment c of s: token p belongs to segment p s // n."""
    return (c * n + s - 1) // s


@triton.jit
def store_mean(X, MEANS, sxb, sxh, sxn, pid, n, s, heads, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr):
    """Write the mean of one segment of a head of X (b h n D): MEANS (rows s D)."""
    c = pid % s
    X = head_at(X, pid // s, sxb, sxh, heads, 1)
    first, end = segment_start(c, n, s), segment_start(c + 1, n, s)
    total = tl.zeros([BD], tl.float32)
    for start in range(first, end, BT):
        i = start + tl.arange(0, BT)
        total += tl.sum(load_tokens(X, i, sxn, i < end, D, BD).to(tl.float32), 0)
    column = tl.arange(0, BD)
    tl.store(MEANS + pid.to(tl.int64) * D + column, total / (end - first), mask=column < D)


@triton.jit(do_not_specialize=["n", "m", "s", "t", "queries", "heads", "groups"])
def segment_means(
    Q, K, FEW_Q, FEW_K, sqb, sqh, sqn, skb, skh, skn, n, m, s, t, queries, heads, groups,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Write the means of segments of queries, FEW_Q (b heads s D), by the first `queries` programs, and of keys, FEW_K
    (b groups t D).
    """
    pid = tl.program_id(0)
    if pid < queries:
        store_mean(Q, FEW_Q, sqb, sqh, sqn, pid, n, s, heads, D, BD, BT)
    else:
        store_mean(K, FEW_K, skb, skh, skn, pid - queries, m, t, groups, D, BD, BT)


@triton.jit(do_not_specialize=["n", "s", "heads", "parts"])
def add_mean_gradients(DQ, OWN, PARTS, sdb, sdh, sdn, n, s, heads, parts, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr):
    """Add to DQ (b h n D) the gradient of its means: that of OWN (rows s D) and of all PARTS (rows parts s D)."""
    pid = tl.program_id(0)
    row, c = pid // s, pid % s
    column = tl.arange(0, BD)
    inside = column < D
    total = tl.load(OWN + pid.to(tl.int64) * D + column, mask=inside, other=0.0)
    at = PARTS + (row.to(tl.int64) * parts * s + c) * D + column
    for _ in range(0, parts):
        total += tl.load(at, mask=inside, other=0.0)
        at += s * D
    DQ = head_at(DQ, row, sdb, sdh, heads, 1)
    first, end = segment_start(c, n, s), segment_start(c + 1, n, s)
    total = total / (end - first)
    for start in range(first, end, BT):
        i = start + tl.arange(0, BT)
        x = load_tokens(DQ, i, sdn, i < end, D, BD).to(tl.float32)
        store_tokens(DQ, i, sdn, x + total[None, :], i < end, D, BD)


@triton.jit
def load_matrix(X, rows, columns, sr, sc, BR: tl.constexpr, BC: tl.constexpr):
    """Load a matrix (rows columns) by its strides, padded by zeros."""
    i, j = tl.arange(0, BR), tl.arange(0, BC)
    at = X + i[:, None] * sr + j[None, :] * sc
    return tl.load(at, mask=(i[:, None] < rows) & (j[None, :] < columns), other=0.0)


@triton.jit
def store_matrix(X, x, rows, columns, BR: tl.constexpr, BC: tl.constexpr):
    i, j = tl.arange(0, BR), tl.arange(0, BC)
    at = X + i[:, None] * columns + j[None, :]
    tl.store(at, x.to(X.dtype.element_ty), mask=(i[:, None] < rows) & (j[None, :] < columns))


@triton.jit
def load_sum(X, parts, rows, columns, sr, sc, BR: tl.constexpr, BC: tl.constexpr):
    """Load the sum of `parts` adjacent matrices (rows columns), by their strides."""
    total = tl.zeros([BR, BC], tl.float32)
    for number in range(0, parts):
        total += load_matrix(X + number * rows * columns, rows, columns, sr, sc, BR, BC)
    return total


@triton.jit
def landmark_weights(few_q, few_k, s, t, factor, BS: tl.constexpr, PRECISION: tl.constexpr):
    """Return S = softmax(few_q few_k^T) (s t) and its transpose, padded by zeros."""
    i = tl.arange(0, BS)
    scores = tl.dot(few_q, tl.trans(few_k), input_precision=PRECISION) * factor
    scores = tl.where(i[None, :] < t, scores, float("-inf"))
    w = tl.exp2(scores - tl.max(scores, 1)[:, None])
    w = tl.where(i[:, None] < s, w / tl.sum(w, 1)[:, None], 0.0)
    scores = tl.dot(few_k, tl.trans(few_q), input_precision=PRECISION) * factor
    scores = tl.where(i[:, None] < t, scores, float("-inf"))
    turned = tl.exp2(scores - tl.max(scores, 0)[None, :])
    turned = tl.where(i[None, :] < s, turned / tl.sum(turned, 0)[None, :], 0.0)
    return w, turned


@triton.jit
def inverse_of(a, n, BS: tl.constexpr):
    """Return the inverse of a symmetric positive definite matrix (n n), padded by an identity: Gauss-Jordan in place."""
    i = tl.arange(0, BS)
    for k in range(0, n):
        own_row, own_column = i[:, None] == k, i[None, :] == k
        column = tl.sum(tl.where(own_column, a, 0.0), 1)
        row = tl.sum(tl.where(own_row, a, 0.0), 0)
        inverse_pivot = 1.0 / tl.sum(tl.where(i == k, row, 0.0), 0)
        row = tl.where(i == k, 1.0, row) * inverse_pivot
        a = tl.where(own_column, 0.0, a) - column[:, None] * row[None, :]
        a = tl.where(own_row, row[None, :], a)
    return a


@triton.jit(do_not_specialize=["s", "t", "ridge"])
def landmark_inverse(
    FEW_Q, FEW_K, ANSWERS, S, STEPS, FOUND, HALF_K, HALF_V, s, t, scale, ridge,
    SHARE: tl.constexpr, ITERATIONS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write FOUND = S^+ ANSWERS (rows t E) of one head, and what the gradients need: S (rows s t), and in STEPS all iterates
    (rows ITERATIONS + 1, t s), or without iterations (S^T S + ridge)^-1 (rows t t). HALF_K and HALF_V (rows t .): landmarks of
    keys and FOUND in half precision.
    """
    row = tl.program_id(0).to(tl.int64)
    few_q = load_matrix(FEW_Q + row * s * D, s, D, D, 1, BS, BD)
    few_k = load_matrix(FEW_K + row // SHARE * t * D, t, D, D, 1, BS, BD)
    store_matrix(HALF_K + row * t * D, few_k, t, D, BS, BD)
    w, turned = landmark_weights(few_q, few_k, s, t, scale * LOG2E, BS, PRECISION)
    store_matrix(S + row * s * t, w, s, t, BS, BS)
    answers = load_matrix(ANSWERS + row * s * E, s, E, E, 1, BS, BE)
    i = tl.arange(0, BS)
    one = (i[:, None] == i[None, :]).to(tl.float32)
    if ITERATIONS > 0:
        STEPS += row * (ITERATIONS + 1) * t * s
        z = turned / tl.max(tl.sum(w, 0), 0)
        store_matrix(STEPS, z, t, s, BS, BS)
        for _ in range(0, ITERATIONS):
            near = tl.dot(w, z, input_precision=PRECISION)
            inner = 15.0 * one - tl.dot(near, 7.0 * one - near, input_precision=PRECISION)
            inner = 13.0 * one - tl.dot(near, inner, input_precision=PRECISION)
            z = tl.dot(z, inner, input_precision=PRECISION) * 0.25
            STEPS += t * s
            store_matrix(STEPS, z, t, s, BS, BS)
        found = tl.dot(z, answers, input_precision=PRECISION)
    else:
        square = tl.dot(turned, w, input_precision=PRECISION) + tl.where(i[:, None] < t, ridge, 1.0) * one
        inverse = inverse_of(square, t, BS)
        store_matrix(STEPS + row * t * t, inverse, t, t, BS, BS)
        found = tl.dot(inverse, tl.dot(turned, answers, input_precision=PRECISION), input_precision=PRECISION)
    store_matrix(FOUND + row * t * E, found, t, E, BS, BE)
    store_matrix(HALF_V + row * t * E, found, t, E, BS, BE)


@triton.jit
def iteration_gradients(S, STEPS, dz, s, t, ITERATIONS: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the gradient of S (s t), given that of the last iterate (t s). S Z and its polynomials are symmetric."""
    i = tl.arange(0, BS)
    one = (i[:, None] == i[None, :]).to(tl.float32)
    dw = tl.zeros([BS, BS], tl.float32)
    STEPS += (ITERATIONS - 1) * t * s
    for _ in range(0, ITERATIONS):
        w = load_matrix(S, s, t, t, 1, BS, BS)
        z = load_matrix(STEPS, t, s, s, 1, BS, BS)
        near = tl.dot(w, z, input_precision=PRECISION)
        first = 7.0 * one - near
        second = 15.0 * one - tl.dot(near, first, input_precision=PRECISION)
        third = 13.0 * one - tl.dot(near, second, input_precision=PRECISION)
        turned = load_matrix(STEPS, s, t, 1, s, BS, BS)
        dthird = tl.dot(turned, dz, input_precision=PRECISION) * -0.25
        dz = tl.dot(dz, third, input_precision=PRECISION) * 0.25
        dnear = tl.dot(dthird, second, input_precision=PRECISION)
        dsecond = -tl.dot(near, dthird, input_precision=PRECISION)
        dnear = tl.dot(dsecond, first, dnear, input_precision=PRECISION)
        dnear -= tl.dot(near, dsecond, input_precision=PRECISION)
        dw = tl.dot(dnear, turned, dw, input_precision=PRECISION)
        turned = load_matrix(S, t, s, 1, t, BS, BS)
        dz = tl.dot(turned, dnear, dz, input_precision=PRECISION)
        STEPS -= t * s
    start = load_matrix(STEPS + t * s, t, s, s, 1, BS, BS)
    sums = tl.sum(load_matrix(S, s, t, t, 1, BS, BS), 0)
    largest = tl.max(sums, 0)
    dlargest = -tl.sum(tl.sum(dz * start, 1), 0) / largest
    highest = (sums == largest).to(tl.float32)
    dsums = highest * (dlargest / tl.sum(highest, 0))
    return dw + tl.trans(dz) / largest + dsums[None, :]


@triton.jit
def ridge_gradients(
    S, INVERSE, FOUND, ANSWERS, DFOUND, dfound, parts, s, t, E: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradients of S (s t) and of the answers (s E), given that of FOUND (t E), the sum of `parts` in DFOUND."""
    w = load_matrix(S, s, t, t, 1, BS, BS)
    inverse = load_matrix(INVERSE, t, t, t, 1, BS, BS)
    solved = tl.dot(inverse, dfound, input_precision=PRECISION)
    turned = tl.dot(load_sum(DFOUND, parts, E, t, 1, E, BE, BS), inverse, input_precision=PRECISION)  # (E t)
    dsquare = tl.dot(solved, load_matrix(FOUND, E, t, 1, E, BE, BS), input_precision=PRECISION)
    dsquare = tl.dot(load_matrix(FOUND, t, E, E, 1, BS, BE), turned, dsquare, input_precision=PRECISION)
    dw = tl.dot(load_matrix(ANSWERS, s, E, E, 1, BS, BE), turned, input_precision=PRECISION)
    dw -= tl.dot(w, dsquare, input_precision=PRECISION)
    return dw, tl.dot(w, solved, input_precision=PRECISION)


@triton.jit(do_not_specialize=["s", "t", "parts"])
def landmark_gradients(
    FEW_K, ANSWERS, S, STEPS, FOUND, DK, DFOUND, DANSWERS, DSCORES, DQ, DK_SUM, s, t, parts, scale,
    SHARE: tl.constexpr, ITERATIONS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one head: of ANSWERS, and through S those of scores times scale, DSCORES (rows s t), and of the
    landmarks of queries, DQ (rows s D). Given: those of FOUND and of landmarks of keys, DFOUND and DK (rows parts t .), to be
    summed; the latter sum is written too, DK_SUM (rows t D).
    """
    row = tl.program_id(0).to(tl.int64)
    ANSWERS += row * s * E
    S += row * s * t
    FOUND += row * t * E
    DFOUND += row * parts * t * E
    dfound = load_sum(DFOUND, parts, t, E, E, 1, BS, BE)
    if ITERATIONS > 0:
        STEPS += row * (ITERATIONS + 1) * t * s
        dz = tl.dot(dfound, load_matrix(ANSWERS, E, s, 1, E, BE, BS), input_precision=PRECISION)
        last = load_matrix(STEPS + ITERATIONS * t * s, s, t, 1, s, BS, BS)
        danswers = tl.dot(last, dfound, input_precision=PRECISION)
        dw = iteration_gradients(S, STEPS, dz, s, t, ITERATIONS, BS, PRECISION)
    else:
        STEPS += row * t * t
        dw, danswers = ridge_gradients(S, STEPS, FOUND, ANSWERS, DFOUND, dfound, parts, s, t, E, BE, BS, PRECISION)
    store_matrix(DANSWERS + row * s * E, danswers, s, E, BS, BE)
    w = load_matrix(S, s, t, t, 1, BS, BS)
    dscores = w * (dw - tl.sum(w * dw, 1)[:, None]) * scale
    store_matrix(DSCORES + row * s * t, dscores, s, t, BS, BS)
    few_k = load_matrix(FEW_K + row // SHARE * t * D, t, D, D, 1, BS, BD)
    store_matrix(DQ + row * s * D, tl.dot(dscores, few_k, input_precision=PRECISION), s, D, BS, BD)
    dk = load_sum(DK + row * parts * t * D, parts, t, D, D, 1, BS, BD)
    store_matrix(DK_SUM + row * t * D, dk, t, D, BS, BD)
