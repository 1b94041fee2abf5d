"""Triton kernels for the adjoint states of linear attention and the gradients of queries, and how the backward pass is ordered.

    adjoint     what every segment adds to the adjoint of the state, and the gradients of the norms
    (scan)      `linear_scan` from the last segment to the first: the adjoint behind every segment
    gradients   dq, dk and dv of one tile each: the state before its segment or the adjoint behind it, the tiles of the segment
                that it sees or is seen by, and its own (`triton_keys.py`)
    decays      dlog_decay, sums over a segment from its end, where decays have gradients

With dn the gradient of a numerator and dd that of a norm, L the cumulative log decay and w_ij = exp(L_i - L_j) for j <= i:

    dq_i = sum_j w_ij (dn_i . v_j + dd_i) k_j,   dk_j = sum_i w_ij (dn_i . v_j + dd_i) q_i,   dv_j = sum_i w_ij (q_i . k_j) dn_i
    dL_i = q_i . dq_i - k_i . dk_i, and behind the last token of a segment the product of state and adjoint
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import tile_grads
from regard.ops.linear.triton_tiles import (
    apply_feature,
    exp_of,
    feature_slope,
    key_rows,
    level_at,
    level_rows,
    norm_grad,
    one_level,
    output_factor,
    token_columns,
    token_levels,
    token_rows,
)


@triton.jit(do_not_specialize=["n", "segs", "SEG", "tiles"])
def linear_adjoint(
    Q, LEVEL, DO, OUT, DEN, DD, OWN, OWN_Z, TA,
    sqb, sqh, sqn, slb, slh, sln, sdb, sdh, sdn,
    scale, n, segs, SEG, tiles, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr, TILE_NORMS: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum q_i dn_i^T and q_i dd_i over a segment of one head and part of the features, with the decay since its start.

    OWN (b h slots f e) and OWN_Z (b h slots f) get the sums. DD (b h n) is the gradient of the norm, given; with NORMALIZE 1 it
    is that times the norm, computed and stored here. TILE_NORMS: TA (b h tiles f) gets the sums of q_i dd_i of every tile.
    """
    pid = tl.program_id(0)
    part, seg, bh = pid % PARTS, (pid // PARTS) % segs, (pid // PARTS // segs).to(tl.int64)
    b, h = bh // H, bh % H
    start = (seg * SEG).to(tl.int64)
    Q += b * sqb + h * sqh + start * sqn
    LEVEL += b * slb + (h // R) * slh + start * sln
    DO += b * sdb + h * sdh + start * sdn
    OUT += ((b * n + start) * H + h) * e
    DEN += bh * n + start
    DD += bh * n + start
    count = tl.minimum(n - seg * SEG, SEG)
    d = part * BF + tl.arange(0, BF)
    c = tl.arange(0, BE)
    own = tl.zeros([BE, BF], tl.float32)
    own_z = tl.zeros([BF], tl.float32)
    for low in range(0, count, C):
        i = low + tl.arange(0, C)
        do = token_rows(DO, i, sdn, c, count, e)
        q = apply_feature(token_rows(Q, i, sqn, d, count, f), FEATURE)
        if NORMALIZE != 0:  # the factor of an output is given to its query
            q = q.to(tl.float32) * output_factor(DEN, i, count, 1.0, NORMALIZE)[:, None]
        if NORMALIZE == 1:
            dd = -tl.sum(do.to(tl.float32) * token_rows(OUT, i, H * e, c, count, e).to(tl.float32), 1)
            if part == 0:
                tl.store(DD + i, dd, mask=i < count)
        elif NORM:
            dd = tl.load(DD + i, mask=i < count, other=0.0)
        if DECAY == 1:
            q = q.to(tl.float32) * exp_of(token_levels(LEVEL, i, sln, count))[:, None]
        if DECAY == 2:
            q = q.to(tl.float32) * exp_of(level_rows(LEVEL, i, sln, d, count, f))
        own = tl.dot(tl.trans(do.to(TYPE)), q.to(TYPE), own, input_precision=PRECISION)
        if NORM:
            added = tl.sum(q.to(tl.float32) * dd[:, None], 0)
            own_z += added
            if TILE_NORMS:
                tl.store(TA + (bh * tiles + (seg * SEG + low) // C) * f + d, added, mask=d < f)
    at = (bh * (segs + 1) + seg) * f
    inside = d < f
    tl.store(OWN + at * e + d[None, :] * e + c[:, None], own * scale, mask=inside[None, :] & (c[:, None] < e))
    if NORM:
        tl.store(OWN_Z + at + d, own_z * scale, mask=inside)


@triton.jit
def query_grads(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, S, Z, DQ, QD,
    sqn, skn, svn, sln, sdn,
    scale, part, bh, at, start, low, count, n, heads_all, H,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_STATE: tl.constexpr, DECAY_GRAD: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DQ (b n h f) of one tile, head and part of the features; S, Z: the state before its segment, at row `at`.

    With DECAY_GRAD QD gets q . dq: (parts b h n), or (b h n f) for a decay per feature.
    """
    d = part * BF + tl.arange(0, BF)
    c = tl.arange(0, BE)
    r = tl.arange(0, C)
    i = low + r
    dn = token_rows(DO, i, sdn, c, count, e)
    if NORMALIZE != 0:
        dn = dn.to(tl.float32) * output_factor(DEN, i, count, 1.0, NORMALIZE)[:, None]
    half = dn.to(TYPE)
    dd = tl.zeros([C], tl.float32)
    if NORM:
        dd = norm_grad(DD, DEN, i, count, NORMALIZE)
    dq = tl.zeros([C, BF], tl.float32)
    if HAS_STATE:
        st = tl.load(S + at * e + d[None, :] * e + c[:, None], mask=(d[None, :] < f) & (c[:, None] < e), other=0.0)
        dq = tl.dot(half, st.to(TYPE), dq, input_precision=PRECISION)
        if NORM:
            z = tl.load(Z + at + d, mask=d < f, other=0.0).to(tl.float32)
            dq += dd[:, None] * z[None, :]
        if DECAY > 0:
            dq = dq * exp_of(level_at(LEVEL, low - 1, sln, d, f, DECAY))[None, :]
    if HAS_KEYS:
        if DECAY == 1:
            level = token_levels(LEVEL, i, sln, count)
            before = one_level(LEVEL, low - 1, sln)
        if DECAY == 2:
            befores = level_at(LEVEL, low - 1, sln, d, f, DECAY)
        for other in range(0, low, C):
            j = other + r
            vt = token_columns(V, j, svn, c, count, e, True)
            da = tl.dot(half, vt.to(TYPE), input_precision=PRECISION)
            if NORM:
                da += dd[:, None]
            if DECAY == 1:
                da = da * exp_of(before - token_levels(LEVEL, j, sln, count))[None, :]
            k = key_rows(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID, True)
            if DECAY == 2:
                k = k.to(tl.float32) * exp_of(befores[None, :] - level_rows(LEVEL, j, sln, d, count, f))
            dq = tl.dot(da.to(TYPE), k.to(TYPE), dq, input_precision=PRECISION)
        if DECAY == 1:
            dq = dq * exp_of(level - before)[:, None]
        if DECAY == 2:
            dq = dq * exp_of(level_rows(LEVEL, i, sln, d, count, f) - befores[None, :])
        vt = token_columns(V, i, svn, c, count, e)
        da = tl.dot(half, vt.to(TYPE), input_precision=PRECISION)
        if NORM:
            da += dd[:, None]
        k = key_rows(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID)
        if DECAY == 2:
            dq = tile_grads(dq, da, k.to(tl.float32), LEVEL, low, sln, d, count, f, C, False, TYPE, PRECISION)
        else:
            if DECAY == 1:
                da = da * exp_of(tl.where(r[:, None] >= r[None, :], level[:, None] - level[None, :], float("-inf")))
            else:
                da = tl.where(r[:, None] >= r[None, :], da, 0.0)
            dq = tl.dot(da.to(TYPE), k.to(TYPE), dq, input_precision=PRECISION)
    dq = dq * scale
    mask = (i[:, None] < count) & (d[None, :] < f)
    if FEATURE != 0 or DECAY_GRAD:
        x = token_rows(Q, i, sqn, d, count, f)
        if DECAY_GRAD:
            product = apply_feature(x, FEATURE) * dq
            if DECAY == 1:
                tl.store(QD + (part * heads_all + bh) * n + start + i, tl.sum(product, 1), mask=i < count)
            else:
                tl.store(QD + (bh * n + start + i[:, None]) * f + d[None, :], product, mask=mask)
        if FEATURE != 0:
            dq = dq * feature_slope(x, FEATURE)
    tl.store(DQ + i[:, None] * (H * f) + d[None, :], dq.to(DQ.dtype.element_ty), mask=mask)
