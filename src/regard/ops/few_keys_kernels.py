"""Triton kernels of many queries that see the same few keys: see `regard.ops.few_keys`.

All keys lie in one tile, so that the weights of a query are computed at once, again in the backward pass. There a program owns a
segment of queries and sums what it adds to the gradients of keys and values; scores are computed twice, by queries and transposed
by keys. Scores are base-2 logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import head_at, load_tokens, store_tokens
from regard.ops.triton_math import LOG2E


@triton.jit
def key_bias(BIAS, row, sbb, sbh, heads, m, BIASED: tl.constexpr, BN: tl.constexpr):
    """Return what is added to the scores of every key, times log2(e); -inf behind the last key."""
    j = tl.arange(0, BN)
    bias = tl.where(j < m, 0.0, float("-inf"))
    if BIASED:
        at = BIAS + (row // heads).to(tl.int64) * sbb + (row % heads).to(tl.int64) * sbh
        bias += tl.load(at + j, mask=j < m, other=0.0).to(tl.float32) * LOG2E
    return bias


@triton.jit(do_not_specialize=["n", "m", "heads", "tiles"])
def few_keys_forward(
    Q, K, V, BIAS, OUT, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sbb, sbh, sob, soh, son,
    n, m, heads, tiles, scale,
    SHARE: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile of queries."""
    pid = tl.program_id(0)
    row = pid // tiles
    i = pid % tiles * BM + tl.arange(0, BM)
    j = tl.arange(0, BN)
    q = load_tokens(head_at(Q, row, sqb, sqh, heads, 1), i, sqn, i < n, D, BD)
    k = load_tokens(head_at(K, row, skb, skh, heads, SHARE), j, skn, j < m, D, BD)
    v = load_tokens(head_at(V, row, svb, svh, heads, SHARE), j, svn, j < m, E, BE)
    bias = key_bias(BIAS, row, sbb, sbh, heads, m, BIASED, BN)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) + bias[None, :]
    w = tl.exp2(s - tl.max(s, 1)[:, None])
    total = tl.sum(w, 1)
    out = tl.dot(w.to(v.dtype), v, input_precision=PRECISION) / total[:, None]
    store_tokens(head_at(OUT, row, sob, soh, heads, 1), i, son, out, i < n, E, BE)


@triton.jit(do_not_specialize=["n", "m", "heads", "segments", "size"])
def few_keys_backward(
    Q, K, V, BIAS, GRAD, DQ, DK, DV, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sbb, sbh, sgb, sgh, sgn, sdb, sdh, sdn,
    n, m, heads, segments, size, scale,
    SHARE: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a segment of `size` queries, and what they add to those of keys and values: DK (rows segments m D)
    and DV (rows segments m E).
    """
    pid = tl.program_id(0)
    row = pid // segments
    first = pid % segments * size
    j = tl.arange(0, BN)
    Q = head_at(Q, row, sqb, sqh, heads, 1)
    GRAD = head_at(GRAD, row, sgb, sgh, heads, 1)
    DQ = head_at(DQ, row, sdb, sdh, heads, 1)
    k = load_tokens(head_at(K, row, skb, skh, heads, SHARE), j, skn, j < m, D, BD)
    v = load_tokens(head_at(V, row, svb, svh, heads, SHARE), j, svn, j < m, E, BE)
    bias = key_bias(BIAS, row, sbb, sbh, heads, m, BIASED, BN)
    factor = scale * LOG2E
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    for start in range(first, tl.minimum(first + size, n), BM):
        i = start + tl.arange(0, BM)
        q = load_tokens(Q, i, sqn, i < n, D, BD)
        grad = load_tokens(GRAD, i, sgn, i < n, E, BE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor + bias[None, :]
        top = tl.max(s, 1)
        lse = top + tl.log2(tl.sum(tl.exp2(s - top[:, None]), 1))
        w = tl.exp2(s - lse[:, None])
        dw = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        delta = tl.sum(w * dw, 1)
        ds = w * (dw - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
        store_tokens(DQ, i, sdn, dq * scale, i < n, D, BD)
        turned = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor + bias[:, None]
        w = tl.exp2(turned - lse[None, :])
        dv = tl.dot(w.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = w * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    store_tokens(DK + pid.to(tl.int64) * m * D, j, D, dk * scale, j < m, D, BD)
    store_tokens(DV + pid.to(tl.int64) * m * E, j, E, dv, j < m, E, BE)
