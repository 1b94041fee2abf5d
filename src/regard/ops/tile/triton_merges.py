"""Triton kernels that merge the parts of a long row of tiles: outputs by log-sum-exp, gradients by sums."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_kernels import LOWEST, RUN_TIME_NUMBERS, store_tile
from regard.ops.triton_math import LN2, LOG2E


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def merge_parts(OUT, LSE, MERGES, PART, PART_LSE, sob, soh, son, n, H, slots,
                E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """Merge the attention of one tile of queries over several parts of its keys by log-sum-exp."""
    merge = MERGES + tl.program_id(0) * 4
    row = tl.program_id(1)
    tile = tl.load(merge + 1)
    b = row // H
    h = row % H
    if not SHARED:
        b = row
        h = tl.load(merge)
    rows = tl.arange(0, BM)
    c = tl.arange(0, BE)
    acc = tl.zeros([BM, BE], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], LOWEST, tl.float32)
    for slot in range(tl.load(merge + 2), tl.load(merge + 3)):
        at = (row * slots + slot).to(tl.int64) * BM + rows
        lse = tl.load(PART_LSE + at) * LOG2E
        out = tl.load(PART + at[:, None] * BE + c[None, :])
        new = tl.maximum(top, lse)
        fade = tl.exp2(top - new)
        share = tl.where(lse > LOWEST, tl.exp2(lse - new), 0.0)
        acc = acc * fade[:, None] + out * share[:, None]
        total = total * fade + share
        top = new
    some = total > 0
    whole = tl.where(some, total, 1.0)
    i = tile * BM + rows
    store_tile(OUT + b.to(tl.int64) * sob + h.to(tl.int64) * soh, i, son, n, acc / whole[:, None], E, BE)
    lse = tl.where(some, (top + tl.log2(whole)) * LN2, LOWEST)
    tl.store(LSE + (b * H + h).to(tl.int64) * n + i, lse, mask=i < n)


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def sum_parts(TOTAL, MERGES, PART, sb, sh, sn, n, H, slots,
              C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """Sum the gradient of one tile over the parts it was computed in."""
    merge = MERGES + tl.program_id(0) * 4
    row = tl.program_id(1)
    tile = tl.load(merge + 1)
    b = row // H
    h = row % H
    if not SHARED:
        b = row
        h = tl.load(merge)
    rows = tl.arange(0, BM)
    c = tl.arange(0, BC)
    total = tl.zeros([BM, BC], tl.float32)
    for slot in range(tl.load(merge + 2), tl.load(merge + 3)):
        at = (row * slots + slot).to(tl.int64) * BM + rows
        total += tl.load(PART + at[:, None] * BC + c[None, :])
    store_tile(TOTAL + b.to(tl.int64) * sb + h.to(tl.int64) * sh, tile * BM + rows, sn, n, total, C, BC)
