"""Triton kernels of a sum and its norm: see `regard.ops.add_norm`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def norm_forward(
    X, ADDED, WEIGHT, BIAS, TOTAL, OUT, MEAN, SCALE, rows, width, eps,
    ADD: tl.constexpr, CENTRED: tl.constexpr, BIASED: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write TOTAL = X + ADDED (rows width), its norm OUT, and MEAN and SCALE (rows) of each row."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BW)
    inside = (r[:, None] < rows) & (c[None, :] < width)
    at = r[:, None] * width + c[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(ADDED + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + at, total, mask=inside)
        x = total.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / width
        tl.store(MEAN + r, mean, mask=r < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(SCALE + r, scale, mask=r < rows)
    y = x * scale[:, None] * tl.load(WEIGHT + c, mask=c < width, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        y += tl.load(BIAS + c, mask=c < width, other=0.0).to(tl.float32)[None, :]
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles"])
def norm_backward(
    TOTAL, GRAD, GRAD_TOTAL, WEIGHT, MEAN, SCALE, DX, DADDED, PARTS, rows, width, tiles,
    PASSED: tl.constexpr, APART: tl.constexpr, CENTRED: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write the gradient of TOTAL by its norm and, if PASSED, by GRAD_TOTAL: DX, and if APART, in another type, DADDED.

    PARTS (programs 2 width) are sums over the rows of a program: the gradients of the weight and of the bias.
    """
    c = tl.arange(0, BW)
    weight = tl.load(WEIGHT + c, mask=c < width, other=0.0).to(tl.float32)[None, :]
    by_weight = tl.zeros([BR, BW], tl.float32)
    by_bias = tl.zeros([BR, BW], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r = (tile * BR + tl.arange(0, BR)).to(tl.int64)
        inside = (r[:, None] < rows) & (c[None, :] < width)
        at = r[:, None] * width + c[None, :]
        grad = tl.load(GRAD + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(TOTAL + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(SCALE + r, mask=r < rows, other=0.0)[:, None]
        if CENTRED:
            x = tl.where(inside, x - tl.load(MEAN + r, mask=r < rows, other=0.0)[:, None], 0.0)
        x = x * scale
        by_weight += grad * x
        by_bias += grad
        grad = grad * weight
        dx = grad - x * (tl.sum(grad * x, 1) / width)[:, None]
        if CENTRED:
            dx -= (tl.sum(grad, 1) / width)[:, None]
        dx = dx * scale
        if PASSED:
            dx += tl.load(GRAD_TOTAL + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        if APART:
            tl.store(DADDED + at, dx.to(DADDED.dtype.element_ty), mask=inside)
    PARTS += tl.program_id(0) * 2 * width
    tl.store(PARTS + c, tl.sum(by_weight, 0), mask=c < width)
    tl.store(PARTS + width + c, tl.sum(by_bias, 0), mask=c < width)
