"""The Triton kernel for gradients of queries in linear attention, and how the backward pass is ordered.

    queries   walks a segment forwards from the state before it: dq, and what the segment adds to the adjoint of the state
    (scan)    `linear_scan` from the last segment to the first: the adjoint behind every segment
    keys      walks a segment backwards from the adjoint behind it: dk and dlog_decay, or dv

With dn the gradient of a numerator and dd that of a norm, L the cumulative log decay and w_ij = exp(L_i - L_j) for j <= i:

    dq_i = sum_j w_ij (dn_i . v_j + dd_i) k_j,   dk_j = sum_i w_ij (dn_i . v_j + dd_i) q_i,   dv_j = sum_i w_ij (q_i . k_j) dn_i
    dL_i = q_i . dq_i - k_i . dk_i, and behind the last token of a segment the product of state and adjoint
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import halved_query_grads
from regard.ops.linear.triton_tiles import (
    apply_feature,
    chunk_decay,
    chunk_levels,
    end_decay_rows,
    feature_slope,
    inverse_norm,
    key_rows,
    output_factor,
    start_decay_columns,
    start_decay_rows,
    token_columns,
    token_rows,
)


@triton.jit(do_not_specialize=["n", "segs", "SEG", "slots", "heads_all"])
def linear_backward_queries(
    Q, K, V, LEVEL, VALID, DO, OUT, DEN, DD, S, Z, DQ, OWN, OWN_Z, QD,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, slb, slh, sln, sdb, sdh, sdn,
    scale, n, segs, SEG, slots, heads_all, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr,
    FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, HAS_KEYS: tl.constexpr, DECAY_GRAD: tl.constexpr,
    HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DQ (b n h f) of one segment, head and part of the features, and what the segment adds to the adjoint state.

    OWN (b h slots f e) and OWN_Z (b h slots f) get the latter. DD (b h n) is the gradient of the norm: with NORMALIZE it is
    computed and stored here, else given. With DECAY_GRAD QD gets q . dq: (PARTS b h n), or (b h n f) for a decay per feature.
    """
    pid = tl.program_id(0)
    part, seg, bh = pid % PARTS, (pid // PARTS) % segs, (pid // PARTS // segs).to(tl.int64)
    b, h = bh // H, bh % H
    g = h // R
    start = (seg * SEG).to(tl.int64)
    Q += b * sqb + h * sqh + start * sqn
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    LEVEL += b * slb + g * slh + start * sln
    DO += b * sdb + h * sdh + start * sdn
    VALID += b * n + start
    OUT += ((b * n + start) * H + h) * e
    DQ += ((b * n + start) * H + h) * f
    DEN += bh * n + start
    DD += bh * n + start
    count = tl.minimum(n - seg * SEG, SEG)
    d = part * BF + tl.arange(0, BF)
    c = tl.arange(0, BE)
    r = tl.arange(0, C)
    at = (b * (H // R) + g) * slots * f
    if HAS_KEYS:
        at += seg * f
    inside = d < f
    st = tl.load(S + at * e + d[None, :] * e + c[:, None], mask=inside[None, :] & (c[:, None] < e), other=0.0).to(tl.float32)
    z = tl.zeros([BF], tl.float32)
    if NORM:
        z = tl.load(Z + at + d, mask=inside, other=0.0).to(tl.float32)
    own = tl.zeros([BF, BE], tl.float32)
    own_z = tl.zeros([BF], tl.float32)
    before = tl.zeros([BF], tl.float32)  # log decay of the chunks before this one
    for low in range(0, count, C):
        i = low + r
        dn = token_rows(DO, i, sdn, c, count, e).to(tl.float32)
        dd = tl.zeros([C], tl.float32)
        if NORMALIZE == 2:
            dn = dn * output_factor(DEN, i, count, 1.0, NORMALIZE)[:, None]
        if NORMALIZE == 1:
            o = token_rows(OUT, i, H * e, c, count, e).to(tl.float32)
            inverse = inverse_norm(tl.load(DEN + i, mask=i < count, other=0.0))
            dd = -tl.sum(dn * o, 1) * inverse
            dn = dn * inverse[:, None]
            if part == 0:
                tl.store(DD + i, dd, mask=i < count)
        elif NORM:
            dd = tl.load(DD + i, mask=i < count, other=0.0)
        half = dn.to(TYPE)
        dq = tl.dot(half, st.to(TYPE), input_precision=PRECISION)
        if NORM:
            dq += dd[:, None] * z[None, :]
        if DECAY > 0:
            dq = dq * start_decay_rows(LEVEL, low, sln, d, count, f, C, DECAY)
        if HAS_KEYS:
            vt = token_columns(V, i, svn, c, count, e).to(TYPE)
            k = key_rows(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID)
            da = tl.dot(half, vt, input_precision=PRECISION)
            if NORM:
                da += dd[:, None]
            if DECAY == 2:
                rows = k.to(tl.float32)
                dq = halved_query_grads(dq, da, rows, LEVEL, low, sln, d, count, f, C, HALVINGS, TYPE, PRECISION)
            else:
                if DECAY == 1:
                    level = chunk_levels(LEVEL, low, sln, count, C)
                    da = da * tl.exp(tl.where(r[:, None] >= r[None, :], level[:, None] - level[None, :], float("-inf")))
                else:
                    da = tl.where(r[:, None] >= r[None, :], da, 0.0)
                dq = tl.dot(da.to(TYPE), k.to(TYPE), dq, input_precision=PRECISION)
        x = token_rows(Q, i, sqn, d, count, f)
        qt = apply_feature(token_columns(Q, i, sqn, d, count, f), FEATURE)
        if DECAY_GRAD:
            product = apply_feature(x, FEATURE) * (dq * scale)
            mask = i < count
            if DECAY == 1:
                tl.store(QD + (part * heads_all + bh) * n + start + i, tl.sum(product, 1), mask=mask)
            else:
                tl.store(QD + (bh * n + start + i[:, None]) * f + d[None, :], product, mask=mask[:, None] & inside[None, :])
        dq = dq * scale
        if FEATURE != 0:
            dq = dq * feature_slope(x, FEATURE)
        mask = (i[:, None] < count) & inside[None, :]
        tl.store(DQ + i[:, None] * (H * f) + d[None, :], dq.to(DQ.dtype.element_ty), mask=mask)
        if DECAY > 0:
            qt = qt * (start_decay_columns(LEVEL, low, sln, d, count, f, C, DECAY) * tl.exp(before)[:, None])
            chunk = chunk_decay(LEVEL, low, sln, d, count, f, C, DECAY)
            before += chunk
            st = st * tl.exp(chunk)[None, :]
            z = z * tl.exp(chunk)
            k = k.to(tl.float32) * end_decay_rows(LEVEL, low, sln, d, count, f, C, DECAY)
        own = tl.dot(qt.to(TYPE), half, own, input_precision=PRECISION)
        if NORM:
            own_z += tl.sum(qt * dd[None, :], 1)
        if HAS_KEYS:
            st = tl.dot(vt, k.to(TYPE), st, input_precision=PRECISION)
            if NORM:
                z += tl.sum(k.to(tl.float32), 0)
    at = (bh * (segs + 1) + seg) * f
    tl.store(OWN + at * e + d[:, None] * e + c[None, :], own * scale, mask=inside[:, None] & (c[None, :] < e))
    if NORM:
        tl.store(OWN_Z + at + d, own_z * scale, mask=inside)
