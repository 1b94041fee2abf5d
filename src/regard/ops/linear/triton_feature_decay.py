"""Products inside of a tile of C tokens under a decay per feature, in Triton.

exp(L_i - L_j) differs by feature, so it must be split between q_i and k_j. Where no feature decays by more than
exp(LARGEST_SPREAD) in the tile, both factors are taken from the middle of the tile, and one product has all pairs. Elsewhere it
is halved again and again: for a query in the second half of a block and a key in the first, both factors are at most 1 if they
are taken apart at the last token of the first half. Every one of the log2(C) sizes of halves is one product of whole tiles with
a mask; a token with itself has no decay. A token is in one half alone, so it needs one factor for each size. LEVEL points to L,
the log decay from the start of the segment. No product is transposed but operands.
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_tiles import exp_of, level_at, level_rows

LARGEST_SPREAD = tl.constexpr(60.0)  # exp of it and of its negative are far from the limits of float32 and bfloat16


@triton.jit
def _narrow(LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr):
    """Return whether no feature decays by more than LARGEST_SPREAD from the first token of a tile to its last."""
    first = level_at(LEVEL, low, stride, d, f, 2)
    last = level_at(LEVEL, tl.minimum(low + C, count) - 1, stride, d, f, 2)
    return tl.max(first - last, 0) < LARGEST_SPREAD


@triton.jit
def _from_middle(LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr):
    """Return the levels of a tile less that of its middle, (C, features)."""
    middle = level_at(LEVEL, tl.minimum(low + C // 2, count - 1), stride, d, f, 2)
    return level_rows(LEVEL, low + tl.arange(0, C), stride, d, count, f) - middle[None, :]


@triton.jit
def tile_scores(
    q, k, LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, OF_KEYS: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return sum_f q_i k_j exp(L_i - L_j) for j <= i, else 0, of rows q, k (C, features): (i, j), or (j, i) with OF_KEYS."""
    r = tl.arange(0, C)
    if _narrow(LEVEL, low, stride, d, count, f, C):
        level = _from_middle(LEVEL, low, stride, d, count, f, C)
        late = (q * exp_of(level)).to(TYPE)
        early = (k * exp_of(-level)).to(TYPE)
        if OF_KEYS:
            a = tl.dot(early, tl.trans(late), input_precision=PRECISION)
            a = tl.where(r[None, :] >= r[:, None], a, 0.0)
        else:
            a = tl.dot(late, tl.trans(early), input_precision=PRECISION)
            a = tl.where(r[:, None] >= r[None, :], a, 0.0)
    else:
        a = halved_scores(q, k, LEVEL, low, stride, d, count, f, C, OF_KEYS, TYPE, PRECISION)
    return a


@triton.jit
def tile_grads(
    total, weights, x, LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, OF_KEYS: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to total the gradient of queries i, sum_{j <= i} weights_ij x_j exp(L_i - L_j), from keys x (C, features).

    OF_KEYS: add that of keys j, sum_{i >= j} weights_ji x_i exp(L_i - L_j), from queries x; weights are (j, i).
    """
    r = tl.arange(0, C)
    if _narrow(LEVEL, low, stride, d, count, f, C):
        level = _from_middle(LEVEL, low, stride, d, count, f, C)
        if OF_KEYS:
            level = -level
        seen = r[None, :] >= r[:, None] if OF_KEYS else r[:, None] >= r[None, :]
        masked = tl.where(seen, weights, 0.0).to(TYPE)
        total += tl.dot(masked, (x * exp_of(-level)).to(TYPE), input_precision=PRECISION) * exp_of(level)
    else:
        total = halved_grads(total, weights, x, LEVEL, low, stride, d, count, f, C, OF_KEYS, TYPE, PRECISION)
    return total


@triton.jit
def half_pairs(query, key, shift):
    """Return where a query lies in the second half and a key in the first half of the same block of 2 << shift tokens."""
    same = (query >> (shift + 1)) == (key >> (shift + 1))
    return same & (((query >> shift) & 1) == 1) & (((key >> shift) & 1) == 0)


@triton.jit
def half_decay(level, LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, shift):
    """Return the factor of every token (C, features): of a query in the second half of its block, or of a key in the first."""
    block = (tl.arange(0, C) >> (shift + 1)) << (shift + 1)
    end = level_rows(LEVEL, low + block + (1 << shift) - 1, stride, d, count, f)
    return exp_of(-tl.abs(level - end))


@triton.jit
def halved_scores(
    q, k, LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, OF_KEYS: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    HALVINGS: tl.constexpr = 4 + (C >= 32) + (C >= 64) + (C >= 128)
    r = tl.arange(0, C)
    level = level_rows(LEVEL, low + r, stride, d, count, f)
    a = tl.where(r[:, None] == r[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    for x in range(HALVINGS):
        shift = HALVINGS - 1 - x
        factor = half_decay(level, LEVEL, low, stride, d, count, f, C, shift)
        late = (q * factor).to(TYPE)
        early = (k * factor).to(TYPE)
        if OF_KEYS:
            product = tl.dot(early, tl.trans(late), input_precision=PRECISION)
            a = tl.where(half_pairs(r[None, :], r[:, None], shift), product, a)
        else:
            product = tl.dot(late, tl.trans(early), input_precision=PRECISION)
            a = tl.where(half_pairs(r[:, None], r[None, :], shift), product, a)
    return a


@triton.jit
def halved_grads(
    total, weights, x, LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, OF_KEYS: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    HALVINGS: tl.constexpr = 4 + (C >= 32) + (C >= 64) + (C >= 128)
    r = tl.arange(0, C)
    level = level_rows(LEVEL, low + r, stride, d, count, f)
    own = tl.sum(tl.where(r[:, None] == r[None, :], weights, 0.0), 1)
    total += own[:, None] * x
    for y in range(HALVINGS):
        shift = HALVINGS - 1 - y
        factor = half_decay(level, LEVEL, low, stride, d, count, f, C, shift)
        seen = half_pairs(r[None, :], r[:, None], shift) if OF_KEYS else half_pairs(r[:, None], r[None, :], shift)
        masked = tl.where(seen, weights, 0.0).to(TYPE)
        total += tl.dot(masked, (x * factor).to(TYPE), input_precision=PRECISION) * factor
    return total
