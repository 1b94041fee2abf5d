"""Triton kernels of blocks of queries that see two blocks of keys each: see `regard.ops.two_blocks`.

A program owns a block of queries and both of its blocks of keys, which no other program reads: one kernel has all gradients.
Scores are base-2 logarithms, and computed twice in the backward pass: by queries, and transposed by keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.triton_math import LOG2E


@triton.jit
def block_at(X, strides, heads, blocks):
    """Return the pointer to the block of a program, and the stride of its tokens; strides of (b h u p .)."""
    pid = tl.program_id(0)
    sb, sh, su, sp = strides
    row = pid // blocks
    offset = (row // heads).to(tl.int64) * sb + (row % heads).to(tl.int64) * sh + (pid % blocks).to(tl.int64) * su
    return X + offset, sp


@triton.jit
def load_block(X, strides, heads, blocks, p, SIZE: tl.constexpr, BP: tl.constexpr, BLOCK: tl.constexpr):
    """Load the block of a program, (BP BLOCK), 0 outside of it."""
    X, sp = block_at(X, strides, heads, blocks)
    i = tl.arange(0, BP)
    c = tl.arange(0, BLOCK)
    return tl.load(X + i[:, None] * sp + c[None, :], mask=(i[:, None] < p) & (c[None, :] < SIZE), other=0.0)


@triton.jit
def store_block(X, strides, x, heads, blocks, p, SIZE: tl.constexpr, BP: tl.constexpr, BLOCK: tl.constexpr):
    X, sp = block_at(X, strides, heads, blocks)
    i = tl.arange(0, BP)
    c = tl.arange(0, BLOCK)
    inside = (i[:, None] < p) & (c[None, :] < SIZE)
    tl.store(X + i[:, None] * sp + c[None, :], x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def load_bias(BIAS, p, MASS: tl.constexpr, SECOND: tl.constexpr, BP: tl.constexpr):
    """Load what the scores of the p own keys get, or those of the SECOND block, times log2(e); -inf outside.

    BIAS (blocks 2p); with MASS (blocks): one number for all keys of the second block, and 0 for the own ones.
    """
    pid = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BP)
    if MASS:
        bias = tl.where(j < p, 0.0, float("-inf"))
        return bias + tl.load(BIAS + pid) * LOG2E if SECOND else bias
    first = p if SECOND else 0
    return tl.load(BIAS + pid * (2 * p) + first + j, mask=j < p, other=float("-inf")) * LOG2E


@triton.jit(do_not_specialize=["heads", "blocks", "p"])
def two_blocks_forward(
    Q, K, V, K2, V2, BIAS, OUT, LSE, q_strides, k_strides, v_strides, k2_strides, v2_strides, out_strides,
    heads, blocks, p, scale, CAUSAL: tl.constexpr, MASS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a block of queries, and their log-sum-exp LSE (blocks p), base 2."""
    i = tl.arange(0, BP)
    q = load_block(Q, q_strides, heads, blocks, p, D, BP, BD)
    k = load_block(K, k_strides, heads, blocks, p, D, BP, BD)
    k2 = load_block(K2, k2_strides, heads, blocks, p, D, BP, BD)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) + load_bias(BIAS, p, MASS, False, BP)[None, :]
    if CAUSAL:
        s = tl.where(i[None, :] <= i[:, None], s, float("-inf"))
    s2 = tl.dot(q, tl.trans(k2), input_precision=PRECISION) * (scale * LOG2E) + load_bias(BIAS, p, MASS, True, BP)[None, :]
    top = tl.maximum(tl.max(s, 1), tl.max(s2, 1))
    w = tl.exp2(s - top[:, None])
    w2 = tl.exp2(s2 - top[:, None])
    total = tl.sum(w, 1) + tl.sum(w2, 1)
    v = load_block(V, v_strides, heads, blocks, p, E, BP, BE)
    v2 = load_block(V2, v2_strides, heads, blocks, p, E, BP, BE)
    acc = tl.dot(w.to(v.dtype), v, input_precision=PRECISION)
    acc = tl.dot(w2.to(v.dtype), v2, acc, input_precision=PRECISION)
    store_block(OUT, out_strides, acc / total[:, None], heads, blocks, p, E, BP, BE)
    tl.store(LSE + tl.program_id(0).to(tl.int64) * p + i, top + tl.log2(total), mask=i < p)


@triton.jit
def block_grads(q, k, v, grad, lse, delta, bias, factor, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Return the gradients of queries, keys and values of one pair of blocks, up to the scale of scores, and of the bias."""
    i = tl.arange(0, q.shape[0])
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor + bias[None, :]
    turned = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor + bias[:, None]
    if MASKED:
        s = tl.where(i[None, :] <= i[:, None], s, float("-inf"))
        turned = tl.where(i[:, None] <= i[None, :], turned, float("-inf"))
    ds = tl.exp2(s - lse[:, None]) * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    dq = tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    w = tl.exp2(turned - lse[None, :])
    dv = tl.dot(w.to(grad.dtype), grad, input_precision=PRECISION)
    ds = w * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    return dq, dk, dv, tl.sum(ds, 1)


@triton.jit(do_not_specialize=["heads", "blocks", "p"])
def two_blocks_backward(
    Q, K, V, K2, V2, BIAS, OUT, GRAD, LSE, DQ, DK, DV, DK2, DV2, DBIAS, q_strides, k_strides, v_strides, k2_strides, v2_strides,
    out_strides, grad_strides, dq_strides, dk_strides, dv_strides, dk2_strides, dv2_strides, heads, blocks, p, scale,
    CAUSAL: tl.constexpr, MASS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write all gradients of a block of queries and of both its blocks of keys."""
    i = tl.arange(0, BP)
    q = load_block(Q, q_strides, heads, blocks, p, D, BP, BD)
    grad = load_block(GRAD, grad_strides, heads, blocks, p, E, BP, BE)
    out = load_block(OUT, out_strides, heads, blocks, p, E, BP, BE)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(LSE + tl.program_id(0).to(tl.int64) * p + i, mask=i < p, other=0.0)
    DBIAS += tl.program_id(0).to(tl.int64) * (1 if MASS else 2 * p)
    k = load_block(K, k_strides, heads, blocks, p, D, BP, BD)
    v = load_block(V, v_strides, heads, blocks, p, E, BP, BE)
    dq, dk, dv, db = block_grads(q, k, v, grad, lse, delta, load_bias(BIAS, p, MASS, False, BP), scale * LOG2E, CAUSAL, PRECISION)
    store_block(DK, dk_strides, dk * scale, heads, blocks, p, D, BP, BD)
    store_block(DV, dv_strides, dv, heads, blocks, p, E, BP, BE)
    if not MASS:
        tl.store(DBIAS + i, db, mask=i < p)
    k = load_block(K2, k2_strides, heads, blocks, p, D, BP, BD)
    v = load_block(V2, v2_strides, heads, blocks, p, E, BP, BE)
    more, dk, dv, db = block_grads(q, k, v, grad, lse, delta, load_bias(BIAS, p, MASS, True, BP), scale * LOG2E, False, PRECISION)
    store_block(DK2, dk2_strides, dk * scale, heads, blocks, p, D, BP, BD)
    store_block(DV2, dv2_strides, dv, heads, blocks, p, E, BP, BE)
    if MASS:
        tl.store(DBIAS, tl.sum(db, 0))
    else:
        tl.store(DBIAS + p + i, db, mask=i < p)
    store_block(DQ, dq_strides, (dq + more) * scale, heads, blocks, p, D, BP, BD)


@triton.jit
def load_shares(SHARES, first, count, c, BR: tl.constexpr, BC: tl.constexpr):
    """Return the places of rows from `first` on of matrices (c c), which of their pairs exist, and their shares without the own
    block.
    """
    i = first + tl.arange(0, BR)[:, None]
    j = tl.arange(0, BC)[None, :]
    at = i.to(tl.int64) * c + j
    inside = (i < count) & (j < c)
    x = tl.load(SHARES + at, mask=inside, other=0.0)
    return at, inside & (j != i % c), tl.where(j != i % c, x, 0.0)


@triton.jit(do_not_specialize=["count", "c"])
def share_weights(SHARES, WEIGHTS, MASS, count, c, least, unseen, BR: tl.constexpr, BC: tl.constexpr):
    """Write the shares of other blocks divided by their sum, WEIGHTS (count c), and the log of the sum, MASS (count); the
    shares themselves and `unseen` where the sum has no digits left.
    """
    first = tl.program_id(0) * BR
    i = first + tl.arange(0, BR)
    j = tl.arange(0, BC)
    at, _, x = load_shares(SHARES, first, count, c, BR, BC)
    total = tl.sum(x, 1)
    some = total > least
    row = tl.where(some, total, 1.0)
    tl.store(WEIGHTS + at, (x / row[:, None]).to(WEIGHTS.dtype.element_ty), mask=(i[:, None] < count) & (j[None, :] < c))
    tl.store(MASS + i, tl.where(some, tl.log(row), unseen), mask=i < count)


@triton.jit(do_not_specialize=["count", "c"])
def share_weights_grads(
    SHARES, BY_KEYS, BY_VALUES, DMASS, FOUND, count, c, least, PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Write the gradient of shares, from those of the weights, a sum of BY_KEYS and BY_VALUES (PARTS count c), and of MASS."""
    first = tl.program_id(0) * BR
    i = first + tl.arange(0, BR)
    j = tl.arange(0, BC)
    at, other, x = load_shares(SHARES, first, count, c, BR, BC)
    total = tl.sum(x, 1)
    some = total > least
    row = tl.where(some, total, 1.0)
    g = tl.load(BY_KEYS + at, mask=other, other=0.0) + tl.load(BY_VALUES + at, mask=other, other=0.0)
    for part in tl.static_range(1, PARTS):
        place = at + part * count.to(tl.int64) * c
        g += tl.load(BY_KEYS + place, mask=other, other=0.0) + tl.load(BY_VALUES + place, mask=other, other=0.0)
    pull = tl.sum(g * x, 1) / row - tl.load(DMASS + i, mask=i < count, other=0.0)
    found = (g - tl.where(some, pull, 0.0)[:, None]) / row[:, None]
    tl.store(FOUND + at, tl.where(other, found, 0.0), mask=(i[:, None] < count) & (j[None, :] < c))
