"""Triton kernels of scores between blocks, the logits of a Sinkhorn sort: see `regard.ops.sorted_blocks`.

The direction of a block is that of the sum of its keys, in float32; scores are u_i W u_j with W of each head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.two_blocks_kernels import load_block, store_block


@triton.jit
def load_rows(X, i, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows i of a matrix (count SIZE), 0 outside of it, in float32."""
    f = tl.arange(0, BLOCK)
    return tl.load(X + i[:, None] * SIZE + f[None, :], mask=(i[:, None] < count) & (f[None, :] < SIZE), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["heads", "blocks", "p"])
def block_directions(
    K, SUMS, UNITS, k_strides, heads, blocks, p, least, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """Write the sum of the keys of a block, SUMS (blocks D), and its direction, UNITS."""
    total = tl.sum(load_block(K, k_strides, heads, blocks, p, D, BP, BD).to(tl.float32), 0)
    length = tl.maximum(tl.sqrt(tl.sum(total * total, 0)), least)
    f = tl.arange(0, BD)
    at = tl.program_id(0).to(tl.int64) * D + f
    tl.store(SUMS + at, total, mask=f < D)
    tl.store(UNITS + at, total / length, mask=f < D)


@triton.jit(do_not_specialize=["heads", "c", "tiles"])
def block_scores(
    UNITS, SORT, NOISE, LOGITS, heads, c, tiles, factor,
    NOISY: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write scores of a tile of rows, less the logarithm of NOISE, times a factor: LOGITS (rows c c)."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.program_id(0) % tiles * BC + tl.arange(0, BC)
    UNITS += row * c * D
    w = load_rows(SORT + row % heads * D * D, tl.arange(0, BD), D, D, BD)
    turned = tl.dot(load_rows(UNITS, i, c, D, BD), w, input_precision=PRECISION)
    for first in range(0, c, BC):
        j = first + tl.arange(0, BC)
        s = tl.dot(turned, tl.trans(load_rows(UNITS, j, c, D, BD)), input_precision=PRECISION)
        at = row * c * c + i[:, None] * c + j[None, :]
        inside = (i[:, None] < c) & (j[None, :] < c)
        if NOISY:
            s -= tl.log(tl.load(NOISE + at, mask=inside, other=1.0))
        tl.store(LOGITS + at, s * factor, mask=inside)


@triton.jit(do_not_specialize=["heads", "c", "tiles"])
def block_score_grads(
    UNITS, SUMS, SORT, GRAD, DSUMS, DSORT, heads, c, tiles, factor, least,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the sums of a tile of blocks, DSUMS (rows c D), and what the tile adds to that of W, DSORT
    (rows tiles D D), from those of the logits, GRAD (rows c c).
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.program_id(0) % tiles * BC + tl.arange(0, BC)
    UNITS += row * c * D
    GRAD += row * c * c
    by_row = tl.zeros([BC, BD], tl.float32)
    by_column = tl.zeros([BC, BD], tl.float32)
    for first in range(0, c, BC):
        j = first + tl.arange(0, BC)
        inside = (i[:, None] < c) & (j[None, :] < c)
        u = load_rows(UNITS, j, c, D, BD)
        g = tl.load(GRAD + i[:, None] * c + j[None, :], mask=inside, other=0.0)
        by_row = tl.dot(g, u, by_row, input_precision=PRECISION)
        g = tl.load(GRAD + j[None, :] * c + i[:, None], mask=inside, other=0.0)
        by_column = tl.dot(g, u, by_column, input_precision=PRECISION)
    by_row *= factor
    w = load_rows(SORT + row % heads * D * D, tl.arange(0, BD), D, D, BD)
    du = tl.dot(by_row, tl.trans(w), input_precision=PRECISION)
    du = tl.dot(by_column * factor, w, du, input_precision=PRECISION)
    u = load_rows(UNITS, i, c, D, BD)
    f = tl.arange(0, BD)
    inside = (f[:, None] < D) & (f[None, :] < D)
    turned = tl.load(UNITS + i[None, :] * D + f[:, None], mask=(i[None, :] < c) & (f[:, None] < D), other=0.0)
    dw = tl.dot(turned, by_row, input_precision=PRECISION)
    DSORT += tl.program_id(0).to(tl.int64) * D * D
    tl.store(DSORT + f[:, None] * D + f[None, :], dw, mask=inside)
    total = load_rows(SUMS + row * c * D, i, c, D, BD)
    true = tl.sqrt(tl.sum(total * total, 1))
    along = tl.where(true >= least, tl.sum(u * du, 1), 0.0)
    ds = (du - u * along[:, None]) / tl.maximum(true, least)[:, None]
    tl.store(DSUMS + row * c * D + i[:, None] * D + f[None, :], ds, mask=(i[:, None] < c) & (f[None, :] < D))


@triton.jit(do_not_specialize=["heads", "blocks", "p"])
def add_to_blocks(DK, DSUMS, strides, heads, blocks, p, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr):
    """Add a row of DSUMS (blocks D) to all tokens of a block of DK."""
    f = tl.arange(0, BD)
    more = tl.load(DSUMS + tl.program_id(0).to(tl.int64) * D + f, mask=f < D, other=0.0)
    x = load_block(DK, strides, heads, blocks, p, D, BP, BD).to(tl.float32)
    store_block(DK, strides, x + more[None, :], heads, blocks, p, D, BP, BD)
