"""Sinkhorn's iterations in Triton, a matrix a program: see `regard.ops.balance`. Logits are base-2 logarithms inside.

Backward, iterations run from the last to the first. A normalisation y = x - lse(x) has the gradient g - softmax(x) sum(g), and
x is y plus the log-sum-exp that the forward pass kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.triton_math import LOG2E

GONE = tl.constexpr(-1.0e30)  # logit of a pair that does not exist


@triton.jit
def load_logits(LOGITS, r, c, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Return the places of a matrix, which of its pairs exist, and its logits of base 2. EVEN: it has BR rows and BC columns."""
    i = tl.arange(0, BR)[:, None]
    j = tl.arange(0, BC)[None, :]
    if EVEN:
        r = BR
        c = BC
    at = tl.program_id(0).to(tl.int64) * r * c + i * c + j
    inside = (i < r) & (j < c)
    x = tl.load(LOGITS + at, mask=inside, other=GONE)
    real = x > GONE / 2
    return at, inside, real, tl.where(real, x * LOG2E, GONE)


@triton.jit
def log_sums(x, AXIS: tl.constexpr):
    top = tl.max(x, AXIS)
    shifted = x - (top[None, :] if AXIS == 0 else top[:, None])
    return top + tl.log2(tl.sum(tl.exp2(shifted), AXIS))


@triton.jit
def positive(x):
    """Return sums with 1 in place of those of no pairs."""
    return tl.where(x > 0, x, 1.0)


@triton.jit(do_not_specialize=["r", "c", "iterations"])
def balance_rows_and_columns(LOGITS, OUT, KEPT, r, c, iterations, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Write a balanced matrix, and the log-sum-exp of columns and rows of all iterations, KEPT (matrices iterations c + r).

    After one iteration a column of c rows that sum to 1 sums to 1 / c at least, and so on: no maximum is needed any more.
    """
    at, inside, real, x = load_logits(LOGITS, r, c, BR, BC, EVEN)
    rows = tl.arange(0, BR)
    columns = tl.arange(0, BC)
    KEPT += tl.program_id(0).to(tl.int64) * iterations * (r + c)
    by_column = log_sums(x, 0)
    x = tl.where(real, x - by_column[None, :], GONE)
    by_row = log_sums(x, 1)
    x = tl.where(real, x - by_row[:, None], GONE)
    for t in range(0, iterations):
        tl.store(KEPT + t * (r + c) + columns, by_column, mask=columns < c)
        tl.store(KEPT + t * (r + c) + c + rows, by_row, mask=rows < r)
        if t < iterations - 1:
            w = tl.exp2(x)
            total = positive(tl.sum(w, 0))
            by_column = tl.log2(total)
            by_row = tl.log2(positive(tl.sum(w * (1.0 / total)[None, :], 1)))
            x = x - by_column[None, :] - by_row[:, None]  # GONE is so far below that it stays
    tl.store(OUT + at, tl.exp2(x), mask=inside)


@triton.jit(do_not_specialize=["r", "c", "iterations"])
def balance_grads(LOGITS, KEPT, GRAD, FOUND, r, c, iterations, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Write the gradient of the logits of a matrix."""
    at, inside, real, x = load_logits(LOGITS, r, c, BR, BC, EVEN)
    rows = tl.arange(0, BR)
    columns = tl.arange(0, BC)
    KEPT += tl.program_id(0).to(tl.int64) * iterations * (r + c)
    for t in range(0, iterations):
        by_column = tl.load(KEPT + t * (r + c) + columns, mask=columns < c, other=0.0)
        by_row = tl.load(KEPT + t * (r + c) + c + rows, mask=rows < r, other=0.0)
        x = tl.where(real, x - by_column[None, :] - by_row[:, None], GONE)
    g = tl.load(GRAD + at, mask=inside, other=0.0) * tl.exp2(x)
    for back in range(0, iterations):
        t = iterations - 1 - back
        g -= tl.exp2(x) * tl.sum(g, 1)[:, None]
        by_row = tl.load(KEPT + t * (r + c) + c + rows, mask=rows < r, other=0.0)
        x = tl.where(real, x + by_row[:, None], GONE)
        g -= tl.exp2(x) * tl.sum(g, 0)[None, :]
        by_column = tl.load(KEPT + t * (r + c) + columns, mask=columns < c, other=0.0)
        x = tl.where(real, x + by_column[None, :], GONE)
    tl.store(FOUND + at, tl.where(real, g, 0.0), mask=inside)


@triton.jit
def row_shares(x, taken, some):
    """Return softmax(logits - log(1 + taken)) of every row that has `some` pair, 0 elsewhere."""
    x = x - tl.log2(1.0 + taken)
    p = tl.exp2(x - tl.max(x, 1)[:, None])
    return tl.where(some[:, None], p / tl.sum(p, 1)[:, None], 0.0)


@triton.jit(do_not_specialize=["r", "c", "iterations"])
def balance_in_time(LOGITS, OUT, KEPT, r, c, iterations, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Write a matrix balanced in the order of time, and what earlier rows took in each sweep, KEPT (matrices iterations r c)."""
    at, inside, real, x = load_logits(LOGITS, r, c, BR, BC, EVEN)
    some = tl.max(real.to(tl.int32), 1) > 0
    rows = tl.arange(0, BR)
    earlier = (rows[None, :] < rows[:, None]).to(tl.float32)
    taken = tl.zeros([BR, BC], tl.float32)
    base = tl.program_id(0).to(tl.int64) * r * c
    for t in range(0, iterations):
        taken = tl.dot(earlier, row_shares(x, taken, some), input_precision="tf32x3")
        tl.store(KEPT + base * iterations + t * r * c + (at - base), taken, mask=inside)
    tl.store(OUT + at, row_shares(x, taken, some), mask=inside)


@triton.jit(do_not_specialize=["r", "c", "iterations"])
def balance_in_time_grads(LOGITS, KEPT, GRAD, FOUND, r, c, iterations, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Write the gradient of the logits of a matrix that was balanced in the order of time."""
    at, inside, real, x = load_logits(LOGITS, r, c, BR, BC, EVEN)
    some = tl.max(real.to(tl.int32), 1) > 0
    rows = tl.arange(0, BR)
    later = (rows[None, :] > rows[:, None]).to(tl.float32)
    base = tl.program_id(0).to(tl.int64) * r * c
    g = tl.load(GRAD + at, mask=inside, other=0.0)
    total = tl.zeros([BR, BC], tl.float32)
    for back in range(0, iterations + 1):
        t = iterations - 1 - back  # the last sweep but one of `taken`; the first sweep had nothing taken
        taken = tl.load(KEPT + base * iterations + t * r * c + (at - base), mask=inside & (t >= 0), other=0.0)
        p = row_shares(x, taken, some)
        dx = p * (g - tl.sum(g * p, 1)[:, None])
        total += dx
        g = tl.dot(later, -dx / (1.0 + taken), input_precision="tf32x3")
    tl.store(FOUND + at, tl.where(real, total, 0.0), mask=inside)


@triton.jit
def load_strip(LOGITS, first, r, c, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr = False):
    """Return rows from `first` on of the matrix of a program, in base 2; GONE for pairs that do not exist. EVEN: all is full."""
    i = first + tl.arange(0, BR)[:, None]
    j = tl.arange(0, BC)[None, :]
    if EVEN:  # noqa: SIM108 - the address is then known to be aligned
        x = tl.load(LOGITS + i * BC + j)
    else:
        x = tl.load(LOGITS + i * c + j, mask=(i < r) & (j < c), other=GONE)
    return tl.where(x > GONE / 2, x * LOG2E, GONE)


@triton.jit
def strip_shares(x, taken):
    """Return `row_shares` of a strip of rows, for which pairs that do not exist have GONE."""
    return row_shares(x, taken, tl.max((x > GONE / 2).to(tl.int32), 1) > 0)


@triton.jit(do_not_specialize=["r", "c", "iterations"])
def balance_wide_in_time(LOGITS, OUT, KEPT, r, c, iterations, BR: tl.constexpr, BC: tl.constexpr):
    """As `balance_in_time`, of a matrix that is read in strips of rows in every sweep."""
    pid = tl.program_id(0).to(tl.int64)
    LOGITS += pid * r * c
    OUT += pid * r * c
    KEPT += pid * iterations * r * c
    strip = tl.arange(0, BR)
    j = tl.arange(0, BC)
    earlier = (strip[None, :] < strip[:, None]).to(tl.float32)
    for t in range(0, iterations + 1):
        before = tl.zeros([BC], tl.float32)
        for first in range(0, r, BR):
            i = first + strip
            at = i[:, None] * c + j[None, :]
            inside = (i[:, None] < r) & (j[None, :] < c)
            taken = tl.load(KEPT + (t - 1) * r * c + at, mask=inside & (t > 0), other=0.0)
            p = strip_shares(load_strip(LOGITS, first, r, c, BR, BC), taken)
            if t == iterations:
                tl.store(OUT + at, p, mask=inside)
            else:
                found = before[None, :] + tl.dot(earlier, p, input_precision="tf32x3")
                tl.store(KEPT + t * r * c + at, found, mask=inside)
                before += tl.sum(p, 0)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["r", "c", "strips", "iterations"])
def balance_wide_in_time_grads(LOGITS, KEPT, GRAD, FOUND, r, c, strips, iterations, BR: tl.constexpr, BC: tl.constexpr):
    """Write the gradient of the logits of a matrix; strips run from the last to the first, and GRAD is written over."""
    pid = tl.program_id(0).to(tl.int64)
    LOGITS += pid * r * c
    GRAD += pid * r * c
    FOUND += pid * r * c
    KEPT += pid * iterations * r * c
    strip = tl.arange(0, BR)
    j = tl.arange(0, BC)
    later = (strip[None, :] > strip[:, None]).to(tl.float32)
    for back in range(0, iterations + 1):
        t = iterations - 1 - back
        behind = tl.zeros([BC], tl.float32)
        for number in range(0, strips):
            first = (strips - 1 - number) * BR
            i = first + strip
            at = i[:, None] * c + j[None, :]
            inside = (i[:, None] < r) & (j[None, :] < c)
            x = load_strip(LOGITS, first, r, c, BR, BC)
            taken = tl.load(KEPT + t * r * c + at, mask=inside & (t >= 0), other=0.0)
            p = strip_shares(x, taken)
            g = tl.load(GRAD + at, mask=inside, other=0.0)
            dx = p * (g - tl.sum(g * p, 1)[:, None])
            total = tl.load(FOUND + at, mask=inside & (back > 0), other=0.0) + dx
            tl.store(FOUND + at, tl.where(x > GONE / 2, total, 0.0), mask=inside)
            pull = -dx / (1.0 + taken)
            found = behind[None, :] + tl.dot(later, pull, input_precision="tf32x3")
            tl.store(GRAD + at, found, mask=inside)
            behind += tl.sum(pull, 0)
        tl.debug_barrier()
