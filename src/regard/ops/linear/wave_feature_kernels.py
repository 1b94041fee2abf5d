"""Triton kernels of random waves and of the ratio of their sums: see `wave_features.py` for the formulas.

Half-precision x are exact operands; the directions w are split into two parts of that type, so that angles have the digits of
float32. The gradient of angles is d sin cos - d cos sin, both of which are features that are there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import load_tokens, store_tokens
from regard.ops.linear.position_feature_kernels import tile_of_head
from regard.ops.linear.triton_tiles import NORM_FLOOR, column_mask, present, row_mask

QUARTERS = tl.constexpr(0.6366197723675814)  # quarter turns of an angle of 1
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: a number plus this is rounded to an integer


@triton.jit
def sine_and_cosine(angle):
    """Return both with the digits of float32, by short polynomials of the distance to the next quarter turn."""
    x = angle * QUARTERS
    whole = (x + TO_INTEGER) - TO_INTEGER
    x = (x - whole) * 1.5707963267948966
    y = x * x
    sine = x + x * y * (-1.6666654611e-1 + y * (8.3321608736e-3 - y * 1.9515295891e-4))
    cosine = 1.0 - 0.5 * y + y * y * (4.166664568298827e-2 + y * (-1.388731625493765e-3 + y * 2.443315711809948e-5))
    turn = whole.to(tl.int32)
    odd = (turn & 1) != 0
    first, second = tl.where(odd, cosine, sine), tl.where(odd, sine, cosine)
    return tl.where((turn & 2) != 0, -first, first), tl.where(((turn + 1) & 2) != 0, -second, second)


@triton.jit
def _unit_factor(x):
    """Return what makes tokens unit vectors, and which are long enough for it."""
    x = x.to(tl.float32)
    length = tl.sqrt(tl.sum(x * x, 1))
    return 1.0 / tl.maximum(length, 1e-6), length > 1e-6


@triton.jit(do_not_specialize=["n", "tiles"])
def wave_forward(
    W, X, PHI, VALID, sxb, sxh, sxn, spb, sph, spn, n, heads, tiles, share, d: tl.constexpr, m: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, HAS_VALID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the sines and the cosines of all angles of a tile of tokens in PHI (b h n 2m), times `share`."""
    b, h, i = tile_of_head(heads, tiles, C)
    a = tl.arange(0, BD)
    x = load_tokens(X + b * sxb + h * sxh, i, sxn, i < n, d, BD)
    inverse, _long = _unit_factor(x)
    scale = tl.where(present(VALID + b * n, i, n, HAS_VALID), share, 0.0)[:, None]
    PHI += b * spb + h * sph
    for low in range(0, m, BM):
        c = low + tl.arange(0, BM)
        wt = tl.load(W + c[None, :] * d + a[:, None], mask=row_mask(c[None, :] < m, a, d), other=0.0).to(tl.float32)
        if x.dtype == tl.float32:
            products = tl.dot(x, wt, input_precision=PRECISION)
        else:
            high = wt.to(x.dtype)
            products = tl.dot(x, high)
            products = tl.dot(x, (wt - high.to(tl.float32)).to(x.dtype), products)
        sine, cosine = sine_and_cosine(products * inverse[:, None])
        into = PHI + i.to(tl.int64)[:, None] * spn + c[None, :]
        mask = (i < n)[:, None] & (c[None, :] < m)
        tl.store(into, (sine * scale).to(PHI.dtype.element_ty), mask=mask)
        tl.store(into + m, (cosine * scale).to(PHI.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "tiles"])
def wave_backward(
    W, X, PHI, DPHI, DX, sxb, sxh, sxn, spb, sph, spn, sgb, sgh, sgn, sdb, sdh, sdn, n, heads, tiles,
    d: tl.constexpr, m: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a tile of tokens; features that padding has are 0, and so is its gradient."""
    b, h, i = tile_of_head(heads, tiles, C)
    a = tl.arange(0, BD)
    x = load_tokens(X + b * sxb + h * sxh, i, sxn, i < n, d, BD)
    inverse, long = _unit_factor(x)
    row = i.to(tl.int64)[:, None]
    PHI += b * spb + h * sph
    DPHI += b * sgb + h * sgh
    found = tl.zeros([C, BD], tl.float32)
    for low in range(0, m, BM):
        c = low + tl.arange(0, BM)
        mask = (i < n)[:, None] & (c[None, :] < m)
        sine = tl.load(PHI + row * spn + c[None, :], mask=mask, other=0.0).to(tl.float32)
        cosine = tl.load(PHI + row * spn + m + c[None, :], mask=mask, other=0.0).to(tl.float32)
        angle = tl.load(DPHI + row * sgn + c[None, :], mask=mask, other=0.0).to(tl.float32) * cosine
        angle -= tl.load(DPHI + row * sgn + m + c[None, :], mask=mask, other=0.0).to(tl.float32) * sine
        w = tl.load(W + c[:, None] * d + a[None, :], mask=column_mask(c[:, None] < m, a, d), other=0.0).to(x.dtype)
        found = tl.dot(angle.to(x.dtype), w, found, input_precision=PRECISION)
    unit = x.to(tl.float32) * inverse[:, None]
    along = tl.where(long, tl.sum(unit * found, 1), 0.0)
    dx = (found - unit * along[:, None]) * inverse[:, None]
    store_tokens(DX + b * sdb + h * sdh, i, sdn, dx, i < n, d, BD)


@triton.jit
def _lifted_share(NORM, FLOOR, at, inside):
    """Return 1 / max(norm, floor), 0 where that has no digits left, and whether the norm is the larger one."""
    norm, floor = tl.load(NORM + at, mask=inside, other=0.0), tl.load(FLOOR + at, mask=inside, other=0.0)
    larger = tl.maximum(norm, floor)
    kept = larger > NORM_FLOOR
    return tl.where(kept, 1.0 / tl.where(kept, larger, 1.0), 0.0), norm >= floor


@triton.jit(do_not_specialize=["n", "tiles"])
def ratio_forward(
    OUT, Y, NORM, FLOOR, sob, soh, son, syb, syh, syn, n, heads, tiles, E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr
):
    """Store Y = OUT / max(NORM, FLOOR) of a tile of tokens."""
    b, h, i = tile_of_head(heads, tiles, C)
    share, _by_norm = _lifted_share(NORM, FLOOR, (b * heads + h) * n + i, i < n)
    out = load_tokens(OUT + b * sob + h * soh, i, son, i < n, E, BE).to(tl.float32)
    store_tokens(Y + b * syb + h * syh, i, syn, out * share[:, None], i < n, E, BE)


@triton.jit(do_not_specialize=["n", "tiles"])
def ratio_backward(
    OUT, DY, DOUT, NORM, FLOOR, DNORM, DFLOOR, sob, soh, son, sgb, sgh, sgn, sdb, sdh, sdn, n, heads, tiles,
    E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a tile: the larger one of norm and floor has one."""
    b, h, i = tile_of_head(heads, tiles, C)
    at = (b * heads + h) * n + i
    share, by_norm = _lifted_share(NORM, FLOOR, at, i < n)
    out = load_tokens(OUT + b * sob + h * soh, i, son, i < n, E, BE).to(tl.float32)
    grad = load_tokens(DY + b * sgb + h * sgh, i, sgn, i < n, E, BE).to(tl.float32)
    store_tokens(DOUT + b * sdb + h * sdh, i, sdn, grad * share[:, None], i < n, E, BE)
    slope = -tl.sum(grad * out, 1) * share * share
    tl.store(DNORM + at, tl.where(by_norm, slope, 0.0), mask=i < n)
    tl.store(DFLOOR + at, tl.where(by_norm, 0.0, slope), mask=i < n)
