"""Sinkhorn's iterations of matrices wider than a program holds, a launch an iteration: see `regard.ops.balance`.

A matrix is divided into parts of rows, a program each. Sums of columns over a part are written, and the next launch adds them up
in every program: SUMS (2 matrices PARTS BC), read in one half and written in the other. Potentials are kept:
logits less those of column and row are the logits after an iteration, and each is the log-sum-exp of logits less the other ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.balance_kernels import GONE, load_strip, log_sums, positive


@triton.jit
def matrix_at(X, pid, r, c, BC: tl.constexpr, EVEN: tl.constexpr):
    """Return the pointer to a matrix (r c) of a stack."""
    if EVEN:
        return X + pid * r * BC
    return X + pid * r * c


@triton.jit
def running_sums(top, total, x):
    """Add the rows x to sums of exponentials of columns: the largest logit so far, and the sum relative to it."""
    new = tl.maximum(top, tl.max(x, 0))
    return new, total * tl.exp2(top - new) + tl.sum(tl.exp2(x - new[None, :]), 0)


@triton.jit
def strip_weights(x, by_row, by_column):
    """Return exp(logits less the potentials of rows and columns); 0 for pairs that do not exist."""
    return tl.exp2(tl.where(x > GONE / 2, x - by_row[:, None] - by_column[None, :], GONE))


@triton.jit
def load_part_sums(SUMS, half, matrix, matrices, parts, PARTS: tl.constexpr, BC: tl.constexpr, EMPTY: tl.constexpr):
    """Return what the launch before wrote for all parts of a matrix (PARTS BC); EMPTY for parts that do not exist."""
    p = tl.arange(0, PARTS)[:, None]
    at = (half * matrices + matrix) * PARTS + p
    return tl.load(SUMS + at * BC + tl.arange(0, BC)[None, :], mask=p < parts, other=EMPTY)


@triton.jit
def store_part_sums(SUMS, half, matrix, matrices, part, x, PARTS: tl.constexpr, BC: tl.constexpr):
    tl.store(SUMS + ((half * matrices + matrix) * PARTS + part) * BC + tl.arange(0, BC), x)


@triton.jit(do_not_specialize=["r", "c", "parts", "matrices"])
def balance_parts_start(
    LOGITS, SUMS, r, c, parts, matrices, BR: tl.constexpr, BC: tl.constexpr, STRIPS: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Write the log-sum-exp of the columns of a part."""
    matrix = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    LOGITS = matrix_at(LOGITS, matrix, r, c, BC, EVEN)
    top = tl.full([BC], GONE, tl.float32)
    total = tl.zeros([BC], tl.float32)
    for number in range(0, STRIPS):
        top, total = running_sums(top, total, load_strip(LOGITS, (part * STRIPS + number) * BR, r, c, BR, BC, EVEN))
    store_part_sums(SUMS, 0, matrix, matrices, part, top + tl.log2(total), PARTS, BC)


@triton.jit(do_not_specialize=["r", "c", "parts", "matrices", "iterations", "t"])
def balance_parts_step(
    LOGITS, OUT, KEPT, SUMS, r, c, parts, matrices, iterations, t, BR: tl.constexpr, BC: tl.constexpr, STRIPS: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Balance columns, then the rows of a part, in iteration t. A strip is loaded while the one before it is balanced."""
    matrix = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    LOGITS = matrix_at(LOGITS, matrix, r, c, BC, EVEN)
    OUT = matrix_at(OUT, matrix, r, c, BC, EVEN)
    KEPT += (matrix * iterations + t) * (r + c)
    j = tl.arange(0, BC)
    following = load_strip(LOGITS, part * STRIPS * BR, r, c, BR, BC, EVEN)
    if t == 0:
        by_column = log_sums(load_part_sums(SUMS, 0, matrix, matrices, parts, PARTS, BC, GONE), 0)
    else:
        by_column = tl.load(KEPT - (r + c) + j, mask=j < c, other=0.0)
        by_column += tl.log2(positive(tl.sum(load_part_sums(SUMS, t % 2, matrix, matrices, parts, PARTS, BC, 0.0), 0)))
    if part == 0:
        tl.store(KEPT + j, by_column, mask=j < c)
    of_columns = tl.zeros([BC], tl.float32)
    for number in range(0, STRIPS):
        i = (part * STRIPS + number) * BR + tl.arange(0, BR)
        x = following
        if STRIPS > 1:
            following = load_strip(LOGITS, (part * STRIPS + tl.minimum(number + 1, STRIPS - 1)) * BR, r, c, BR, BC, EVEN)
        x = tl.where(x > GONE / 2, x - by_column[None, :], GONE)
        highest = tl.max(x, 1)
        w = tl.exp2(x - highest[:, None])
        sums = tl.sum(w, 1)
        w = tl.where(x > GONE / 2, w * (1.0 / sums)[:, None], 0.0)
        of_columns += tl.sum(w, 0)
        tl.store(KEPT + c + i, highest + tl.log2(sums), mask=i < r)
        if t == iterations - 1:
            width = BC if EVEN else c
            tl.store(OUT + i[:, None] * width + j[None, :], w, mask=(i[:, None] < r) & (j[None, :] < c))
    store_part_sums(SUMS, (t + 1) % 2, matrix, matrices, part, of_columns, PARTS, BC)


@triton.jit
def load_grad(GRAD, first, r, c, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Return rows from `first` on of a gradient; 0 beyond its end."""
    i = first + tl.arange(0, BR)[:, None]
    j = tl.arange(0, BC)[None, :]
    if EVEN:
        return tl.load(GRAD + i * BC + j)
    return tl.load(GRAD + i * c + j, mask=(i < r) & (j < c), other=0.0)


@triton.jit(do_not_specialize=["r", "c", "parts", "matrices", "iterations", "t"])
def balance_parts_adjoints(
    LOGITS, KEPT, GRAD, ADJOINTS, SUMS, r, c, parts, matrices, iterations, t, BR: tl.constexpr, BC: tl.constexpr,
    STRIPS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Write the adjoints of rows after iteration t, those of columns after the following one, and the sums for columns after t.

    LAST: iteration t is the last one. GRAD is read there alone.
    """
    matrix = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    LOGITS = matrix_at(LOGITS, matrix, r, c, BC, EVEN)
    GRAD = matrix_at(GRAD, matrix, r, c, BC, EVEN)
    KEPT += (matrix * iterations + t) * (r + c)
    ADJOINTS += (matrix * iterations + t) * (r + c)
    j = tl.arange(0, BC)
    following = load_strip(LOGITS, part * STRIPS * BR, r, c, BR, BC, EVEN)
    by_column = tl.load(KEPT + j, mask=j < c, other=0.0)
    if not LAST:
        later = tl.sum(load_part_sums(SUMS, (t + 1) % 2, matrix, matrices, parts, PARTS, BC, 0.0), 0)
        pull = later * tl.exp2(by_column - tl.load(KEPT + (r + c) + j, mask=j < c, other=0.0))
        if part == 0:
            tl.store(ADJOINTS + (r + c) + j, later, mask=j < c)
    of_columns = tl.zeros([BC], tl.float32)
    for number in range(0, STRIPS):
        first = (part * STRIPS + number) * BR
        i = first + tl.arange(0, BR)
        x = following
        if STRIPS > 1:
            following = load_strip(LOGITS, (part * STRIPS + tl.minimum(number + 1, STRIPS - 1)) * BR, r, c, BR, BC, EVEN)
        w = strip_weights(x, tl.load(KEPT + c + i, mask=i < r, other=0.0), by_column)
        if LAST:
            g = load_grad(GRAD, first, r, c, BR, BC, EVEN) * w
            of_rows = -tl.sum(g, 1)
            of_columns -= tl.sum(g + w * of_rows[:, None], 0)
        else:
            of_rows = -tl.sum(w * pull[None, :], 1)
            of_columns -= tl.sum(w * of_rows[:, None], 0)
        tl.store(ADJOINTS + c + i, of_rows, mask=i < r)
    store_part_sums(SUMS, t % 2, matrix, matrices, part, of_columns, PARTS, BC)


@triton.jit(do_not_specialize=["r", "c", "parts", "matrices", "iterations", "strips"])
def balance_parts_grads(
    LOGITS, KEPT, GRAD, ADJOINTS, SUMS, FOUND, r, c, parts, matrices, iterations, strips, BR: tl.constexpr, BC: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a strip of logits from the adjoints of all potentials; SUMS holds those of the first columns."""
    matrix = (tl.program_id(0) // strips).to(tl.int64)
    first = tl.program_id(0) % strips * BR
    KEPT += matrix * iterations * (r + c)
    ADJOINTS += matrix * iterations * (r + c)
    i = first + tl.arange(0, BR)
    j = tl.arange(0, BC)
    x = load_strip(matrix_at(LOGITS, matrix, r, c, BC, EVEN), first, r, c, BR, BC, EVEN)
    of_columns = tl.sum(load_part_sums(SUMS, 0, matrix, matrices, parts, PARTS, BC, 0.0), 0)
    total = load_grad(matrix_at(GRAD, matrix, r, c, BC, EVEN), first, r, c, BR, BC, EVEN)
    by_column = tl.load(KEPT + (iterations - 1) * (r + c) + j, mask=j < c, other=0.0)
    total *= strip_weights(x, tl.load(KEPT + (iterations - 1) * (r + c) + c + i, mask=i < r, other=0.0), by_column)
    before = tl.zeros([BR], tl.float32)  # potentials of rows after the iteration before
    for t in range(0, iterations):
        by_column = tl.load(KEPT + t * (r + c) + j, mask=j < c, other=0.0)
        by_row = tl.load(KEPT + t * (r + c) + c + i, mask=i < r, other=0.0)
        of_rows = tl.load(ADJOINTS + t * (r + c) + c + i, mask=i < r, other=0.0)
        if t > 0:
            of_columns = tl.load(ADJOINTS + t * (r + c) + j, mask=j < c, other=0.0)
        # Weights between columns and rows are those after both times a sum of at most c: it does not overflow.
        between = tl.exp2(by_row - before)
        total += strip_weights(x, by_row, by_column) * (of_columns[None, :] * between[:, None] + of_rows[:, None])
        before = by_row
    width = BC if EVEN else c
    at = matrix * r * width + i[:, None] * width + j[None, :]
    tl.store(FOUND + at, total, mask=(i[:, None] < r) & (j[None, :] < c))
