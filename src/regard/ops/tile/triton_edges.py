"""Triton kernels that merge the pieces of rows which meet all tokens: outputs by log-sum-exp, gradients by ordered sums."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_kernels import LOWEST
from regard.ops.triton_math import LN2, LOG2E


@triton.jit(do_not_specialize=("n", "pieces"))
def merge_rows(OUT, LSE, PART, PART_LSE, sob, soh, son, n, H, pieces, E: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr):
    """Merge the attention of one query over pieces of its keys. Parts are (b * h, pieces, rows, E)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    c = tl.arange(0, BE)
    acc = tl.zeros([BE], tl.float32)
    total = 0.0
    top = LOWEST + 0.0
    for first in range(0, pieces, BP):
        piece = first + tl.arange(0, BP)
        at = (head * pieces + piece).to(tl.int64) * tl.num_programs(0) + row
        lse = tl.load(PART_LSE + at, mask=piece < pieces, other=LOWEST) * LOG2E
        out = tl.load(PART + at[:, None] * E + c[None, :], mask=(piece < pieces)[:, None] & (c < E)[None, :], other=0.0)
        new = tl.maximum(top, tl.max(lse, 0))
        fade = tl.exp2(top - new)
        share = tl.exp2(lse - new)
        acc = acc * fade + tl.sum(out * share[:, None], 0)
        total = total * fade + tl.sum(share, 0)
        top = new
    tl.store(OUT + b * sob + h * soh + row * son + c, (acc / total).to(OUT.dtype.element_ty), mask=c < E)
    tl.store(LSE + head.to(tl.int64) * n + row, (top + tl.log2(total)) * LN2)


@triton.jit
def sum_pieces(TOTAL, PART, sb, sh, sn, rows, pieces, batch, heads, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """Sum the gradient of one row over pieces, where there is such a row. Parts are (batch * heads, pieces, rows, C)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    c = tl.arange(0, BC)
    if (row < rows) & (head < batch * heads):
        total = tl.zeros([BC], tl.float32)
        for first in range(0, pieces, BP):
            piece = first + tl.arange(0, BP)
            at = (head * pieces + piece).to(tl.int64) * rows + row
            there = (piece < pieces)[:, None] & (c < C)[None, :]
            total += tl.sum(tl.load(PART + at[:, None] * C + c[None, :], mask=there, other=0.0), 0)
        at = TOTAL + (head // heads).to(tl.int64) * sb + (head % heads).to(tl.int64) * sh + row * sn
        tl.store(at + c, total.to(TOTAL.dtype.element_ty), mask=c < C)


@triton.jit(do_not_specialize=("rows", "columns", "row_pieces", "column_pieces", "batch"))
def sum_edges(DQ, DK, DV, PART_Q, PART_K, PART_V, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn,
              rows, columns, row_pieces, column_pieces, batch, H, G,
              D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """Sum the gradients of queries that see all keys, and of keys and values that all queries see, over pieces."""
    which = tl.program_id(2)
    if which == 0:
        sum_pieces(DQ, PART_Q, sqb, sqh, sqn, rows, row_pieces, batch, H, D, BD, BP)
    elif which == 1:
        sum_pieces(DK, PART_K, skb, skh, skn, columns, column_pieces, batch, G, D, BD, BP)
    else:
        sum_pieces(DV, PART_V, svb, svh, svn, columns, column_pieces, batch, G, E, BE, BP)
