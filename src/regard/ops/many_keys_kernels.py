"""Triton kernels of few queries that see many keys, in more digits than the keys have: see `regard.ops.many_keys`.

All queries of a head lie in one tile; keys are divided into segments, whose answers are merged by log-sum-exp. A float32 number
is the sum of two numbers of the type of keys, and products are sums of products of those. Scores are base-2 logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import HIDDEN, LONELY, head_at, load_tokens, store_tokens
from regard.ops.triton_math import LOG2E


@triton.jit
def two_parts(x, like):
    """Return two tensors of the type of `like` whose sum is x, up to the square of its rounding."""
    high = x.to(like.dtype)
    return high, (x - high.to(tl.float32)).to(like.dtype)


@triton.jit
def scored_keys(high, low, k, seen):
    """Return scores of queries, in two parts, and keys: (queries keys)."""
    turned = tl.trans(k)
    s = tl.dot(high, turned)
    s = tl.dot(low, turned, s)
    return tl.where(seen[None, :], s, HIDDEN)


@triton.jit
def seen_keys(VALID, j, end, MASKED: tl.constexpr):
    seen = j < end
    if MASKED:
        seen = seen & (tl.load(VALID + j, mask=seen, other=0) != 0)
    return seen


@triton.jit(do_not_specialize=["s", "n", "heads", "segments", "size"])
def many_keys_forward(
    Q, K, V, VALID, PARTS, LSES, skb, skh, skn, svb, svh, svn, s, n, heads, segments, size, scale,
    SHARE: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the answers of a segment of keys, PARTS (rows segments s E), and their log-sum-exp, LSES (rows segments s)."""
    pid = tl.program_id(0)
    row = pid // segments
    first = pid % segments * size
    end = tl.minimum(first + size, n)
    i = tl.arange(0, BM)
    K = head_at(K, row, skb, skh, heads, SHARE)
    V = head_at(V, row, svb, svh, heads, SHARE)
    VALID += (row // heads).to(tl.int64) * n
    q = load_tokens(Q + row.to(tl.int64) * s * D, i, D, i < s, D, BD) * (scale * LOG2E)
    top = tl.full([BM], HIDDEN, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BE], tl.float32)
    for start in range(first, end, BN):
        j = start + tl.arange(0, BN)
        k = load_tokens(K, j, skn, j < end, D, BD)
        v = load_tokens(V, j, svn, j < end, E, BE)
        high, low = two_parts(q, k)
        seen = seen_keys(VALID, j, end, MASKED)
        scores = scored_keys(high, low, k, seen)
        new = tl.maximum(top, tl.max(scores, 1))
        w = tl.where(seen[None, :], tl.exp2(scores - new[:, None]), 0.0)
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(w, 1)
        high, low = two_parts(w, v)
        acc = tl.dot(high, v, acc * fade[:, None])
        acc = tl.dot(low, v, acc)
        top = new
    safe = tl.where(total > 0, total, 1.0)
    store_tokens(PARTS + pid.to(tl.int64) * s * E, i, E, acc / safe[:, None], i < s, E, BE)
    tl.store(LSES + pid.to(tl.int64) * s + i, tl.where(total > 0, top + tl.log2(safe), HIDDEN), mask=i < s)


@triton.jit(do_not_specialize=["s", "segments"])
def merge_segments(PARTS, LSES, OUT, LSE, s, segments, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):
    """Merge the answers of all segments of some queries of a row: OUT (rows s E) and LSE (rows s)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = i < s
    top = tl.full([BM], HIDDEN, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BE], tl.float32)
    for number in range(0, segments):
        at = (row * segments + number) * s
        lse = tl.load(LSES + at + i, mask=inside, other=HIDDEN)
        part = load_tokens(PARTS + at * E, i, E, inside, E, BE)
        new = tl.maximum(top, lse)
        fade = tl.exp2(top - new)
        share = tl.where(lse > HIDDEN / 2, tl.exp2(lse - new), 0.0)
        acc = acc * fade[:, None] + part * share[:, None]
        total = total * fade + share
        top = new
    safe = tl.where(total > 0, total, 1.0)
    store_tokens(OUT + row * s * E, i, E, acc / safe[:, None], inside, E, BE)
    tl.store(LSE + row * s + i, tl.where(total > 0, top + tl.log2(safe), LONELY), mask=inside)


@triton.jit
def product_of_parts(a_high, a_low, b_high, b_low):
    """Return a b of two factors in two parts each."""
    x = tl.dot(a_high, b_high)
    x = tl.dot(a_low, b_high, x)
    return tl.dot(a_high, b_low, x)


@triton.jit
def mean_gradients(MEANS, j, inside, n, t, D: tl.constexpr, BD: tl.constexpr):
    """Return the gradients of keys j, given those of the means of t segments of keys: key j belongs to segment j t // n."""
    c = j * t // n
    size = ((c + 1) * n + t - 1) // t - (c * n + t - 1) // t
    return load_tokens(MEANS, c, D, inside, D, BD) / size[:, None]


@triton.jit(do_not_specialize=["s", "n", "heads", "segments", "size", "t"])
def many_keys_backward(
    Q, K, V, VALID, OUT, LSE, GRAD, MEANS, DQ, DK, DV, skb, skh, skn, svb, svh, svn, sdkb, sdkh, sdkn, sdvb, sdvh, sdvn,
    s, n, heads, segments, size, t, scale,
    SHARE: tl.constexpr, MASKED: tl.constexpr, MEAN: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a segment of keys and values, with a head for every query head, and what it adds to those of
    queries, DQ (rows segments s D). MEAN: those of keys take what the gradients of their t means, MEANS (rows t D), add.
    """
    pid = tl.program_id(0)
    row = pid // segments
    first = pid % segments * size
    end = tl.minimum(first + size, n)
    i = tl.arange(0, BM)
    wide = row.to(tl.int64)
    K = head_at(K, row, skb, skh, heads, SHARE)
    V = head_at(V, row, svb, svh, heads, SHARE)
    DK = head_at(DK, row, sdkb, sdkh, heads, 1)
    DV = head_at(DV, row, sdvb, sdvh, heads, 1)
    VALID += (row // heads).to(tl.int64) * n
    q = load_tokens(Q + wide * s * D, i, D, i < s, D, BD) * (scale * LOG2E)
    grad = load_tokens(GRAD + wide * s * E, i, E, i < s, E, BE)
    out = load_tokens(OUT + wide * s * E, i, E, i < s, E, BE)
    delta = tl.sum(out * grad, 1)
    lse = tl.load(LSE + wide * s + i, mask=i < s, other=LONELY)
    dq = tl.zeros([BM, BD], tl.float32)
    for start in range(first, end, BN):
        j = start + tl.arange(0, BN)
        k = load_tokens(K, j, skn, j < end, D, BD)
        v = load_tokens(V, j, svn, j < end, E, BE)
        q_high, q_low = two_parts(q, k)
        high, low = two_parts(grad, v)
        seen = seen_keys(VALID, j, end, MASKED)
        w = tl.exp2(scored_keys(q_high, q_low, k, seen) - lse[:, None])
        dw = tl.dot(low, tl.trans(v), tl.dot(high, tl.trans(v)))
        ds_high, ds_low = two_parts(w * (dw - delta[:, None]), k)
        dq = tl.dot(ds_high, k, dq)
        dq = tl.dot(ds_low, k, dq)
        turned = tl.dot(k, tl.trans(q_low), tl.dot(k, tl.trans(q_high)))
        w = tl.where(seen[:, None], tl.exp2(turned - lse[None, :]), 0.0)
        dw = tl.dot(v, tl.trans(low), tl.dot(v, tl.trans(high)))
        w_high, w_low = two_parts(w, v)
        dv = product_of_parts(w_high, w_low, high, low)
        ds_high, ds_low = two_parts(w * (dw - delta[None, :]), k)
        dk = product_of_parts(ds_high, ds_low, q_high, q_low)
        store_tokens(DV, j, sdvn, dv, j < end, E, BE)
        dk = dk / LOG2E
        if MEAN:
            dk += mean_gradients(MEANS + wide * t * D, j, j < end, n, t, D, BD)
        store_tokens(DK, j, sdkn, dk, j < end, D, BD)
    store_tokens(DQ + pid.to(tl.int64) * s * D, i, D, dq * scale, i < s, D, BD)
