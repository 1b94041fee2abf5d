"""Triton kernels of causal linear attention, backward: gradients of queries, then of keys, values and decays.

    queries   walks a segment forwards from the state before it: dq, and what the segment adds to the adjoint of the state
    (scan)    `linear_scan` from the last segment to the first: the adjoint behind every segment
    keys      walks a segment backwards from the adjoint behind it: dk and dlog_decay, or dv

With dn the gradient of a numerator and dd that of a norm, L the cumulative log decay and w_ij = exp(L_i - L_j) for j <= i:

    dq_i = sum_j w_ij (dn_i . v_j + dd_i) k_j,   dk_j = sum_i w_ij (dn_i . v_j + dd_i) q_i,   dv_j = sum_i w_ij (q_i . k_j) dn_i
    dL_i = q_i . dq_i - k_i . dk_i, and behind the last token of a segment the product of state and adjoint
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import halved_key_grads, halved_query_grads, halved_scores_of_keys
from regard.ops.linear.triton_tiles import (
    chunk_decay,
    chunk_levels,
    end_decay_rows,
    feature_slope,
    inverse_norm,
    key_rows,
    present,
    query_features,
    start_decay_columns,
    start_decay_rows,
    token_columns,
    token_rows,
)


@triton.jit(do_not_specialize=["n", "segs", "SEG", "slots", "heads_all"])
def linear_backward_queries(
    Q, K, V, LD, VALID, DO, OUT, DEN, DD, S, Z, DQ, OWN, OWN_Z, QD,
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
    LD += b * slb + g * slh + start * sln
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
        if NORMALIZE:
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
            dq = dq * start_decay_rows(LD, low, sln, d, count, f, C, DECAY)
        if HAS_KEYS:
            vt = token_columns(V, i, svn, c, count, e).to(TYPE)
            k = key_rows(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID)
            da = tl.dot(half, vt, input_precision=PRECISION)
            if NORM:
                da += dd[:, None]
            if DECAY == 2:
                rows = k.to(tl.float32)
                dq = halved_query_grads(dq, da, rows, LD, low, sln, d, count, f, C, HALVINGS, TYPE, PRECISION)
            else:
                if DECAY == 1:
                    level = chunk_levels(LD, low, sln, count, C)
                    da = da * tl.exp(tl.where(r[:, None] >= r[None, :], level[:, None] - level[None, :], float("-inf")))
                else:
                    da = tl.where(r[:, None] >= r[None, :], da, 0.0)
                dq = tl.dot(da.to(TYPE), k.to(TYPE), dq, input_precision=PRECISION)
        x = token_rows(Q, i, sqn, d, count, f)
        qt = query_features(token_columns(Q, i, sqn, d, count, f), scale, FEATURE)
        if DECAY_GRAD:
            product = query_features(x, scale, FEATURE) * dq
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
            qt = qt * start_decay_columns(LD, low, sln, d, count, f, C, DECAY) * tl.exp(before)[:, None]
            chunk = chunk_decay(LD, low, sln, d, count, f, C, DECAY)
            before += chunk
            st = st * tl.exp(chunk)[None, :]
            z = z * tl.exp(chunk)
            k = k.to(tl.float32) * end_decay_rows(LD, low, sln, d, count, f, C, DECAY)
        own = tl.dot(qt.to(TYPE), half, own, input_precision=PRECISION)
        if NORM:
            own_z += tl.sum(qt * dd[None, :], 1)
        if HAS_KEYS:
            st = tl.dot(vt, k.to(TYPE), st, input_precision=PRECISION)
            if NORM:
                z += tl.sum(k.to(tl.float32), 0)
    at = (bh * (segs + 1) + seg) * f
    tl.store(OWN + at * e + d[:, None] * e + c[None, :], own, mask=inside[:, None] & (c[None, :] < e))
    if NORM:
        tl.store(OWN_Z + at + d, own_z, mask=inside)


@triton.jit
def _key_grads(
    Q, K, V, LD, VALID, DO, DEN, DD, ADJ, ADJ_Z, QD, DOT, DK, DLD,
    sqh, sqn, skn, svn, sln, sdh, sdn,
    scale, n, slots, heads_all, kv_all, G, R, part, seg, bg, bh, start, count,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr,
    FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, HAS_QUERIES: tl.constexpr, DECAY_GRAD: tl.constexpr,
    HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK (b n g f) of one segment and part of the features, and with DECAY_GRAD the gradient of its decays."""
    d = part * BF + tl.arange(0, BF)
    c = tl.arange(0, BE)
    r = tl.arange(0, C)
    inside = d < f
    late = r[None, :] >= r[:, None]  # query i at or behind key j, (j, i)
    at = (bg * slots + seg) * f
    rt = tl.load(ADJ + at * e + d[None, :] * e + c[:, None], mask=inside[None, :] & (c[:, None] < e), other=0.0)
    t = tl.zeros([BF], tl.float32)
    if NORM:
        t = tl.load(ADJ_Z + at + d, mask=inside, other=0.0)
    behind = tl.zeros([BF], tl.float32)  # gradient of the decays of all tokens behind the chunk
    if DECAY_GRAD:
        behind = tl.load(DOT + at + d, mask=inside, other=0.0)
    total = tl.sum(behind, 0)
    chunks = tl.cdiv(count, C)
    for x in range(chunks):
        low = (chunks - 1 - x) * C
        j = low + r
        v = token_rows(V, j, svn, c, count, e).to(TYPE)
        dk = tl.dot(v, rt.to(TYPE), input_precision=PRECISION)
        if NORM:
            dk += t[None, :]
        if DECAY > 0:
            dk = dk * end_decay_rows(LD, low, sln, d, count, f, C, DECAY)
            chunk = chunk_decay(LD, low, sln, d, count, f, C, DECAY)
            rt = rt * tl.exp(chunk)[None, :]
            t = t * tl.exp(chunk)
            share = start_decay_rows(LD, low, sln, d, count, f, C, DECAY)
        if DECAY == 1:
            level = chunk_levels(LD, low, sln, count, C)
            weight = tl.exp(tl.where(late, level[None, :] - level[:, None], float("-inf")))
        products = tl.zeros([C, BF], tl.float32)
        product = tl.zeros([C], tl.float32)
        if HAS_QUERIES:
            for head in range(R):
                dnt = token_columns(DO + head * sdh, j, sdn, c, count, e)
                if NORMALIZE:
                    den = tl.load(DEN + head * n + j, mask=j < count, other=0.0)
                    dnt = dnt.to(tl.float32) * inverse_norm(den)[None, :]
                dnt = dnt.to(TYPE)
                dat = tl.dot(v, dnt, input_precision=PRECISION)
                if NORM:
                    dd = tl.load(DD + head * n + j, mask=j < count, other=0.0)
                    dat += dd[None, :]
                q = query_features(token_rows(Q + head * sqh, j, sqn, d, count, f), scale, FEATURE)
                if DECAY == 2:
                    dk = halved_key_grads(dk, dat, q, LD, low, sln, d, count, f, C, HALVINGS, TYPE, PRECISION)
                else:
                    if DECAY == 1:
                        dat = dat * weight
                    else:
                        dat = tl.where(late, dat, 0.0)
                    dk = tl.dot(dat.to(TYPE), q.to(TYPE), dk, input_precision=PRECISION)
                if DECAY > 0:
                    q = q * share
                rt = tl.dot(dnt, q.to(TYPE), rt, input_precision=PRECISION)
                if NORM:
                    t += tl.sum(q * dd[:, None], 0)
                if DECAY_GRAD:
                    if DECAY == 1:
                        product += tl.load(QD + (part * heads_all + bh + head) * n + start + j, mask=j < count, other=0.0)
                    else:
                        products += token_rows(QD + ((bh + head) * n + start) * f, j, f, d, count, f)
        if DECAY_GRAD:
            k = key_rows(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID).to(tl.float32)
            if DECAY == 1:
                product -= tl.sum(k * dk, 1)
                grad = total + tl.sum(tl.where(late, product[None, :], 0.0), 1)
                total += tl.sum(product, 0)
                tl.store(DLD + (part * kv_all + bg) * n + start + j, grad, mask=j < count)
            else:
                products -= k * dk
                grads = behind[None, :] + tl.cumsum(products, 0, reverse=True)
                behind += tl.sum(products, 0)
                mask = (j[:, None] < count) & inside[None, :]
                tl.store(DLD + (bg * n + start + j[:, None]) * f + d[None, :], grads, mask=mask)
        if FEATURE != 0:
            dk = dk * feature_slope(token_rows(K, j, skn, d, count, f), FEATURE)
        if HAS_VALID:
            dk = tl.where(present(VALID, j, count, HAS_VALID)[:, None], dk, 0.0)
        mask = (j[:, None] < count) & inside[None, :]
        tl.store(DK + j[:, None] * (G * f) + d[None, :], dk.to(DK.dtype.element_ty), mask=mask)


@triton.jit
def _value_grads(
    Q, K, LD, VALID, DO, DEN, ADJ, DV,
    sqh, sqn, skn, sln, sdh, sdn,
    scale, n, slots, G, R, part, seg, bg, count,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr,
    HAS_VALID: tl.constexpr, HAS_QUERIES: tl.constexpr,
    HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DV (b n g e) of one segment and part of the values."""
    d = tl.arange(0, BF)
    c = part * BE + tl.arange(0, BE)
    r = tl.arange(0, C)
    late = r[None, :] >= r[:, None]
    at = (bg * slots + seg) * f
    inside = d < f
    adjoint = tl.load(ADJ + at * e + d[:, None] * e + c[None, :], mask=inside[:, None] & (c[None, :] < e), other=0.0)
    chunks = tl.cdiv(count, C)
    for x in range(chunks):
        low = (chunks - 1 - x) * C
        j = low + r
        k = key_rows(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID)
        last = k
        if DECAY > 0:
            last = k.to(tl.float32) * end_decay_rows(LD, low, sln, d, count, f, C, DECAY)
            chunk = chunk_decay(LD, low, sln, d, count, f, C, DECAY)
            share = start_decay_columns(LD, low, sln, d, count, f, C, DECAY)
        dv = tl.dot(last.to(TYPE), adjoint.to(TYPE), input_precision=PRECISION)
        if DECAY > 0:
            adjoint = adjoint * tl.exp(chunk)[:, None]
        if DECAY == 1:
            level = chunk_levels(LD, low, sln, count, C)
            weight = tl.exp(tl.where(late, level[None, :] - level[:, None], float("-inf")))
        if HAS_QUERIES:
            for head in range(R):
                dn = token_rows(DO + head * sdh, j, sdn, c, count, e)
                if NORMALIZE:
                    den = tl.load(DEN + head * n + j, mask=j < count, other=0.0)
                    dn = dn.to(tl.float32) * inverse_norm(den)[:, None]
                dn = dn.to(TYPE)
                qt = query_features(token_columns(Q + head * sqh, j, sqn, d, count, f), scale, FEATURE)
                if DECAY == 2:
                    rows = k.to(tl.float32)
                    q = query_features(token_rows(Q + head * sqh, j, sqn, d, count, f), scale, FEATURE)
                    a = halved_scores_of_keys(rows, q, qt, LD, low, sln, d, count, f, C, HALVINGS, TYPE, PRECISION)
                else:
                    a = tl.dot(k.to(TYPE), qt.to(TYPE), input_precision=PRECISION)
                    if DECAY == 1:
                        a = a * weight
                    else:
                        a = tl.where(late, a, 0.0)
                dv = tl.dot(a.to(TYPE), dn, dv, input_precision=PRECISION)
                if DECAY > 0:
                    qt = qt * share
                adjoint = tl.dot(qt.to(TYPE), dn, adjoint, input_precision=PRECISION)
        mask = (j[:, None] < count) & (c[None, :] < e)
        tl.store(DV + j[:, None] * (G * e) + c[None, :], dv.to(DV.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "segs", "SEG", "heads_all", "kv_all"])
def linear_backward_keys(
    Q, K, V, LD, VALID, DO, DEN, DD, ADJ, ADJ_Z, QD, DOT, DK, DV, DLD,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, slb, slh, sln, sdb, sdh, sdn,
    scale, n, segs, SEG, heads_all, kv_all, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PF: tl.constexpr, PE: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr,
    FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, HAS_QUERIES: tl.constexpr, DECAY_GRAD: tl.constexpr,
    HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK and DLD, or DV, of one segment and key-value head; the query heads of the latter are added one after the other.

    BF and BE hold all features and all values; a program computes PF of the former or PE of the latter.
    """
    FEATURE_PARTS: tl.constexpr = BF // PF
    PARTS: tl.constexpr = FEATURE_PARTS + BE // PE
    pid = tl.program_id(0)
    part, seg, bg = pid % PARTS, (pid // PARTS) % segs, (pid // PARTS // segs).to(tl.int64)
    G = H // R
    b, g = bg // G, bg % G
    h = g * R
    bh = b * H + h
    start = (seg * SEG).to(tl.int64)
    Q += b * sqb + h * sqh + start * sqn
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    LD += b * slb + g * slh + start * sln
    DO += b * sdb + h * sdh + start * sdn
    VALID += b * n + start
    DEN += bh * n + start
    DD += bh * n + start
    count = tl.minimum(n - seg * SEG, SEG)
    if part < FEATURE_PARTS:
        DK += ((b * n + start) * G + g) * f
        _key_grads(
            Q, K, V, LD, VALID, DO, DEN, DD, ADJ, ADJ_Z, QD, DOT, DK, DLD,
            sqh, sqn, skn, svn, sln, sdh, sdn,
            scale, n, segs + 1, heads_all, kv_all, G, R, part, seg, bg, bh, start, count,
            f, e, PF, BE, C, DECAY, NORM, NORMALIZE, FEATURE, HAS_VALID, HAS_QUERIES, DECAY_GRAD,
            HALVINGS, TYPE, PRECISION,
        )  # fmt: skip
    else:
        DV += ((b * n + start) * G + g) * e
        _value_grads(
            Q, K, LD, VALID, DO, DEN, ADJ, DV,
            sqh, sqn, skn, sln, sdh, sdn,
            scale, n, segs + 1, G, R, part - FEATURE_PARTS, seg, bg, count,
            f, e, BF, PE, C, DECAY, NORMALIZE, FEATURE, HAS_VALID, HAS_QUERIES, HALVINGS, TYPE, PRECISION,
        )  # fmt: skip
