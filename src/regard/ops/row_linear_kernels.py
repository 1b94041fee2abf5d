"""Linear maps of a few rows in Triton, with a norm in front and an activation or a sum behind: see `regard.ops.row_linear`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """Apply the activation with this number in `row_linear.ROW_ACTIVATIONS`."""
    if KIND == 1:
        x = tl.maximum(x, 0.0)
    if KIND == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == 3:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(tl.maximum(2.0 * inner, -80.0))
    if KIND == 4:
        x = x * tl.sigmoid(tl.maximum(x, -80.0))
    return x


@triton.jit
def _moments(x, inside, K: tl.constexpr, eps, RMS: tl.constexpr):
    """Return the mean, 0 if RMS, and one by the deviation of rows x (BR BW), padded with zeros."""
    mean = tl.sum(x, 1) / K
    if RMS:
        mean = mean * 0.0
    centred = tl.where(inside, x - mean[:, None], 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / K + eps)


@triton.jit(do_not_specialize=["rows", "outs", "eps"])
def row_linear_kernel(
    X, W, B, NW, NB, PLUS, OUT,
    sxr, swo, spr, sor, rows, outs, eps,
    K: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr,
    NORM: tl.constexpr, KIND: tl.constexpr, HAS_B: tl.constexpr, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """BO outputs of BR rows: act(norm(x) W^T + b), added to PLUS if ADDS. NORM: 0 none, 1 mean and deviation, 2 mean square.

    Products are summed over K at the end, once: until then every thread adds up its own columns.
    """
    o, r = tl.program_id(0) * BO + tl.arange(0, BO), tl.program_id(1) * BR + tl.arange(0, BR)
    if NORM != 0:
        c = tl.arange(0, BW)
        whole = (r[:, None] < rows) & (c[None, :] < K)
        row = tl.load(X + r[:, None] * sxr + c[None, :], mask=whole, other=0.0).to(tl.float32)
        mean, inverse = _moments(row, whole, K, eps, NORM == 2)
    total = tl.zeros([BR, BO, BK], tl.float32)
    for low in tl.static_range(0, K, BK):
        k = low + tl.arange(0, BK)
        in_k = k < K
        w = tl.load(
            W + o[None, :, None] * swo + k[None, None, :], mask=(o < outs)[None, :, None] & in_k[None, None, :], other=0.0
        )
        x = tl.load(
            X + r[:, None, None] * sxr + k[None, None, :], mask=(r < rows)[:, None, None] & in_k[None, None, :], other=0.0
        )
        x = x.to(tl.float32)
        if NORM != 0:
            x = (x - mean[:, None, None]) * inverse[:, None, None]
            if HAS_NW:
                x = x * tl.load(NW + k, mask=in_k, other=0.0).to(tl.float32)[None, None, :]
            if HAS_NB:
                x = x + tl.load(NB + k, mask=in_k, other=0.0).to(tl.float32)[None, None, :]
        total += x * w.to(tl.float32)  # w is 0 beyond K
    y = tl.sum(total, 2)
    here = (r[:, None] < rows) & (o[None, :] < outs)
    if HAS_B:
        y += tl.load(B + o, mask=o < outs, other=0.0).to(tl.float32)[None, :]
    y = _activated(y, KIND)
    if ADDS:
        y += tl.load(PLUS + r[:, None] * spr + o[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(OUT + r[:, None] * sor + o[None, :], y.to(OUT.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["eps"])
def norm_rows_kernel(
    X, NW, NB, LATER, OUT, BASE, sxr, eps,
    K: tl.constexpr, BW: tl.constexpr, NORM: tl.constexpr, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """One row: its norm, and the row itself plus LATER (K), the bias of a product that will be added to it."""
    r, c = tl.program_id(0), tl.arange(0, BW)
    inside = c < K
    x = tl.load(X + r * sxr + c, mask=inside, other=0.0).to(tl.float32)
    mean, inverse = _moments(x[None, :], inside[None, :], K, eps, NORM == 2)
    y = (x[None, :] - mean[:, None]) * inverse[:, None]
    if HAS_NW:
        y = y * tl.load(NW + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_NB:
        y = y + tl.load(NB + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(OUT + r * K + c[None, :], y.to(OUT.dtype.element_ty), mask=inside[None, :])
    if ADDS:
        x += tl.load(LATER + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(BASE + r * K + c, x.to(BASE.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale"])
def embed_rows_kernel(
    TOKENS, TABLE, AT, ROWS, OUT, stt, sat, swt, swr, scale,
    K: tl.constexpr, BW: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """One token: its vector times a scale, plus that of its position."""
    r, c = tl.program_id(0), tl.arange(0, BW)
    token = tl.load(TOKENS + r * stt).to(tl.int64)
    x = tl.load(TABLE + token * swt + c, mask=c < K, other=0.0).to(tl.float32) * scale
    if PLACED:
        at = tl.load(AT + r * sat).to(tl.int64)
        x += tl.load(ROWS + at * swr + c, mask=c < K, other=0.0).to(tl.float32)
    tl.store(OUT + r * K + c, x.to(OUT.dtype.element_ty), mask=c < K)
