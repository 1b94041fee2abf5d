"""Products inside of a chunk under a decay per feature, in Triton.

exp(L_i - L_j) differs by feature, so it must be split between q_i and k_j. A chunk of C tokens is halved again and again: for a
query in the second half of a block and a key in the first, both factors are at most 1 if they are taken apart at the last token
of the first half. Every one of the log2(C) sizes of halves is one product of whole tiles with a mask; a token with itself has no
decay. LEVEL are pointers to L, the log decay from the start of the chunk.
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_tiles import token_columns, token_rows


@triton.jit
def half_ends(C: tl.constexpr, half: tl.constexpr):
    """Return for every token of a chunk the last token of the first half of its block of 2 half tokens."""
    r = tl.arange(0, C)
    return (r // (2 * half)) * (2 * half) + half - 1


@triton.jit
def half_pairs(query, key, half: tl.constexpr):
    """Return where a query lies in the second half and a key in the first half of the same block."""
    same = query // (2 * half) == key // (2 * half)
    return same & (query % (2 * half) >= half) & (key % (2 * half) < half)


@triton.jit
def halved_scores(
    q, k, kt, LEVEL, low, stride, d, count,
    f: tl.constexpr, C: tl.constexpr, HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return sum_f q_i k_j exp(L_i - L_j) for j <= i, else 0, from rows q, k (C, features) and columns kt."""
    r = tl.arange(0, C)
    level = token_rows(LEVEL, low + r, stride, d, count, f)
    across = token_columns(LEVEL, low + r, stride, d, count, f)
    own = tl.sum(q * k, 1)
    a = tl.where(r[:, None] == r[None, :], own[:, None], 0.0)
    for x in tl.static_range(HALVINGS):
        end = low + half_ends(C, C >> (x + 1))
        late = q * tl.exp(tl.minimum(level - token_rows(LEVEL, end, stride, d, count, f), 0.0))
        early = kt * tl.exp(tl.minimum(token_columns(LEVEL, end, stride, d, count, f) - across, 0.0))
        product = tl.dot(late.to(TYPE), early.to(TYPE), input_precision=PRECISION)
        a = tl.where(half_pairs(r[:, None], r[None, :], C >> (x + 1)), product, a)
    return a


@triton.jit
def halved_scores_of_keys(
    k, q, qt, LEVEL, low, stride, d, count,
    f: tl.constexpr, C: tl.constexpr, HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the same scores for (key j, query i), from rows k, q and columns qt."""
    r = tl.arange(0, C)
    level = token_rows(LEVEL, low + r, stride, d, count, f)
    across = token_columns(LEVEL, low + r, stride, d, count, f)
    own = tl.sum(q * k, 1)
    a = tl.where(r[:, None] == r[None, :], own[:, None], 0.0)
    for x in tl.static_range(HALVINGS):
        end = low + half_ends(C, C >> (x + 1))
        early = k * tl.exp(tl.minimum(token_rows(LEVEL, end, stride, d, count, f) - level, 0.0))
        late = qt * tl.exp(tl.minimum(across - token_columns(LEVEL, end, stride, d, count, f), 0.0))
        product = tl.dot(early.to(TYPE), late.to(TYPE), input_precision=PRECISION)
        a = tl.where(half_pairs(r[None, :], r[:, None], C >> (x + 1)), product, a)
    return a


@triton.jit
def halved_query_grads(
    dq, da, k, LEVEL, low, stride, d, count,
    f: tl.constexpr, C: tl.constexpr, HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add sum_{j <= i} da_ij k_j exp(L_i - L_j) to dq_i; da is (i, j)."""
    r = tl.arange(0, C)
    level = token_rows(LEVEL, low + r, stride, d, count, f)
    own = tl.sum(tl.where(r[:, None] == r[None, :], da, 0.0), 1)
    dq += own[:, None] * k
    for x in tl.static_range(HALVINGS):
        end = token_rows(LEVEL, low + half_ends(C, C >> (x + 1)), stride, d, count, f)
        early = k * tl.exp(tl.minimum(end - level, 0.0))
        weights = tl.where(half_pairs(r[:, None], r[None, :], C >> (x + 1)), da, 0.0)
        product = tl.dot(weights.to(TYPE), early.to(TYPE), input_precision=PRECISION)
        dq += product * tl.exp(tl.minimum(level - end, 0.0))
    return dq


@triton.jit
def halved_key_grads(
    dk, dat, q, LEVEL, low, stride, d, count,
    f: tl.constexpr, C: tl.constexpr, HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add sum_{i >= j} da_ij q_i exp(L_i - L_j) to dk_j; dat is (j, i)."""
    r = tl.arange(0, C)
    level = token_rows(LEVEL, low + r, stride, d, count, f)
    own = tl.sum(tl.where(r[:, None] == r[None, :], dat, 0.0), 1)
    dk += own[:, None] * q
    for x in tl.static_range(HALVINGS):
        end = token_rows(LEVEL, low + half_ends(C, C >> (x + 1)), stride, d, count, f)
        late = q * tl.exp(tl.minimum(level - end, 0.0))
        weights = tl.where(half_pairs(r[None, :], r[:, None], C >> (x + 1)), dat, 0.0)
        product = tl.dot(weights.to(TYPE), late.to(TYPE), input_precision=PRECISION)
        dk += product * tl.exp(tl.minimum(end - level, 0.0))
    return dk
