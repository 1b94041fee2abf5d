"""The Triton kernel for gradients of keys, values and decays in linear attention: see `triton_queries.py` for the formulas."""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import halved_key_grads, halved_scores_of_keys
from regard.ops.linear.triton_tiles import (
    apply_feature,
    chunk_decay,
    chunk_levels,
    end_decay_rows,
    feature_slope,
    gate_slope,
    key_rows,
    output_factor,
    present,
    start_decay_columns,
    start_decay_rows,
    token_columns,
    token_rows,
)


@triton.jit
def _key_grads(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, ADJ, ADJ_Z, QD, DOT, DK, DLD, GATE,
    sqh, sqn, skn, svn, sln, sdh, sdn, sgn,
    scale, gate_root, n, slots, heads_all, kv_all, G, R, part, seg, bg, bh, start, count,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr,
    FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, HAS_QUERIES: tl.constexpr, DECAY_GRAD: tl.constexpr,
    GATES: tl.constexpr, CUMSUM: tl.constexpr, HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK (b n g f) of one segment and part of the features, and with DECAY_GRAD the gradient of its decays."""
    d = part * BF + tl.arange(0, BF)
    c = tl.arange(0, BE)
    r = tl.arange(0, C)
    inside = d < f
    late = r[None, :] >= r[:, None]  # query i at or behind key j, (j, i)
    at = (bg * slots + seg) * f
    rt = tl.load(ADJ + at * e + d[None, :] * e + c[:, None], mask=inside[None, :] & (c[:, None] < e), other=0.0)
    rt = rt * (1.0 / scale)  # the scale of the queries is applied to results alone
    t = tl.zeros([BF], tl.float32)
    if NORM:
        t = tl.load(ADJ_Z + at + d, mask=inside, other=0.0) * (1.0 / scale)
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
            dk = dk * end_decay_rows(LEVEL, low, sln, d, count, f, C, DECAY)
            chunk = chunk_decay(LEVEL, low, sln, d, count, f, C, DECAY)
            rt = rt * tl.exp(chunk)[None, :]
            t = t * tl.exp(chunk)
            share = start_decay_rows(LEVEL, low, sln, d, count, f, C, DECAY)
        if DECAY == 1:
            level = chunk_levels(LEVEL, low, sln, count, C)
            weight = tl.exp(tl.where(late, level[None, :] - level[:, None], float("-inf")))
        products = tl.zeros([C, BF], tl.float32)
        product = tl.zeros([C], tl.float32)
        if HAS_QUERIES:
            for head in range(R):
                dnt = token_columns(DO + head * sdh, j, sdn, c, count, e)
                if NORMALIZE != 0:
                    factor = output_factor(DEN + head * n, j, count, 1.0, NORMALIZE)
                    dnt = dnt.to(tl.float32) * factor[None, :]
                dnt = dnt.to(TYPE)
                dat = tl.dot(v, dnt, input_precision=PRECISION)
                if NORM:
                    dd = tl.load(DD + head * n + j, mask=j < count, other=0.0)
                    dat += dd[None, :]
                q = apply_feature(token_rows(Q + head * sqh, j, sqn, d, count, f), FEATURE)
                if DECAY == 2:
                    dk = halved_key_grads(dk, dat, q.to(tl.float32), LEVEL, low, sln, d, count, f, C, HALVINGS, TYPE, PRECISION)
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
                    t += tl.sum(q.to(tl.float32) * dd[:, None], 0)
                if DECAY_GRAD:
                    if DECAY == 1:
                        product += tl.load(QD + (part * heads_all + bh + head) * n + start + j, mask=j < count, other=0.0)
                    else:
                        products += token_rows(QD + ((bh + head) * n + start) * f, j, f, d, count, f)
        dk = dk * scale
        if DECAY_GRAD:
            k = key_rows(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID).to(tl.float32)
            if DECAY == 1:
                product -= tl.sum(k * dk, 1)
                if CUMSUM:
                    grad = total + tl.cumsum(product, 0, reverse=True)
                else:
                    grad = total + tl.sum(tl.where(late, product[None, :], 0.0), 1)
                total += tl.sum(product, 0)
                if GATES:
                    gate = tl.load(GATE + j * sgn, mask=j < count, other=0.0).to(tl.float32)
                    grad = tl.where(present(VALID, j, count, HAS_VALID), grad * gate_slope(gate, gate_root), 0.0)
                tl.store(DLD + (part * kv_all + bg) * n + start + j, grad.to(DLD.dtype.element_ty), mask=j < count)
            else:
                products -= k * dk
                grads = behind[None, :] + tl.cumsum(products, 0, reverse=True)
                behind += tl.sum(products, 0)
                mask = (j[:, None] < count) & inside[None, :]
                if GATES:
                    gates = token_rows(GATE, j, sgn, d, count, f).to(tl.float32)
                    there = present(VALID, j, count, HAS_VALID)[:, None]
                    grads = tl.where(there, grads * gate_slope(gates, gate_root), 0.0)
                into = DLD + (bg * n + start + j[:, None]) * f + d[None, :]
                tl.store(into, grads.to(DLD.dtype.element_ty), mask=mask)
        if FEATURE != 0:
            dk = dk * feature_slope(token_rows(K, j, skn, d, count, f), FEATURE)
        if HAS_VALID:
            dk = tl.where(present(VALID, j, count, HAS_VALID)[:, None], dk, 0.0)
        mask = (j[:, None] < count) & inside[None, :]
        tl.store(DK + j[:, None] * (G * f) + d[None, :], dk.to(DK.dtype.element_ty), mask=mask)


@triton.jit
def _value_grads(
    Q, K, LEVEL, VALID, DO, DEN, ADJ, DV,
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
    adjoint = adjoint * (1.0 / scale)
    chunks = tl.cdiv(count, C)
    for x in range(chunks):
        low = (chunks - 1 - x) * C
        j = low + r
        k = key_rows(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID)
        last = k
        if DECAY == 2:
            last = k.to(tl.float32) * end_decay_rows(LEVEL, low, sln, d, count, f, C, DECAY)
        if DECAY > 0:
            chunk = chunk_decay(LEVEL, low, sln, d, count, f, C, DECAY)
            share = start_decay_columns(LEVEL, low, sln, d, count, f, C, DECAY)
        dv = tl.dot(last.to(TYPE), adjoint.to(TYPE), input_precision=PRECISION)
        if DECAY > 0:
            adjoint = adjoint * tl.exp(chunk)[:, None]
        if DECAY == 1:
            dv = dv * end_decay_rows(LEVEL, low, sln, d, count, f, C, DECAY)
            level = chunk_levels(LEVEL, low, sln, count, C)
            weight = tl.exp(tl.where(late, level[None, :] - level[:, None], float("-inf")))
        if HAS_QUERIES:
            for head in range(R):
                dn = token_rows(DO + head * sdh, j, sdn, c, count, e)
                if NORMALIZE != 0:
                    factor = output_factor(DEN + head * n, j, count, 1.0, NORMALIZE)
                    dn = dn.to(tl.float32) * factor[:, None]
                dn = dn.to(TYPE)
                qt = apply_feature(token_columns(Q + head * sqh, j, sqn, d, count, f), FEATURE)
                if DECAY == 2:
                    rows = k.to(tl.float32)
                    q = apply_feature(token_rows(Q + head * sqh, j, sqn, d, count, f), FEATURE).to(tl.float32)
                    a = halved_scores_of_keys(rows, q, LEVEL, low, sln, d, count, f, C, HALVINGS, TYPE, PRECISION)
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
        dv = dv * scale
        mask = (j[:, None] < count) & (c[None, :] < e)
        tl.store(DV + j[:, None] * (G * e) + c[None, :], dv.to(DV.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "segs", "SEG", "heads_all", "kv_all"])
def linear_backward_keys(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, ADJ, ADJ_Z, QD, DOT, DK, DV, DLD, GATE,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, slb, slh, sln, sdb, sdh, sdn, sgb, sgh, sgn,
    scale, gate_root, n, segs, SEG, heads_all, kv_all, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PF: tl.constexpr, PE: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr,
    FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, HAS_QUERIES: tl.constexpr, DECAY_GRAD: tl.constexpr,
    GATES: tl.constexpr, CUMSUM: tl.constexpr, HALVINGS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK and DLD, or DV, of one segment and key-value head; the query heads of the latter are added one after the other.

    BF and BE hold all features and all values; a program computes PF of the former or PE of the latter.
    CUMSUM: `tl.cumsum` of vectors may be used, which fails beside other sums for some numbers of warps.
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
    LEVEL += b * slb + g * slh + start * sln
    DO += b * sdb + h * sdh + start * sdn
    VALID += b * n + start
    GATE += b * sgb + g * sgh + start * sgn
    DEN += bh * n + start
    DD += bh * n + start
    count = tl.minimum(n - seg * SEG, SEG)
    if part < FEATURE_PARTS:
        DK += ((b * n + start) * G + g) * f
        _key_grads(
            Q, K, V, LEVEL, VALID, DO, DEN, DD, ADJ, ADJ_Z, QD, DOT, DK, DLD, GATE,
            sqh, sqn, skn, svn, sln, sdh, sdn, sgn,
            scale, gate_root, n, segs + 1, heads_all, kv_all, G, R, part, seg, bg, bh, start, count,
            f, e, PF, BE, C, DECAY, NORM, NORMALIZE, FEATURE, HAS_VALID, HAS_QUERIES, DECAY_GRAD, GATES, CUMSUM,
            HALVINGS, TYPE, PRECISION,
        )  # fmt: skip
    else:
        DV += ((b * n + start) * G + g) * e
        _value_grads(
            Q, K, LEVEL, VALID, DO, DEN, ADJ, DV,
            sqh, sqn, skn, sln, sdh, sdn,
            scale, n, segs + 1, G, R, part - FEATURE_PARTS, seg, bg, count,
            f, e, BF, PE, C, DECAY, NORMALIZE, FEATURE, HAS_VALID, HAS_QUERIES, HALVINGS, TYPE, PRECISION,
        )  # fmt: skip
