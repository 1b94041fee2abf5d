"""Triton kernels of features that turn with the position: see `position_features.py`. A program has a tile of a head."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import load_tokens, store_tokens


@triton.jit
def tile_of_head(heads, tiles, BM: tl.constexpr):
    """Return the batch, the head and the tokens of a program; neighbours have the heads of the same tokens."""
    pid = tl.program_id(0)
    rest = pid // heads
    return (rest // tiles).to(tl.int64), pid % heads, rest % tiles * BM + tl.arange(0, BM)


@triton.jit
def _position_angles(AT, b, i, sab, san, step, n):
    """Return the cosine and the sine (tokens, 1) of the angles of tokens i."""
    angle = tl.load(AT + b * sab + i * san, mask=i < n, other=0).to(tl.float32) * step
    return tl.cos(angle)[:, None], tl.sin(angle)[:, None]


@triton.jit(do_not_specialize=["n", "tiles"])
def position_feature_forward(
    X, AT, PHI, sxb, sxh, sxn, spb, sph, spn, sab, san, step, n, heads, tiles,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write PHI (b h n 2D), relu(x) times the cosine and then times the sine of its angle."""
    b, h, i = tile_of_head(heads, tiles, BM)
    cosine, sine = _position_angles(AT, b, i, sab, san, step, n)
    x = load_tokens(X + b * sxb + h * sxh, i, sxn, i < n, D, BD).to(tl.float32)
    x = tl.maximum(x, 0.0)
    PHI += b * spb + h * sph
    store_tokens(PHI, i, spn, x * cosine, i < n, D, BD)
    store_tokens(PHI + D, i, spn, x * sine, i < n, D, BD)


@triton.jit(do_not_specialize=["n", "tiles"])
def position_feature_backward(
    X, AT, DPHI, DX, sxb, sxh, sxn, spb, sph, spn, sdb, sdh, sdn, sab, san, step, n, heads, tiles,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x from that of both halves of its features."""
    b, h, i = tile_of_head(heads, tiles, BM)
    cosine, sine = _position_angles(AT, b, i, sab, san, step, n)
    x = load_tokens(X + b * sxb + h * sxh, i, sxn, i < n, D, BD).to(tl.float32)
    DPHI += b * spb + h * sph
    first = load_tokens(DPHI, i, spn, i < n, D, BD).to(tl.float32)
    second = load_tokens(DPHI + D, i, spn, i < n, D, BD).to(tl.float32)
    dx = tl.where(x > 0, first * cosine + second * sine, 0.0)
    store_tokens(DX + b * sdb + h * sdh, i, sdn, dx, i < n, D, BD)
