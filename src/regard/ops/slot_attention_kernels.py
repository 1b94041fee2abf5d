"""Triton kernels of weights and gradients around the products of slots: see `regard.ops.slot_attention`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "r", "size"])
def join_slot_weights(WK, WV, OUT, PARTS, n, r, size, R: tl.constexpr, BN: tl.constexpr):
    """Write weights of keys and of values (n r) side by side, OUT (n 2r), and the sums and the largest of `size` tokens each:
    PARTS (programs 4 r), sums of both, then the largest of both.
    """
    pid = tl.program_id(0)
    first = pid * size
    end = tl.minimum(first + size, n)
    c = tl.arange(0, R)
    sum_k, sum_v = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    top_k, top_v = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for start in range(first, end, BN):
        j = (start + tl.arange(0, BN)).to(tl.int64)
        inside = (j[:, None] < end) & (c[None, :] < r)
        k = tl.load(WK + j[:, None] * r + c[None, :], mask=inside, other=0.0)
        v = tl.load(WV + j[:, None] * r + c[None, :], mask=inside, other=0.0)
        tl.store(OUT + j[:, None] * 2 * r + c[None, :], k, mask=inside)
        tl.store(OUT + j[:, None] * 2 * r + r + c[None, :], v, mask=inside)
        k, v = k.to(tl.float32), v.to(tl.float32)
        sum_k += tl.sum(k, 0)
        sum_v += tl.sum(v, 0)
        top_k = tl.maximum(top_k, tl.max(tl.abs(k), 0))
        top_v = tl.maximum(top_v, tl.max(tl.abs(v), 0))
    PARTS += pid * 4 * r
    tl.store(PARTS + c, sum_k, mask=c < r)
    tl.store(PARTS + r + c, sum_v, mask=c < r)
    tl.store(PARTS + 2 * r + c, top_k, mask=c < r)
    tl.store(PARTS + 3 * r + c, top_v, mask=c < r)


@triton.jit(do_not_specialize=["programs", "r"])
def finish_slot_weights(PARTS, MASS, BIAS, SEEN, programs, r, R: tl.constexpr):
    """Write the sums of weights, MASS (2 r), what is added to the scores of slots, BIAS (r), and 1 if one is seen, else 0."""
    c = tl.arange(0, R)
    sum_k, sum_v, top = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for number in range(0, programs):
        at = PARTS + number * 4 * r + c
        sum_k += tl.load(at, mask=c < r, other=0.0)
        sum_v += tl.load(at + r, mask=c < r, other=0.0)
        top = tl.maximum(top, tl.load(at + 2 * r, mask=c < r, other=0.0))
        top = tl.maximum(top, tl.load(at + 3 * r, mask=c < r, other=0.0))
    tl.store(MASS + c, sum_k.to(MASS.dtype.element_ty), mask=c < r)
    tl.store(MASS + r + c, sum_v.to(MASS.dtype.element_ty), mask=c < r)
    highest = tl.max(top, 0)
    lowest = tl.where(highest > 0, float("-inf"), 0.0)
    tl.store(BIAS + c, tl.where(top == 0, lowest, 0.0), mask=c < r)
    tl.store(SEEN, tl.where(highest > 0, 1.0, 0.0))


@triton.jit
def store_map_gradients(
    PARTS, MASS, BIAS, FLAT, DMASS, DBIAS, factor, row, parts, r, groups,
    BIASED: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the sum of the gradients of slots of one head, PARTS (rows parts r D), to FLAT (b r groups D); with a bias also what
    it adds to the gradients of masses, DMASS (rows 2r), and of the bias, DBIAS (b groups D).
    """
    c, x = tl.arange(0, R), tl.arange(0, BD)
    inside = (c[:, None] < r) & (x[None, :] < D)
    total = tl.zeros([R, BD], tl.float32)
    for number in range(0, parts):
        at = PARTS + (row.to(tl.int64) * parts + number) * r * D
        total += tl.load(at + c[:, None] * D + x[None, :], mask=inside, other=0.0)
    total = total * factor
    b, head = row // groups, row % groups
    at = FLAT + ((b * r + c[:, None]) * groups + head).to(tl.int64) * D + x[None, :]
    tl.store(at, total.to(FLAT.dtype.element_ty), mask=inside)
    if BIASED:
        bias = tl.load(BIAS + head * D + x, mask=x < D, other=0.0).to(tl.float32)
        mass = tl.load(MASS + c, mask=c < r, other=0.0).to(tl.float32)
        tl.store(DMASS + row * 2 * r + c, tl.sum(total * bias[None, :], 1), mask=c < r)
        tl.store(DBIAS + row * D + x, tl.sum(total * mass[:, None], 0), mask=x < D)


@triton.jit(do_not_specialize=["rows", "parts", "r", "groups"])
def slot_map_gradients(
    PARTS_K, PARTS_V, MASS, BIAS_K, BIAS_V, SEEN, FLAT_K, FLAT_V, DMASS, DBIAS_K, DBIAS_V, rows, parts, r, groups,
    BIASED: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of slots of keys by the first `rows` programs, of values by the others."""
    pid = tl.program_id(0)
    if pid < rows:
        store_map_gradients(
            PARTS_K, MASS, BIAS_K, FLAT_K, DMASS, DBIAS_K, 1.0, pid, parts, r, groups, BIASED, R, D, BD
        )  # fmt: skip
    else:
        seen = tl.load(SEEN)
        store_map_gradients(
            PARTS_V, MASS + r, BIAS_V, FLAT_V, DMASS + r, DBIAS_V, seen, pid - rows, parts, r, groups, BIASED, R, E, BE
        )  # fmt: skip


@triton.jit(do_not_specialize=["positions", "first", "n", "r", "batch"])
def slot_position_gradients(
    DW, DMASS, DK, DV, positions, first, n, r, batch, BIASED: tl.constexpr, R: tl.constexpr, BN: tl.constexpr
):
    """Write the gradients of all weights, DK and DV (positions r), from those of every row, DW (batch n 2r), and of masses (2r).

    Tokens are at positions from `first` on; others get zeros.
    """
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    j = at - first
    c = tl.arange(0, R)
    there = ((j >= 0) & (j < n))[:, None] & (c[None, :] < r)
    k, v = tl.zeros([BN, R], tl.float32), tl.zeros([BN, R], tl.float32)
    for b in range(0, batch):
        row = DW + (b * n + j).to(tl.int64)[:, None] * 2 * r + c[None, :]
        k += tl.load(row, mask=there, other=0.0).to(tl.float32)
        v += tl.load(row + r, mask=there, other=0.0).to(tl.float32)
    if BIASED:
        k += tl.load(DMASS + c, mask=c < r, other=0.0)[None, :]
        v += tl.load(DMASS + r + c, mask=c < r, other=0.0)[None, :]
    inside = (at[:, None] < positions) & (c[None, :] < r)
    out = at.to(tl.int64)[:, None] * r + c[None, :]
    tl.store(DK + out, tl.where(there, k, 0.0).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + out, tl.where(there, v, 0.0).to(DV.dtype.element_ty), mask=inside)
