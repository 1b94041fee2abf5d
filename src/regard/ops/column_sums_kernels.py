"""Triton kernel of sums of columns: see `regard.ops.joined_linear`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "size"])
def column_sums(X, OUT, rows, columns, size, BR: tl.constexpr, BC: tl.constexpr):
    """Write the sums of `size` rows of X (rows columns): OUT (programs columns)."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1) * size
    end = tl.minimum(first + size, rows)
    total = tl.zeros([BR, BC], tl.float32)
    for start in range(first, end, BR):
        i = start + tl.arange(0, BR)
        at = X + i.to(tl.int64)[:, None] * columns + c[None, :]
        total += tl.load(at, mask=(i[:, None] < end) & (c[None, :] < columns), other=0.0).to(tl.float32)
    tl.store(OUT + tl.program_id(1) * columns + c, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=c < columns)
