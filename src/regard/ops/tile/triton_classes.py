"""Distance classes in the Triton kernels of tile attention: numbers by query and class, and sums of weights by class.

The class of a pair is clamp(i - j, -clip, clip) + clip. A query has at most one key in an inner class, so that every
element of an inner class is stored by one program: no atomics. The two outer classes are sums over rows of tiles, kept beside the
outputs. A tile on one side of all inner classes has one outer class, and needs no class for each pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.triton_math import LOG2E

LAST_CLASS = tl.constexpr(1)  # all pairs of a tile are of the last class
FIRST_CLASS = tl.constexpr(2)  # or of the first; 0: any


@triton.jit
def near_tiles(first, last, clip, step, low, high, B: tl.constexpr):
    """Return the range of tiles of B rows, inside low .. high, that may hold pairs of inner classes.

    first, last: the rows at distance 0 of the first and the last row of the tile that a program owns; low is a multiple of B.
    """
    reach = (clip + step - 1) // step
    begin = tl.maximum(first - reach + 1, 0) // B * B
    end = (tl.maximum(last + reach, 0) + B - 1) // B * B
    high = tl.maximum(high, low)  # a band without pairs
    return tl.minimum(tl.maximum(begin, low), high), tl.minimum(tl.maximum(end, low), high)


@triton.jit
def class_of_pairs(x, y, shift, step, clip):
    """Return the classes of queries number x and keys number y, which broadcast."""
    distance = (x - y + shift) * step
    return tl.minimum(tl.maximum(distance, -clip), clip) + clip


@triton.jit
def add_by_class(s, TABLE, rows, factor, x, y, shift, step, clip, SIDE: tl.constexpr):
    """Add a multiple of table[query, class] to a tile; rows: where those of the queries begin, in the shape of x."""
    if SIDE == 0:
        found = tl.load(TABLE + (rows + class_of_pairs(x, y, shift, step, clip)))
    elif SIDE == LAST_CLASS:
        found = tl.load(TABLE + rows + 2 * clip)
    else:
        found = tl.load(TABLE + rows)
    return s + found.to(tl.float32) * factor


@triton.jit
def collect_classes(first, last, z, inner, seen, TABLE, rows, inside, x, y, shift, step, clip, SIDE: tl.constexpr):
    """Add z (queries keys) to the sums of the two outer classes; store `inner` by class where `seen` is above -inf.

    rows: where those of the queries begin (queries 1); inside: which of them exist.
    """
    if SIDE == 0:
        c = class_of_pairs(x, y, shift, step, clip)
        tl.store(TABLE + (rows + c), inner, mask=inside & (seen > float("-inf")) & (c > 0) & (c < 2 * clip))
        first += tl.sum(tl.where(c == 0, z, 0.0), 1)
        last += tl.sum(tl.where((c == 2 * clip) & (c > 0), z, 0.0), 1)
    elif SIDE == LAST_CLASS:
        last += tl.sum(z, 1)
    else:
        first += tl.sum(z, 1)
    return first, last


@triton.jit
def load_pair(P, rows):
    """Load two columns of rows of a matrix (rows 2)."""
    return tl.load(P + rows * 2), tl.load(P + rows * 2 + 1)


@triton.jit
def store_pair(P, rows, first, last, there):
    """Store two columns into rows of a matrix (rows 2)."""
    tl.store(P + rows * 2, first, mask=there)
    tl.store(P + rows * 2 + 1, last, mask=there)


@triton.jit(do_not_specialize=("n", "clip"))
def write_masses(OUT, INNER, OUTER, LSE, sob, soh, son, n, clip, kept, H, BM: tl.constexpr, BC: tl.constexpr):
    """Write the weight of every class behind the outputs, from the scores of inner classes and the weights of the outer ones."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    line = tl.program_id(1).to(tl.int64) * n + rows
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    here = rows < n
    there = here[:, None] & (c <= 2 * clip)
    s = tl.load(INNER + line[:, None] * (2 * clip + 1) + c, mask=there, other=float("-inf"))
    lse = tl.load(LSE + line, mask=here, other=0.0) * LOG2E
    first = tl.load(OUTER + line * 2, mask=here, other=0.0)
    last = tl.load(OUTER + line * 2 + 1, mask=here, other=0.0)
    mass = tl.exp2(s - lse[:, None])
    mass += tl.where(c == 0, first[:, None], 0.0)
    mass += tl.where(c == 2 * clip, last[:, None], 0.0)
    at = OUT + b * sob + h * soh + rows[:, None] * son + c
    tl.store(at, (mass * kept).to(OUT.dtype.element_ty), mask=there)
