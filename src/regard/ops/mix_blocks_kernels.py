"""Triton kernels that mix whole blocks of keys and values where they lie, and the products of their gradients: see
`regard.ops.mix_blocks`.

A block of p tokens with D numbers each is a row of p D columns, whatever the strides of its tokens are: a tile of columns is a
part of every block. Keys and values with the same strides are one launch: axis 1 of its grid chooses pointers. (Two branches with
a loop each would have shared memory of their own.)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_places(first, strides, p, D: tl.constexpr, SIZE: tl.constexpr):
    """Return where SIZE columns of a block lie, from one on, and which of them exist (1 SIZE)."""
    j = first + tl.arange(0, SIZE)
    return (j // D * strides[3] + j % D)[None, :], (j < p * D)[None, :]


@triton.jit
def head_start(X, strides, batch, head):
    return X + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit(do_not_specialize=["heads", "p"])
def mix_blocks(
    W, X, X2, Y, Y2, x_strides, y_strides, heads, c, p, ADD: tl.constexpr, TURNED: tl.constexpr, D: tl.constexpr,
    BU: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write blocks Y, sums of blocks X by weights W (rows c c) or, TURNED, their transpose, and Y2 of X2; ADD: to what is there.

    Neighbouring programs read the same columns for other blocks, then those of another head.
    """
    if tl.program_id(1) == 1:
        X = X2
        Y = Y2
    tiles = tl.cdiv(c, BU)
    columns = tl.cdiv(p * D, BN)
    rest = tl.program_id(0) // tiles
    head = rest % heads
    batch = rest // heads // columns
    first = rest // heads % columns * BN
    i = tl.program_id(0) % tiles * BU + tl.arange(0, BU)
    place, there = column_places(first, y_strides, p, D, BN)
    at = head_start(Y, y_strides, batch, head) + i.to(tl.int64)[:, None] * y_strides[2] + place
    inside = (i[:, None] < c) & there
    if ADD:
        more = tl.load(at, mask=inside, other=0.0)
    W += (batch * heads + head).to(tl.int64) * c * c
    place, there = column_places(first, x_strides, p, D, BN)
    X = head_start(X, x_strides, batch, head) + place
    acc = tl.zeros([BU, BN], tl.float32)
    for block in range(0, c, BC):
        j = block + tl.arange(0, BC)
        pair = j[None, :] * c + i[:, None] if TURNED else i[:, None] * c + j[None, :]
        w = tl.load(W + pair, mask=(i[:, None] < c) & (j[None, :] < c), other=0.0)
        x = tl.load(X + j.to(tl.int64)[:, None] * x_strides[2], mask=(j[:, None] < c) & there, other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    if ADD:
        acc += more.to(tl.float32)
    tl.store(at, acc.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "heads", "p", "slices"])
def block_products(
    X, X2, Y, Y2, FOUND, FOUND2, x_strides, y_strides, rows, heads, c, p, slices, D: tl.constexpr, BT: tl.constexpr,
    BJ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the products of all blocks Y with all blocks X, summed over a slice of their columns, FOUND (slices rows c c), and
    FOUND2 of Y2 and X2.
    """
    if tl.program_id(1) == 1:
        X = X2
        Y = Y2
        FOUND = FOUND2
    tiles = tl.cdiv(c, BT)
    tile = tl.program_id(0) % (tiles * tiles)
    rest = tl.program_id(0) // (tiles * tiles)
    head = rest % heads
    part = rest // heads % slices
    batch = rest // heads // slices
    u = tile // tiles * BT + tl.arange(0, BT)
    v = tile % tiles * BT + tl.arange(0, BT)
    Y = head_start(Y, y_strides, batch, head) + u.to(tl.int64)[:, None] * y_strides[2]
    X = head_start(X, x_strides, batch, head) + v.to(tl.int64)[:, None] * x_strides[2]
    size = tl.cdiv(tl.cdiv(p * D, BJ), slices) * BJ
    acc = tl.zeros([BT, BT], tl.float32)
    for first in range(part * size, tl.minimum(part * size + size, p * D), BJ):
        y_place, there = column_places(first, y_strides, p, D, BJ)
        x_place, _ = column_places(first, x_strides, p, D, BJ)
        y = tl.load(Y + y_place, mask=(u[:, None] < c) & there, other=0.0)
        x = tl.load(X + x_place, mask=(v[:, None] < c) & there, other=0.0)
        acc = tl.dot(y, tl.trans(x), acc, input_precision=PRECISION)
    FOUND += (part.to(tl.int64) * rows + batch * heads + head) * c * c
    tl.store(FOUND + u[:, None] * c + v[None, :], acc, mask=(u[:, None] < c) & (v[None, :] < c))
