"""Triton kernels of a filter that slides over tokens, channel by channel: see `regard.ops.depthwise`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["m", "n", "before", "step"])
def slide_filter(
    X, FILTER, OUT, m, n, width, before, step, TAPS: tl.constexpr, MIRRORED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Write OUT_i = sum_t FILTER_t X_(i - before + t step), with 0 outside of X.

    X (b m width), FILTER (width TAPS), OUT (b n width). MIRRORED: with the last tap first.
    """
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.program_id(2).to(tl.int64)
    X += row * m * width
    there = c[None, :] < width
    total = tl.zeros([BT, BC], tl.float32)
    for t in tl.static_range(TAPS):
        at = i - before + t * step
        tap = TAPS - 1 - t if MIRRORED else t
        inside = ((at >= 0) & (at < m))[:, None] & there
        x = tl.load(X + at.to(tl.int64)[:, None] * width + c[None, :], mask=inside, other=0.0)
        weight = tl.load(FILTER + c * TAPS + tap, mask=c < width, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    OUT += row * n * width
    tl.store(OUT + i.to(tl.int64)[:, None] * width + c[None, :], total.to(OUT.dtype.element_ty), mask=(i[:, None] < n) & there)


@triton.jit(do_not_specialize=["m", "n", "before", "step", "size", "chunks"])
def filter_sums(
    X, GRAD, PARTS, m, n, width, before, step, size, chunks,
    TAPS: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write sums of GRAD_i X_(i - before + t step) over `size` tokens i of a row: PARTS (b chunks width TAPS)."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, None, :]
    t = tl.arange(0, BK)[:, None, None]
    row, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * size
    end = tl.minimum(first + size, n)
    X += row.to(tl.int64) * m * width
    GRAD += row.to(tl.int64) * n * width
    total = tl.zeros([BK, BT, BC], tl.float32)
    for start in range(first, end, BT):
        i = start + tl.arange(0, BT)[None, :, None]
        grad = tl.load(GRAD + i.to(tl.int64) * width + c, mask=(i < end) & (c < width), other=0.0).to(tl.float32)
        at = i - before + t * step
        inside = (at >= 0) & (at < m) & (t < TAPS) & (c < width)
        total += grad * tl.load(X + at.to(tl.int64) * width + c, mask=inside, other=0.0).to(tl.float32)
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    t = tl.arange(0, BK)[:, None]
    PARTS += tl.program_id(0).to(tl.int64) * width * TAPS
    tl.store(PARTS + c * TAPS + t, tl.sum(total, 1), mask=(t < TAPS) & (c < width))
