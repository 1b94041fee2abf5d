"""Triton kernels of attention inside of clusters: a cluster takes so few tokens that a program holds all its pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import FLOOR, HIDDEN, LONELY, head_at, load_tokens, store_tokens
from regard.ops.triton_math import LOG2E


@triton.jit
def load_members(INDEX, REAL, pid, row, i, w, MASKED: tl.constexpr):
    """Load the tokens at places i of a cluster, and which of them count; REAL (rows w)."""
    inside = i < w
    token = tl.load(INDEX + pid.to(tl.int64) * w + i, mask=inside, other=0)
    if MASKED:
        inside = inside & (tl.load(REAL + row.to(tl.int64) * w + i, mask=inside, other=0) != 0)
    return token, inside


@triton.jit
def member_weights(q, k, there, factor, PRECISION: tl.constexpr):
    """Return the exponentials of scores, their sums, and the largest scores; sums are 0 where there is no key."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    s = tl.where(there[None, :], s, HIDDEN)
    top = tl.maximum(tl.max(s, 1), FLOOR)
    weights = tl.exp2(s - top[:, None])
    return weights, tl.sum(weights, 1), top


@triton.jit(do_not_specialize=["w", "clusters", "heads"])
def attend_cluster(
    Q, K, V, OF_QUERIES, OF_KEYS, REAL, Y, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, w, clusters, heads, scale,
    MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
    BW: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write what BM queries of a cluster get from its keys, Y (rows clusters w E)."""
    pid = tl.program_id(0)
    row = pid // clusters
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    token, inside = load_members(OF_QUERIES, REAL, pid, row, i, w, False)
    key, there = load_members(OF_KEYS, REAL, pid, row, tl.arange(0, BW), w, MASKED)
    q = load_tokens(head_at(Q, row, sqb, sqh, heads, 1), token, sqn, inside, D, BD)
    k = load_tokens(head_at(K, row, skb, skh, heads, 1), key, skn, there, D, BD)
    v = load_tokens(head_at(V, row, svb, svh, heads, 1), key, svn, there, E, BE)
    weights, total, _ = member_weights(q, k, there, scale * LOG2E, PRECISION)
    y = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    y = y / tl.where(total > 0, total, 1.0)[:, None]
    store_tokens(Y + pid.to(tl.int64) * w * E, i, E, y, inside, E, BE)


@triton.jit(do_not_specialize=["n", "w", "clusters", "heads"])
def cluster_gradients(
    Q, K, V, GRAD, TIMES, OF_QUERIES, OF_KEYS, REAL_QUERIES, REAL_KEYS, DQ, DK, DV,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, n, w, clusters, heads, scale,
    MASKED_QUERIES: tl.constexpr, MASKED_KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, PRECISION: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the members of a cluster, DQ, DK (rows clusters w D) and DV (rows clusters w E).

    GRAD (b h n E) belongs to means over TIMES (rows n) clusters. Weights are computed once with a row for each query and once
    with a row for each key: no accumulator is ever transposed.
    """
    pid = tl.program_id(0)
    row = pid // clusters
    i = tl.arange(0, BW)
    token, asking = load_members(OF_QUERIES, REAL_QUERIES, pid, row, i, w, MASKED_QUERIES)
    key, there = load_members(OF_KEYS, REAL_KEYS, pid, row, i, w, MASKED_KEYS)
    q = load_tokens(head_at(Q, row, sqb, sqh, heads, 1), token, sqn, asking, D, BD)
    k = load_tokens(head_at(K, row, skb, skh, heads, 1), key, skn, there, D, BD)
    v = load_tokens(head_at(V, row, svb, svh, heads, 1), key, svn, there, E, BE)
    grad = load_tokens(head_at(GRAD, row, sgb, sgh, heads, 1), token, sgn, asking, E, BE)
    times = tl.load(TIMES + row.to(tl.int64) * n + token, mask=asking, other=1)
    grad = (grad.to(tl.float32) / tl.maximum(times, 1).to(tl.float32)[:, None]).to(q.dtype)
    factor = scale * LOG2E
    first = pid.to(tl.int64) * w
    weights, total, top = member_weights(q, k, there, factor, PRECISION)
    some = total > 0
    weights = weights / tl.where(some, total, 1.0)[:, None]
    dw = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    delta = tl.sum(weights * dw, 1)
    ds = weights * (dw - delta[:, None]) * scale
    dq = tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    store_tokens(DQ + first * D, i, D, dq, i < w, D, BD)
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), LONELY)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
    weights = tl.exp2(tl.where(there[:, None], s, HIDDEN) - lse[None, :])
    dv = tl.dot(weights.to(grad.dtype), grad, input_precision=PRECISION)
    store_tokens(DV + first * E, i, E, dv, i < w, E, BE)
    dw = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    ds = weights * (dw - delta[None, :]) * scale
    dk = tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    store_tokens(DK + first * D, i, D, dk, i < w, D, BD)
