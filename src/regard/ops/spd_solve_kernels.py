"""Gauss-Jordan elimination of small symmetric positive definite matrices in Triton: see `regard.ops.spd_solve`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "e", "parts"])
def gauss_jordan(A, B, X, n, e, parts, BN: tl.constexpr, BE: tl.constexpr):
    """Write A^-1 B of one matrix (n n) and some of its right sides (n e). Pivots are positive: none is searched for."""
    pid = tl.program_id(0)
    i = tl.arange(0, BN)
    c = pid % parts * BE + tl.arange(0, BE)
    A += (pid // parts).to(tl.int64) * n * n
    at = (pid // parts).to(tl.int64) * n * e + i[:, None] * e + c[None, :]
    inside = (i[:, None] < n) & (c[None, :] < e)
    a = tl.load(A + i[:, None] * n + i[None, :], mask=(i[:, None] < n) & (i[None, :] < n), other=0.0)
    b = tl.load(B + at, mask=inside, other=0.0)
    for k in range(0, n):
        own = i[:, None] == k
        column = tl.sum(tl.where(i[None, :] == k, a, 0.0), 1)
        inverse_pivot = 1.0 / tl.sum(tl.where(i == k, column, 0.0), 0)
        row = tl.sum(tl.where(own, a, 0.0), 0) * inverse_pivot
        right = tl.sum(tl.where(own, b, 0.0), 0) * inverse_pivot
        a = tl.where(own, row[None, :], a - column[:, None] * row[None, :])
        b = tl.where(own, right[None, :], b - column[:, None] * right[None, :])
    tl.store(X + at, b, mask=inside)
