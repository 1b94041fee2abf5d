"""Triton kernels of linear attention without an order, for feature maps of single numbers: every query sees all keys.

With phi the features and z_f = sum_j phi(k_jf) over all keys,

    M_f = sum_j A_jf v_j,   A_jf = phi(k_jf) / z_f,          the mean value of a feature
    out_i = sum_f P_if M_f,   P_if = phi(q_if) z_f / sum_f phi(q_if) z_f

so that all products have factors of at most 1 and means of values, in the range of any type. FEATURE 3 is efficient attention:
A is a softmax over keys, computed with a running maximum, and P one over features, without z. With do the gradient of out,

    dM_f = sum_i P_if do_i,   t_f = sum_i P_if (do_i . out_i)      FEATURE 3: t_f = dM_f . M_f
    dv_j = sum_f A_jf dM_f,   dA_jf = dM_f . v_j - t_f             the gradient of log A times 1 / A

    sums          z, and M times z, of every segment of keys
    merge         both of all segments, a row of M a program
    read          outputs
    query grads   dq, and dM and t of every segment of queries
    merge grads   dM and t of all segments and of all query heads of a key-value head
    key grads     dk and dv

Letters: b batch, h query heads, g key-value heads, n queries, m keys, f features, e value dim. Logarithms are to base 2.
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_tiles import (
    LOG2_E,
    apply_feature,
    column_mask,
    feature_slope,
    inverse_norm,
    present,
    row_mask,
    token_rows,
)

SOFT_FEATURE = tl.constexpr(3)  # the FEATURE of efficient attention
LOG_OF_NOTHING = tl.constexpr(-1e30)  # a logarithm of 0 that can be subtracted from itself
LEAST = tl.constexpr(1e-37)  # below, a sum of features is 0: its inverse may be no number


@triton.jit
def segment_of(pid, segs, SEG, n):
    """Return the first token of the segment of a program, how many it has, its number and the row of batch and head."""
    seg, row = pid % segs, (pid // segs).to(tl.int64)
    start = (seg * SEG).to(tl.int64)
    return start, tl.minimum(n - seg * SEG, SEG), seg, row


@triton.jit
def state_tile(P, at, rows, c, f: tl.constexpr, e: tl.constexpr):
    """Load rows of a matrix (f e), 0 outside."""
    return tl.load(P + (at + rows[:, None]) * e + c[None, :], mask=column_mask(rows[:, None] < f, c, e), other=0.0)


@triton.jit
def state_columns(P, at, rows, c, f: tl.constexpr, e: tl.constexpr):
    """Load the transpose of rows of a matrix (f e), 0 outside."""
    return tl.load(P + (at + rows[None, :]) * e + c[:, None], mask=row_mask(rows[None, :] < f, c, e), other=0.0)


@triton.jit
def query_weights(x, z, d, f: tl.constexpr, FEATURE: tl.constexpr):
    """Return the weights of features (tokens, features), which sum to 1, and by what they were divided, inverse."""
    if FEATURE == SOFT_FEATURE:
        logs = tl.where(d[None, :] < f, x.to(tl.float32) * LOG2_E, float("-inf"))
        p = tl.exp2(logs - tl.max(logs, 1)[:, None])
        inverse = 1.0 / tl.sum(p, 1)
    else:
        p = apply_feature(x, FEATURE).to(tl.float32) * z[None, :]
        inverse = inverse_norm(tl.sum(p, 1))
    return p * inverse[:, None], inverse


@triton.jit(do_not_specialize=["m", "segs", "SEG"])
def noncausal_sums(
    K, V, VALID, S, Z, TOP, skb, skh, skn, svb, svh, svn, m, segs, SEG, G,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum phi(k_j) v_j^T into S (b g segs f e) and phi(k_j) into Z (b g segs f), in units of exp2(TOP) if FEATURE is 3."""
    start, count, seg, bg = segment_of(tl.program_id(0), segs, SEG, m)
    b, g = bg // G, bg % G
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    VALID += b * m + start
    d, c = tl.arange(0, BF), tl.arange(0, BE)
    s = tl.zeros([BF, BE], tl.float32)
    z = tl.zeros([BF, C], tl.float32)
    top = tl.full([BF], LOG_OF_NOTHING, tl.float32)
    for low in range(0, count, C):
        j = low + tl.arange(0, C)
        there = present(VALID, j, count, HAS_VALID)
        v = tl.load(V + j[:, None] * svn + c[None, :], mask=column_mask(there[:, None], c, e), other=0.0)
        k = tl.load(K + j[None, :] * skn + d[:, None], mask=row_mask(there[None, :], d, f), other=0.0)
        if FEATURE == SOFT_FEATURE:
            logs = tl.where(there[None, :], k.to(tl.float32) * LOG2_E, float("-inf"))
            higher = tl.maximum(top, tl.max(logs, 1))
            phi = tl.exp2(logs - higher[:, None])
            keep = tl.exp2(top - higher)[:, None]
            s = s * keep
            z = z * keep
            top = higher
        else:
            phi = tl.where(there[None, :], apply_feature(k, FEATURE), 0.0)
        z += phi
        s = tl.dot(phi.to(TYPE), v.to(TYPE), s, input_precision=PRECISION)
    at = (bg * segs + seg) * f
    inside = d < f
    tl.store(S + (at + d[:, None]) * e + c[None, :], s, mask=inside[:, None] & (c[None, :] < e))
    tl.store(Z + at + d, tl.sum(z, 1), mask=inside)
    if FEATURE == SOFT_FEATURE:
        tl.store(TOP + at + d, top, mask=inside)


@triton.jit(do_not_specialize=["segs"])
def noncausal_merge(
    S, Z, TOP, W, MEAN, LEVEL, W_LOGS, W_GRADS, segs,
    f: tl.constexpr, d: tl.constexpr, e: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, SB: tl.constexpr,
    RUNNING: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Merge the segments of one feature into MEAN (b g f e) and LEVEL (b g f): z, or its logarithm with RUNNING maxima.

    COPY: the directions W (f d) are stored in the types of W_LOGS and W_GRADS too.
    """
    row, bg = tl.program_id(0) % f, (tl.program_id(0) // f).to(tl.int64)
    c = tl.arange(0, BE)
    s = tl.zeros([BE], tl.float32)
    z = 0.0
    top = LOG_OF_NOTHING + 0.0
    for low in range(0, segs, SB):
        seg = low + tl.arange(0, SB)
        at = (bg * segs + seg) * f + row
        part = tl.load(S + at[:, None] * e + c[None, :], mask=column_mask(seg[:, None] < segs, c, e), other=0.0)
        norm = tl.load(Z + at, mask=seg < segs, other=0.0)
        if RUNNING:
            tops = tl.load(TOP + at, mask=seg < segs, other=LOG_OF_NOTHING)
            higher = tl.maximum(top, tl.max(tops, 0))
            share = tl.exp2(tops - higher)
            keep = tl.exp2(top - higher)
            part = part * share[:, None]
            norm = norm * share
            s = s * keep
            z = z * keep
            top = higher
        s += tl.sum(part, 0)
        z += tl.sum(norm, 0)
    some = z > LEAST
    s = s * tl.where(some, 1.0 / tl.where(some, z, 1.0), 0.0)
    tl.store(MEAN + (bg * f + row) * e + c, s.to(MEAN.dtype.element_ty), mask=c < e)
    level = tl.where(some, z, 0.0)
    if RUNNING:
        level = tl.where(some, top + tl.log2(tl.where(some, z, 1.0)), LOG_OF_NOTHING)
    tl.store(LEVEL + bg * f + row, level)
    if COPY:
        a = tl.arange(0, BD)
        own = (a < d) & (bg == 0)
        w = tl.load(W + row * d + a, mask=own, other=0.0)
        tl.store(W_LOGS + row * d + a, w.to(W_LOGS.dtype.element_ty), mask=own)
        tl.store(W_GRADS + row * d + a, w.to(W_GRADS.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["n", "segs", "SEG"])
def noncausal_read(
    Q, MEAN, LEVEL, OUT, sqb, sqh, sqn, n, segs, SEG, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    FEATURE: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute OUT (b n h e) of a segment of queries."""
    start, count, _seg, bh = segment_of(tl.program_id(0), segs, SEG, n)
    b, h = bh // H, bh % H
    Q += b * sqb + h * sqh + start * sqn
    OUT += ((b * n + start) * H + h) * e
    at = (bh // R) * f
    d, c = tl.arange(0, BF), tl.arange(0, BE)
    mean = state_tile(MEAN, at, d, c, f, e)
    z = tl.load(LEVEL + at + d, mask=d < f, other=0.0)
    for low in range(0, count, C):
        i = low + tl.arange(0, C)
        x = token_rows(Q, i, sqn, d, count, f)
        p, _inverse = query_weights(x, z, d, f, FEATURE)
        out = tl.dot(p.to(TYPE), mean.to(TYPE), input_precision=PRECISION)
        mask = column_mask(i[:, None] < count, c, e)
        tl.store(OUT + i[:, None] * (H * e) + c[None, :], out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "segs", "SEG"])
def noncausal_query_grads(
    Q, MEAN, LEVEL, DO, DQ, DMEAN, T, sqb, sqh, sqn, sdb, sdh, sdn, n, segs, SEG, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    FEATURE: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DQ (b n h f) of a segment of queries, and what it adds to DMEAN (b h segs f e) and T (b h segs f)."""
    start, count, seg, bh = segment_of(tl.program_id(0), segs, SEG, n)
    b, h = bh // H, bh % H
    Q += b * sqb + h * sqh + start * sqn
    DO += b * sdb + h * sdh + start * sdn
    DQ += ((b * n + start) * H + h) * f
    at = (bh // R) * f
    d, c = tl.arange(0, BF), tl.arange(0, BE)
    mean = state_columns(MEAN, at, d, c, f, e)
    z = tl.load(LEVEL + at + d, mask=d < f, other=0.0)
    adjoint = tl.zeros([BE, BF], tl.float32)
    t = tl.zeros([BF], tl.float32)
    for low in range(0, count, C):
        i = low + tl.arange(0, C)
        x = token_rows(Q, i, sqn, d, count, f)
        do = token_rows(DO, i, sdn, c, count, e).to(TYPE)
        p, inverse = query_weights(x, z, d, f, FEATURE)
        grad = tl.dot(do, mean.to(TYPE), input_precision=PRECISION)
        delta = tl.sum(p * grad, 1)
        grad -= delta[:, None]
        if FEATURE == SOFT_FEATURE:
            dq = p * grad
        else:
            dq = grad * inverse[:, None] * z[None, :] * feature_slope(x, FEATURE)
            t += tl.sum(p * delta[:, None], 0)
        mask = column_mask(i[:, None] < count, d, f)
        tl.store(DQ + i[:, None] * (H * f) + d[None, :], dq.to(DQ.dtype.element_ty), mask=mask)
        adjoint = tl.dot(tl.trans(do), p.to(TYPE), adjoint, input_precision=PRECISION)
    at = (bh * segs + seg) * f
    tl.store(DMEAN + (at + d[None, :]) * e + c[:, None], adjoint, mask=(d[None, :] < f) & (c[:, None] < e))
    if FEATURE != SOFT_FEATURE:
        tl.store(T + at + d, t, mask=d < f)


@triton.jit(do_not_specialize=["parts"])
def noncausal_merge_grads(
    PARTS, T_PARTS, MEAN, DMEAN, T, parts,
    f: tl.constexpr, e: tl.constexpr, BE: tl.constexpr, SB: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Sum parts (b g parts f e) and (b g parts f) of one feature into DMEAN (b g f e) and T (b g f); SOFT: FEATURE is 3."""
    row, bg = tl.program_id(0) % f, (tl.program_id(0) // f).to(tl.int64)
    c = tl.arange(0, BE)
    total = tl.zeros([BE], tl.float32)
    t = 0.0
    for low in range(0, parts, SB):
        part = low + tl.arange(0, SB)
        at = (bg * parts + part) * f + row
        one = tl.load(PARTS + at[:, None] * e + c[None, :], mask=column_mask(part[:, None] < parts, c, e), other=0.0)
        total += tl.sum(one, 0)
        if not SOFT:
            t += tl.sum(tl.load(T_PARTS + at, mask=part < parts, other=0.0), 0)
    at = bg * f + row
    if SOFT:
        t = tl.sum(total * tl.load(MEAN + at * e + c, mask=c < e, other=0.0).to(tl.float32), 0)
    tl.store(DMEAN + at * e + c, total.to(DMEAN.dtype.element_ty), mask=c < e)
    tl.store(T + at, t)


@triton.jit(do_not_specialize=["m", "segs", "SEG"])
def noncausal_key_grads(
    K, V, VALID, LEVEL, DMEAN, T, DK, DV, skb, skh, skn, svb, svh, svn, m, segs, SEG, G,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK (b m g f) and DV (b m g e) of a segment of keys."""
    start, count, _seg, bg = segment_of(tl.program_id(0), segs, SEG, m)
    b, g = bg // G, bg % G
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    VALID += b * m + start
    DK += ((b * m + start) * G + g) * f
    DV += ((b * m + start) * G + g) * e
    d, c = tl.arange(0, BF), tl.arange(0, BE)
    adjoint, columns = state_tile(DMEAN, bg * f, d, c, f, e), state_columns(DMEAN, bg * f, d, c, f, e)
    t = tl.load(T + bg * f + d, mask=d < f, other=0.0)
    level = tl.load(LEVEL + bg * f + d, mask=d < f, other=0.0)
    inverse = tl.where(level > LEAST, 1.0 / tl.where(level > LEAST, level, 1.0), 0.0)
    for low in range(0, count, C):
        j = low + tl.arange(0, C)
        there = present(VALID, j, count, HAS_VALID)[:, None]
        k = tl.load(K + j[:, None] * skn + d[None, :], mask=column_mask(there, d, f), other=0.0)
        v = tl.load(V + j[:, None] * svn + c[None, :], mask=column_mask(there, c, e), other=0.0)
        grad = tl.dot(v.to(TYPE), columns.to(TYPE), input_precision=PRECISION) - t[None, :]
        if FEATURE == SOFT_FEATURE:
            share = tl.exp2(tl.where(there, k.to(tl.float32) * LOG2_E - level[None, :], float("-inf")))
            dk = share * grad
        else:
            share = tl.where(there, apply_feature(k, FEATURE), 0.0) * inverse[None, :]
            dk = tl.where(there, grad * inverse[None, :] * feature_slope(k, FEATURE), 0.0)
        dv = tl.dot(share.to(TYPE), adjoint.to(TYPE), input_precision=PRECISION)
        inside = j[:, None] < count
        tl.store(DK + j[:, None] * (G * f) + d[None, :], dk.to(DK.dtype.element_ty), mask=column_mask(inside, d, f))
        tl.store(DV + j[:, None] * (G * e) + c[None, :], dv.to(DV.dtype.element_ty), mask=column_mask(inside, c, e))
