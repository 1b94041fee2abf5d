"""Vectors of length 1 in Triton, forward and backward: see `regard.ops.delta.unit_features`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tokens(X, b, h, i, d, sb, sh, sn, n, D: tl.constexpr):
    """Tokens i (BN, BD) of one head in float32."""
    here = (i[:, None] < n) & (d[None, :] < D)
    return tl.load(X + b * sb + h * sh + i[:, None] * sn + d[None, :], mask=here, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n", "H", "least"])
def unit_forward(
    X, Y, sxb, sxh, sxn, syb, syh, syn, n, H, least,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Y = s / max(|s|, least) for s = silu(X) or X."""
    row = tl.program_id(1).to(tl.int64)
    b, h = row // H, row % H
    i, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    s = _tokens(X, b, h, i, d, sxb, sxh, sxn, n, D)
    if SILU:
        s = s / (1 + tl.exp(-s))
    length = tl.maximum(tl.sqrt(tl.sum(s * s, 1)), least)
    y = s / length[:, None]
    to = Y + b * syb + h * syh + i[:, None] * syn + d[None, :]
    tl.store(to, y.to(Y.dtype.element_ty), mask=(i[:, None] < n) & (d[None, :] < D))


@triton.jit(do_not_specialize=["n", "H", "least"])
def unit_backward(
    X, DY, DX, sxb, sxh, sxn, sgb, sgh, sgn, sdb, sdh, sdn, n, H, least,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """DX = silu'(X) (DY - y (y . DY)) / |s|, without the projection where |s| is below the least."""
    row = tl.program_id(1).to(tl.int64)
    b, h = row // H, row % H
    i, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    x = _tokens(X, b, h, i, d, sxb, sxh, sxn, n, D)
    grad = _tokens(DY, b, h, i, d, sgb, sgh, sgn, n, D)
    s = x
    if SILU:
        share = 1 / (1 + tl.exp(-x))
        s = x * share
    true = tl.sqrt(tl.sum(s * s, 1))
    length = tl.maximum(true, least)
    y = s / length[:, None]
    along = tl.where(true >= least, tl.sum(y * grad, 1), 0.0)
    dx = (grad - y * along[:, None]) / length[:, None]
    if SILU:
        dx *= share * (1 + x * (1 - share))
    to = DX + b * sdb + h * sdh + i[:, None] * sdn + d[None, :]
    tl.store(to, dx.to(DX.dtype.element_ty), mask=(i[:, None] < n) & (d[None, :] < D))
