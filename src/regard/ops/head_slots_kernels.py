"""Triton kernels of sums of keys and values with a weight for every position and slot: see `regard.ops.head_slots`."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import head_at, load_tokens, store_tokens


@triton.jit
def store_slot_sums(
    X, W, PARTS, TOPS, sxb, sxh, sxn, sw, pid, n, r, heads, segments, size,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what a segment of tokens of one head adds to slots, PARTS (rows segments r D), and its largest weights, TOPS."""
    row = pid // segments
    first = pid % segments * size
    end = tl.minimum(first + size, n)
    X = head_at(X, row, sxb, sxh, heads, 1)
    W += (row % heads).to(tl.int64) * sw
    c = tl.arange(0, R)
    total = tl.zeros([R, BD], tl.float32)
    top = tl.zeros([R], tl.float32)
    for start in range(first, end, BN):
        j = start + tl.arange(0, BN)
        x = load_tokens(X, j, sxn, j < end, D, BD)
        w = tl.load(W + j.to(tl.int64)[:, None] * r + c[None, :], mask=(j[:, None] < end) & (c[None, :] < r), other=0.0)
        top = tl.maximum(top, tl.max(tl.abs(w.to(tl.float32)), 0))
        total = tl.dot(tl.trans(w.to(x.dtype)), x, total, input_precision=PRECISION)
    store_tokens(PARTS + pid.to(tl.int64) * r * D, c, D, total, c < r, D, BD)
    tl.store(TOPS + pid.to(tl.int64) * r + c, top, mask=c < r)


@triton.jit(do_not_specialize=["n", "r", "heads", "segments", "size", "programs"])
def slot_sums(
    K, V, WK, WV, PARTS_K, PARTS_V, TOPS, skb, skh, skn, svb, svh, svn, sw, n, r, heads, segments, size, programs,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sums of keys by the first `programs`, of values by the others. TOPS (2 rows segments r)."""
    pid = tl.program_id(0)
    if pid < programs:
        store_slot_sums(K, WK, PARTS_K, TOPS, skb, skh, skn, sw, pid, n, r, heads, segments, size, R, D, BD, BN, PRECISION)
    else:
        pid -= programs
        TOPS += programs.to(tl.int64) * r
        store_slot_sums(V, WV, PARTS_V, TOPS, svb, svh, svn, sw, pid, n, r, heads, segments, size, R, E, BE, BN, PRECISION)


@triton.jit
def store_slot_gradients(
    X, W, GRAD, DX, DW, sxb, sxh, sxn, sw, sdb, sdh, sdn, pid, n, r, heads, batch, tiles,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of tokens of one head in all rows of the batch, and of their weights."""
    head = pid // tiles
    j = pid % tiles * BN + tl.arange(0, BN)
    c = tl.arange(0, R)
    at = j.to(tl.int64)[:, None] * r + c[None, :]
    inside = (j[:, None] < n) & (c[None, :] < r)
    w = tl.load(W + head.to(tl.int64) * sw + at, mask=inside, other=0.0)
    dw = tl.zeros([BN, R], tl.float32)
    for b in range(0, batch):
        row = b * heads + head
        x = load_tokens(head_at(X, row, sxb, sxh, heads, 1), j, sxn, j < n, D, BD)
        grad = load_tokens(GRAD + row.to(tl.int64) * r * D, c, D, c < r, D, BD).to(x.dtype)
        dx = tl.dot(w.to(x.dtype), grad, input_precision=PRECISION)
        dw = tl.dot(x, tl.trans(grad), dw, input_precision=PRECISION)
        store_tokens(head_at(DX, row, sdb, sdh, heads, 1), j, sdn, dx, j < n, D, BD)
    tl.store(DW + head.to(tl.int64) * sw + at, dw.to(DW.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "r", "heads", "batch", "tiles", "programs"])
def slot_sum_gradients(
    K, V, WK, WV, GRAD_K, GRAD_V, DK, DV, DWK, DWV,
    skb, skh, skn, svb, svh, svn, sw, sdb, sdh, sdn, seb, seh, sen, n, r, heads, batch, tiles, programs,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys by the first `programs`, of values by the others, given those of slots (rows r .)."""
    pid = tl.program_id(0)
    if pid < programs:
        store_slot_gradients(
            K, WK, GRAD_K, DK, DWK, skb, skh, skn, sw, sdb, sdh, sdn, pid, n, r, heads, batch, tiles, R, D, BD, BN, PRECISION
        )
    else:
        pid -= programs
        store_slot_gradients(
            V, WV, GRAD_V, DV, DWV, svb, svh, svn, sw, seb, seh, sen, pid, n, r, heads, batch, tiles, R, E, BE, BN, PRECISION
        )
