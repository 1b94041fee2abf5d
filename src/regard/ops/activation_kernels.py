"""Triton kernel of gradients of an activation and of the bias in front of it: see `regard.ops.feed_forward`."""

from __future__ import annotations

import triton
import triton.language as tl

ROOT_HALF = tl.constexpr(0.7071067811865476)
NORMAL_PEAK = tl.constexpr(0.3989422804014327)  # of the density of a normal variable
TANH_SCALE = tl.constexpr(0.7978845608028654)
TANH_CUBE = tl.constexpr(0.044715)


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """Return the derivative of an activation at x; of "relu" from its result."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == "gelu":
        return 0.5 * (1 + tl.math.erf(x * ROOT_HALF)) + x * NORMAL_PEAK * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        share = tl.sigmoid(2 * TANH_SCALE * (x + TANH_CUBE * x * x * x))
        return share + x * share * (1 - share) * 2 * TANH_SCALE * (1 + 3 * TANH_CUBE * x * x)
    else:
        share = tl.sigmoid(x)
        return share * (1 + x * (1 - share))


@triton.jit(do_not_specialize=["rows", "size"])
def activation_gradients(
    GRAD, KEPT, SUMS, rows, columns, size, ACTIVATION: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Multiply GRAD (rows columns) by the slope at KEPT, in place, and write the sums of `size` rows: SUMS (programs columns)."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1) * size
    end = tl.minimum(first + size, rows)
    total = tl.zeros([BR, BC], tl.float32)
    for start in range(first, end, BR):
        i = start + tl.arange(0, BR)
        at = i.to(tl.int64)[:, None] * columns + c[None, :]
        inside = (i[:, None] < end) & (c[None, :] < columns)
        kept = tl.load(KEPT + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + at, mask=inside, other=0.0).to(tl.float32) * slope(kept, ACTIVATION)
        total += grad
        tl.store(GRAD + at, grad.to(GRAD.dtype.element_ty), mask=inside)
    tl.store(SUMS + tl.program_id(1) * columns + c, tl.sum(total, 0), mask=c < columns)
