"""Triton kernels that divide queries into strides and merge what they got from near tokens and far strides: see
`regard.ops.stride_merge`. Query p behind the first ones is number p // rate of row h rate + p % rate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import head_at, load_tokens, store_tokens


@triton.jit
def far_at(row, i, first, slots, rate):
    """Return the places of queries i of a row in tensors (rows rate slots ...)."""
    p = tl.maximum(i - first, 0)
    return (row.to(tl.int64) * rate + p % rate) * slots + p // rate


@triton.jit(do_not_specialize=["n", "first", "slots", "rate", "heads", "tiles"])
def divide_queries(
    Q, OUT, sqb, sqh, sqn, n, first, slots, rate, heads, tiles, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr
):
    """Write queries from `first` on by strides, OUT (rows rate slots D), and zeros behind the last."""
    pid = tl.program_id(0)
    row = pid // tiles
    i = first + pid % tiles * BM + tl.arange(0, BM)
    q = load_tokens(head_at(Q, row, sqb, sqh, heads, 1), i, sqn, i < n, D, BD)
    store_tokens(OUT, far_at(row, i, first, slots, rate), D, q, i < first + slots * rate, D, BD)


@triton.jit(do_not_specialize=["n", "first", "slots", "rate", "heads", "tiles"])
def join_query_gradients(
    NEAR, FAR, DQ, sab, sah, san, sdb, sdh, sdn, n, first, slots, rate, heads, tiles,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the sum of gradients of queries, NEAR (b h n D) and FAR (rows rate slots D)."""
    pid = tl.program_id(0)
    row = pid // tiles
    i = pid % tiles * BM + tl.arange(0, BM)
    x = load_tokens(head_at(NEAR, row, sab, sah, heads, 1), i, san, i < n, D, BD).to(tl.float32)
    x += load_tokens(FAR, far_at(row, i, first, slots, rate), D, (i >= first) & (i < n), D, BD).to(tl.float32)
    store_tokens(head_at(DQ, row, sdb, sdh, heads, 1), i, sdn, x, i < n, D, BD)


@triton.jit
def far_share(NEAR_LSE, FAR_LSE, row, i, at, n, there):
    """Return the share of far strides in the sums of weights of queries i."""
    near = tl.load(NEAR_LSE + row.to(tl.int64) * n + i, mask=i < n, other=0.0)
    far = tl.load(FAR_LSE + at, mask=there, other=0.0)
    return tl.where(there, 1.0 / (1.0 + tl.exp(tl.minimum(near - far, 80.0))), 0.0)


@triton.jit(do_not_specialize=["n", "first", "slots", "rate", "heads", "tiles"])
def merge_strides(
    NEAR, FAR, NEAR_LSE, FAR_LSE, OUT, sab, sah, san, sob, soh, son, n, first, slots, rate, heads, tiles,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile of queries from NEAR (b h n E) and FAR (rows rate slots E), by their log-sum-exp."""
    pid = tl.program_id(0)
    row = pid // tiles
    i = pid % tiles * BM + tl.arange(0, BM)
    there = (i >= first) & (i < n)
    at = far_at(row, i, first, slots, rate)
    share = far_share(NEAR_LSE, FAR_LSE, row, i, at, n, there)[:, None]
    near = load_tokens(head_at(NEAR, row, sab, sah, heads, 1), i, san, i < n, E, BE).to(tl.float32)
    far = load_tokens(FAR, at, E, there, E, BE).to(tl.float32)
    store_tokens(head_at(OUT, row, sob, soh, heads, 1), i, son, near * (1.0 - share) + far * share, i < n, E, BE)


@triton.jit(do_not_specialize=["n", "first", "slots", "rate", "heads", "tiles"])
def merge_gradients(
    NEAR, FAR, NEAR_LSE, FAR_LSE, GRAD, DNEAR, DFAR, DNEAR_LSE, DFAR_LSE, sab, sah, san, sgb, sgh, sgn, sdb, sdh, sdn,
    n, first, slots, rate, heads, tiles, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both outputs and of their log-sum-exp; zeros for places without a query."""
    pid = tl.program_id(0)
    row = pid // tiles
    i = pid % tiles * BM + tl.arange(0, BM)
    there = (i >= first) & (i < n)
    at = far_at(row, i, first, slots, rate)
    share = far_share(NEAR_LSE, FAR_LSE, row, i, at, n, there)
    near = load_tokens(head_at(NEAR, row, sab, sah, heads, 1), i, san, i < n, E, BE).to(tl.float32)
    far = load_tokens(FAR, at, E, there, E, BE).to(tl.float32)
    grad = load_tokens(head_at(GRAD, row, sgb, sgh, heads, 1), i, sgn, i < n, E, BE).to(tl.float32)
    slope = tl.sum(grad * (far - near), 1) * share * (1.0 - share)
    written = (i >= first) & (i < first + slots * rate)
    store_tokens(head_at(DNEAR, row, sdb, sdh, heads, 1), i, sdn, grad * (1.0 - share)[:, None], i < n, E, BE)
    store_tokens(DFAR, at, E, grad * share[:, None], written, E, BE)
    tl.store(DNEAR_LSE + row.to(tl.int64) * n + i, -slope, mask=i < n)
    tl.store(DFAR_LSE + at, slope, mask=written)
