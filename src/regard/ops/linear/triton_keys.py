"""Triton kernels for the gradients of keys, values and decays in linear attention: see `triton_queries.py` for the formulas."""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import tile_grads, tile_scores
from regard.ops.linear.triton_queries import query_grads
from regard.ops.linear.triton_tiles import (
    apply_feature,
    exp_of,
    feature_slope,
    gate_slope,
    key_rows,
    level_at,
    level_columns,
    level_rows,
    norm_grad,
    one_level,
    output_factor,
    prefix_rows,
    present,
    token_columns,
    token_levels,
    token_rows,
)


@triton.jit
def _key_grads(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, ADJ, ADJ_Z, DK, KD,
    sqh, sqn, skn, svn, sln, sdh, sdn,
    scale, part, bg, at, start, low, count, n, kv_all, wide, G, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
    HAS_QUERIES: tl.constexpr, HAS_ADJOINT: tl.constexpr, DECAY_GRAD: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK (b n g f of wide) of one tile and part of the features; ADJ, ADJ_Z: the adjoint behind its segment, at row `at`.

    With DECAY_GRAD KD gets k . dk: (parts b g n), or (b g n f) for a decay per feature.
    """
    d = part * BF + tl.arange(0, BF)
    c = tl.arange(0, BE)
    r = tl.arange(0, C)
    j = low + r
    last = tl.minimum(low + C, count) - 1
    v = token_rows(V, j, svn, c, count, e).to(TYPE)
    dk = tl.zeros([C, BF], tl.float32)
    if HAS_ADJOINT:
        rt = tl.load(ADJ + at * e + d[None, :] * e + c[:, None], mask=(d[None, :] < f) & (c[:, None] < e), other=0.0)
        dk = tl.dot(v, rt.to(TYPE), dk, input_precision=PRECISION)
        if NORM:
            dk += tl.load(ADJ_Z + at + d, mask=d < f, other=0.0)[None, :]
        share = 1.0 / scale + tl.zeros([BF], tl.float32)  # the scale of the queries is applied to results alone
        if DECAY > 0:
            behind = level_at(LEVEL, count - 1, sln, d, f, DECAY) - level_at(LEVEL, last, sln, d, f, DECAY)
            share = share * exp_of(behind)
        dk = dk * share[None, :]
    if DECAY == 1:
        level = token_levels(LEVEL, j, sln, count)
        end = one_level(LEVEL, last, sln)
    if DECAY == 2:
        ends = level_at(LEVEL, last, sln, d, f, DECAY)
    if HAS_QUERIES:
        tiles = tl.cdiv(count, C) - 1 - low // C
        for x in range(tiles * R):
            head = x // tiles
            i = low + C + (x % tiles) * C + r
            dnt = token_columns(DO + head * sdh, i, sdn, c, count, e)
            if NORMALIZE != 0:
                dnt = dnt.to(tl.float32) * output_factor(DEN + head * n, i, count, 1.0, NORMALIZE)[None, :]
            dat = tl.dot(v, dnt.to(TYPE), input_precision=PRECISION)
            if NORM:
                dat += norm_grad(DD + head * n, DEN + head * n, i, count, NORMALIZE)[None, :]
            if DECAY == 1:
                dat = dat * exp_of(token_levels(LEVEL, i, sln, count) - end)[None, :]
            q = apply_feature(token_rows(Q + head * sqh, i, sqn, d, count, f), FEATURE)
            if DECAY == 2:
                q = q.to(tl.float32) * exp_of(level_rows(LEVEL, i, sln, d, count, f) - ends[None, :])
            dk = tl.dot(dat.to(TYPE), q.to(TYPE), dk, input_precision=PRECISION)
    if DECAY == 1:
        dk = dk * exp_of(end - level)[:, None]
    if DECAY == 2:
        dk = dk * exp_of(ends[None, :] - level_rows(LEVEL, j, sln, d, count, f))
    if HAS_QUERIES:
        late = r[None, :] >= r[:, None]  # query i at or behind key j, (j, i)
        for head in range(R):
            dnt = token_columns(DO + head * sdh, j, sdn, c, count, e)
            if NORMALIZE != 0:
                dnt = dnt.to(tl.float32) * output_factor(DEN + head * n, j, count, 1.0, NORMALIZE)[None, :]
            dat = tl.dot(v, dnt.to(TYPE), input_precision=PRECISION)
            if NORM:
                dat += norm_grad(DD + head * n, DEN + head * n, j, count, NORMALIZE)[None, :]
            q = apply_feature(token_rows(Q + head * sqh, j, sqn, d, count, f), FEATURE)
            if DECAY == 2:
                dk = tile_grads(dk, dat, q.to(tl.float32), LEVEL, low, sln, d, count, f, C, True, TYPE, PRECISION)
            else:
                if DECAY == 1:
                    dat = dat * exp_of(tl.where(late, level[None, :] - level[:, None], float("-inf")))
                else:
                    dat = tl.where(late, dat, 0.0)
                dk = tl.dot(dat.to(TYPE), q.to(TYPE), dk, input_precision=PRECISION)
    dk = dk * scale
    mask = (j[:, None] < count) & (d[None, :] < f)
    if DECAY_GRAD:
        product = key_rows(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID).to(tl.float32) * dk
        if DECAY == 1:
            tl.store(KD + (part * kv_all + bg) * n + start + j, tl.sum(product, 1), mask=j < count)
        else:
            tl.store(KD + (bg * n + start + j[:, None]) * f + d[None, :], product, mask=mask)
    if FEATURE != 0:
        dk = dk * feature_slope(token_rows(K, j, skn, d, count, f), FEATURE)
    if HAS_VALID:
        dk = tl.where(present(VALID, j, count, HAS_VALID)[:, None], dk, 0.0)
    tl.store(DK + j[:, None] * (G * wide) + d[None, :], dk.to(DK.dtype.element_ty), mask=mask)


@triton.jit
def _value_grads(
    Q, K, LEVEL, VALID, DO, DEN, ADJ, DV,
    sqh, sqn, skn, sln, sdh, sdn,
    scale, part, at, low, count, n, G, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NORMALIZE: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
    HAS_QUERIES: tl.constexpr, HAS_ADJOINT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DV (b n g e) of one tile and part of the values; ADJ: the adjoint behind its segment, at row `at`."""
    d = tl.arange(0, BF)
    c = part * BE + tl.arange(0, BE)
    r = tl.arange(0, C)
    j = low + r
    last = tl.minimum(low + C, count) - 1
    k = key_rows(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID)
    early = k
    if DECAY == 1:
        level = token_levels(LEVEL, j, sln, count)
        end = one_level(LEVEL, last, sln)
    if DECAY == 2:
        ends = level_at(LEVEL, last, sln, d, f, DECAY)
        early = k.to(tl.float32) * exp_of(ends[None, :] - level_rows(LEVEL, j, sln, d, count, f))
    keys = early.to(TYPE)
    dv = tl.zeros([C, BE], tl.float32)
    if HAS_ADJOINT:
        adjoint = tl.load(ADJ + at * e + d[:, None] * e + c[None, :], mask=(d[:, None] < f) & (c[None, :] < e), other=0.0)
        if DECAY == 2:
            behind = level_at(LEVEL, count - 1, sln, d, f, DECAY)
            adjoint = adjoint.to(tl.float32) * exp_of(behind - ends)[:, None]
        dv = tl.dot(keys, adjoint.to(TYPE), dv, input_precision=PRECISION)
        dv = dv * (1.0 / scale)
        if DECAY == 1:
            dv = dv * exp_of(one_level(LEVEL, count - 1, sln) - end)
    if HAS_QUERIES:
        tiles = tl.cdiv(count, C) - 1 - low // C
        for x in range(tiles * R):
            head = x // tiles
            i = low + C + (x % tiles) * C + r
            qt = apply_feature(token_columns(Q + head * sqh, i, sqn, d, count, f), FEATURE)
            if DECAY == 2:
                qt = qt.to(tl.float32) * exp_of(level_columns(LEVEL, i, sln, d, count, f) - ends[:, None])
            a = tl.dot(keys, qt.to(TYPE), input_precision=PRECISION)
            if DECAY == 1:
                a = a * exp_of(token_levels(LEVEL, i, sln, count) - end)[None, :]
            dn = token_rows(DO + head * sdh, i, sdn, c, count, e)
            if NORMALIZE != 0:
                dn = dn.to(tl.float32) * output_factor(DEN + head * n, i, count, 1.0, NORMALIZE)[:, None]
            dv = tl.dot(a.to(TYPE), dn.to(TYPE), dv, input_precision=PRECISION)
    if DECAY == 1:
        dv = dv * exp_of(end - level)[:, None]
    if HAS_QUERIES:
        late = r[None, :] >= r[:, None]
        for head in range(R):
            if DECAY == 2:
                q = apply_feature(token_rows(Q + head * sqh, j, sqn, d, count, f), FEATURE).to(tl.float32)
                a = tile_scores(q, k.to(tl.float32), LEVEL, low, sln, d, count, f, C, True, TYPE, PRECISION)
            else:
                qt = apply_feature(token_columns(Q + head * sqh, j, sqn, d, count, f), FEATURE)
                a = tl.dot(keys, qt.to(TYPE), input_precision=PRECISION)
                if DECAY == 1:
                    a = a * exp_of(tl.where(late, level[None, :] - level[:, None], float("-inf")))
                else:
                    a = tl.where(late, a, 0.0)
            dn = token_rows(DO + head * sdh, j, sdn, c, count, e)
            if NORMALIZE != 0:
                dn = dn.to(tl.float32) * output_factor(DEN + head * n, j, count, 1.0, NORMALIZE)[:, None]
            dv = tl.dot(a.to(TYPE), dn.to(TYPE), dv, input_precision=PRECISION)
    dv = dv * scale
    mask = (j[:, None] < count) & (c[None, :] < e)
    tl.store(DV + j[:, None] * (G * e) + c[None, :], dv.to(DV.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "tiles", "SEG", "slots", "behind", "heads_all", "kv_all"])
def linear_gradients(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, S, Z, ADJ, ADJ_Z, DQ, DK, DV, QD, KD,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, slb, slh, sln, sdb, sdh, sdn,
    scale, n, tiles, SEG, slots, behind, heads_all, kv_all, wide, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, PF: tl.constexpr, PE: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr,
    HAS_VALID: tl.constexpr, HAS_QUERIES: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_ADJOINT: tl.constexpr, DECAY_GRAD: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DQ, or DK, or DV of one tile: the programs of a tile and key-value head are neighbours.

    BF and BE hold all features and all values; a program computes PF of the former or PE of the latter. R query heads read one
    key-value head, and their gradients are added one after the other. There are `slots` states before segments and `behind`
    adjoints behind them, one where it is the same for all; without HAS_STATE or HAS_ADJOINT they are 0. A row of DK has room for
    `wide` numbers.
    """
    FEATURE_PARTS: tl.constexpr = BF // PF
    VALUE_PARTS: tl.constexpr = BE // PE
    queries = R * FEATURE_PARTS if HAS_QUERIES else 0
    parts = queries + (FEATURE_PARTS + VALUE_PARTS if HAS_KEYS else 0)
    pid = tl.program_id(0)
    part, tile, bg = pid % parts, (pid // parts) % tiles, (pid // parts // tiles).to(tl.int64)
    G = H // R
    b, g = bg // G, bg % G
    seg = tile * C // SEG
    low = tile * C - seg * SEG
    start = (seg * SEG).to(tl.int64)
    count = tl.minimum(n - seg * SEG, SEG)
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    LEVEL += b * slb + g * slh + start * sln
    VALID += b * n + start
    if part < queries:
        h = g * R + part // FEATURE_PARTS
        bh = b * H + h
        at = bg * slots * f
        if HAS_KEYS:
            at += seg * f
        query_grads(
            Q + b * sqb + h * sqh + start * sqn, K, V, LEVEL, VALID, DO + b * sdb + h * sdh + start * sdn,
            DEN + bh * n + start, DD + bh * n + start, S, Z, DQ + ((b * n + start) * H + h) * f, QD,
            sqn, skn, svn, sln, sdn, scale, part % FEATURE_PARTS, bh, at, start, low, count, n, heads_all, H,
            f, e, PF, BE, C, DECAY, NORM, NORMALIZE, FEATURE, HAS_VALID, HAS_KEYS, HAS_STATE, DECAY_GRAD, TYPE, PRECISION,
        )  # fmt: skip
    else:
        if HAS_KEYS:
            part = part - queries
            h = g * R
            bh = b * H + h
            Q += b * sqb + h * sqh + start * sqn
            DO += b * sdb + h * sdh + start * sdn
            DEN += bh * n + start
            at = (bg * behind + tl.minimum(seg, behind - 1)) * f
            if part < FEATURE_PARTS:
                _key_grads(
                    Q, K, V, LEVEL, VALID, DO, DEN, DD + bh * n + start, ADJ, ADJ_Z,
                    DK + ((b * n + start) * G + g) * wide, KD,
                    sqh, sqn, skn, svn, sln, sdh, sdn, scale, part, bg, at, start, low, count, n, kv_all, wide, G, R,
                    f, e, PF, BE, C, DECAY, NORM, NORMALIZE, FEATURE, HAS_VALID, HAS_QUERIES, HAS_ADJOINT, DECAY_GRAD,
                    TYPE, PRECISION,
                )  # fmt: skip
            else:
                _value_grads(
                    Q, K, LEVEL, VALID, DO, DEN, ADJ, DV + ((b * n + start) * G + g) * e,
                    sqh, sqn, skn, sln, sdh, sdn, scale, part - FEATURE_PARTS, at, low, count, n, G, R,
                    f, e, BF, PE, C, DECAY, NORMALIZE, FEATURE, HAS_VALID, HAS_QUERIES, HAS_ADJOINT, TYPE, PRECISION,
                )  # fmt: skip


@triton.jit(do_not_specialize=["n", "segs", "SEG", "heads_all", "kv_all"])
def linear_decay_grads(
    QD, KD, DOT, GATE, VALID, DLD,
    sgb, sgh, sgn, sdb, sdh, sdn, gate_root, n, segs, SEG, heads_all, kv_all, G, R, PARTS,
    f: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, HAS_VALID: tl.constexpr,
    HAS_QUERIES: tl.constexpr, GATES: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Compute DLD (b g n 1) or (b g n f), the gradient of decays or gates: sums of q . dq - k . dk from the end of a segment.

    DECAY 1: QD and KD come in PARTS sums over some of the features. DECAY 2: a program has BF features.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(f, BF) if DECAY == 2 else 1
    part, seg, bg = pid % blocks, (pid // blocks) % segs, (pid // blocks // segs).to(tl.int64)
    b, g = bg // G, bg % G
    start = (seg * SEG).to(tl.int64)
    count = tl.minimum(n - seg * SEG, SEG)
    VALID += b * n + start
    DLD += b * sdb + g * sdh + start * sdn
    GATE += b * sgb + g * sgh + start * sgn
    bh = (b * G + g) * R
    d = part * BF + tl.arange(0, BF)
    at = (bg * (segs + 1) + seg) * f
    behind = tl.load(DOT + at + d, mask=d < f, other=0.0)  # gradient of the decays of all tokens behind
    if DECAY == 1:
        for y in range(BF, f, BF):
            behind += tl.load(DOT + at + y + d, mask=y + d < f, other=0.0)
        behind = tl.where(d == 0, tl.sum(behind, 0), 0.0)
    chunks = tl.cdiv(count, C)
    for x in range(chunks):
        j = (chunks - 1 - x) * C + tl.arange(0, C)
        if DECAY == 1:
            mask = (j[:, None] < count) & (d[None, :] == 0)
            product = tl.zeros([C, BF], tl.float32)
            for y in range(PARTS):
                product -= tl.load(KD + (y * kv_all + bg) * n + start + j[:, None] + d[None, :], mask=mask, other=0.0)
                if HAS_QUERIES:
                    for head in range(R):
                        here = QD + (y * heads_all + bh + head) * n + start
                        product += tl.load(here + j[:, None] + d[None, :], mask=mask, other=0.0)
        else:
            mask = (j[:, None] < count) & (d[None, :] < f)
            product = -tl.load(KD + (bg * n + start + j[:, None]) * f + d[None, :], mask=mask, other=0.0)
            if HAS_QUERIES:
                for head in range(R):
                    here = QD + ((bh + head) * n + start) * f
                    product += tl.load(here + j[:, None] * f + d[None, :], mask=mask, other=0.0)
        grads = behind[None, :] + prefix_rows(product, True, TYPE)
        behind += tl.sum(product, 0)
        if GATES:
            gates = tl.load(GATE + j[:, None] * sgn + d[None, :], mask=mask, other=0.0).to(tl.float32)
            there = present(VALID, j, count, HAS_VALID)[:, None]
            grads = tl.where(there, grads * gate_slope(gates, gate_root), 0.0)
        tl.store(DLD + j[:, None] * sdn + d[None, :], grads.to(DLD.dtype.element_ty), mask=mask)
