"""Triton kernel that walks along a segment for the gradients of linear attention: forwards for dq, backwards for dk and dv.

What a walk is, how it treats decays and why operands have their places is in `triton_walk.py`; formulas are those of
`triton_queries.py`.
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import halved_grads
from regard.ops.linear.triton_tiles import (
    apply_feature,
    exp_of,
    feature_slope,
    output_factor,
    present,
    token_rows,
)
from regard.ops.linear.triton_walk import (
    is_narrow,
    pair_decay,
    sums_of_tile,
    tile_borders,
    walked_keys,
    walked_levels,
    walked_scores,
)


@triton.jit
def _tile_grads(
    total, weights, other, x, own, LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NARROW: tl.constexpr, OF_KEYS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (total + sum_j weights_ij other_j) own_i over keys j <= i, the gradient of queries i.

    OF_KEYS: that of keys, with weights (j, i). other, own: keys and the decay of queries as `walked_scores` takes them; x: keys
    without a decay.
    """
    i = low + tl.arange(0, C)
    seen = i[None, :] >= i[:, None] if OF_KEYS else i[:, None] >= i[None, :]
    if NARROW or DECAY == 0:
        masked = tl.where(seen, weights, 0.0).to(TYPE)
        total = tl.dot(masked, other, total, input_precision=PRECISION)
        if DECAY != 0:
            total = total * own
    elif DECAY == 1:
        weights = weights * pair_decay(LEVEL, i, stride, count, OF_KEYS)
        total = tl.dot(weights.to(TYPE), x.to(TYPE), total * own, input_precision=PRECISION)
    else:
        total = halved_grads(
            total * own, weights, x.to(tl.float32), LEVEL, low, stride, d, count, f, C, OF_KEYS, TYPE, PRECISION
        )  # fmt: skip
    return total


@triton.jit
def _query_tile(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, TZ, DQ, QD, s, z,
    sqn, skn, svn, sln, sdn, scale, low, bh, start, count, n, H,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NARROW: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
    TILE_NORMS: tl.constexpr, DECAY_GRAD: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dq of one tile and return the transposed state (e f) and its norm behind the tile."""
    d = tl.arange(0, BF)
    c = tl.arange(0, BE)
    i = low + tl.arange(0, C)
    do = token_rows(DO, i, sdn, c, count, e).to(TYPE)
    v = token_rows(V, i, svn, c, count, e).to(TYPE)
    k = walked_keys(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID)
    factor = output_factor(DEN, i, count, scale, NORMALIZE) if NORMALIZE != 0 else scale  # loaded long before they are needed
    if FEATURE != 0 or DECAY_GRAD:
        x = token_rows(Q, i, sqn, d, count, f)
    if NORM:
        dd = tl.load(DD + i, mask=i < count, other=0.0)
    early, own = k, 1.0
    if DECAY > 0:
        level = walked_levels(LEVEL, i, sln, d, count, f, DECAY)
        before, queries_from, keys_from, end = tile_borders(LEVEL, low, sln, d, count, f, C, DECAY, NARROW)
        own = exp_of(level - queries_from[None, :])
        early = k.to(tl.float32) * exp_of(keys_from[None, :] - level)
        s = s * exp_of(queries_from - before)[None, :]
        z = z * exp_of(queries_from - before)
    if NORM and not TILE_NORMS:
        added = tl.sum(early.to(tl.float32), 0)
    da = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    dq = tl.dot(do, s.to(TYPE), input_precision=PRECISION)
    if NORM:
        da += dd[:, None]
        dq += dd[:, None] * z[None, :]
    dq = _tile_grads(dq, da, early.to(TYPE), k, own, LEVEL, low, sln, d, count, f, C, DECAY, NARROW, False, TYPE, PRECISION)
    if DECAY > 0 and not NARROW:
        s = s * exp_of(end - before)[None, :]
        z = z * exp_of(end - before)
    s = tl.dot(tl.trans(v), early.to(TYPE), s, input_precision=PRECISION)
    if TILE_NORMS:
        z += sums_of_tile(TZ, low, d, f, C)
    elif NORM:
        z += added
    if DECAY > 0 and NARROW:
        s = s * exp_of(end - keys_from)[None, :]
        z = z * exp_of(end - keys_from)
    if NORMALIZE != 0:
        dq = dq * factor[:, None]
    else:
        dq = dq * factor
    mask = (i[:, None] < count) & (d[None, :] < f)
    if FEATURE != 0 or DECAY_GRAD:
        if DECAY_GRAD:
            product = apply_feature(x, FEATURE) * dq
            if DECAY == 1:
                tl.store(QD + bh * n + start + i, tl.sum(product, 1), mask=i < count)
            else:
                tl.store(QD + (bh * n + start + i[:, None]) * f + d[None, :], product, mask=mask)
        if FEATURE != 0:
            dq = dq * feature_slope(x, FEATURE)
    tl.store(DQ + i[:, None] * (H * f) + d[None, :], dq.to(DQ.dtype.element_ty), mask=mask)
    return s, z


@triton.jit
def _walk_queries(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, S, Z, TZ, DQ, QD,
    sqn, skn, svn, sln, sdn,
    scale, bh, at, start, count, n, H,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
    HAS_STATE: tl.constexpr, TILE_NORMS: tl.constexpr, DECAY_GRAD: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DQ (b n h f) of one segment and head; S, Z: the state before the segment, at row `at`.

    With DECAY_GRAD QD gets q . dq: (b h n), or (b h n f) for a decay per feature.
    """
    d = tl.arange(0, BF)
    c = tl.arange(0, BE)
    s = tl.zeros([BE, BF], tl.float32)
    z = tl.zeros([BF], tl.float32)
    if HAS_STATE:
        mask = (d[None, :] < f) & (c[:, None] < e)
        s += tl.load(S + at * e + d[None, :] * e + c[:, None], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            z += tl.load(Z + at + d, mask=d < f, other=0.0).to(tl.float32)
    narrow = True
    if DECAY > 0:
        narrow = is_narrow(LEVEL, sln, d, count, f, C, DECAY)
    if narrow:
        for low in range(0, count, C):
            s, z = _query_tile(
                Q, K, V, LEVEL, VALID, DO, DEN, DD, TZ, DQ, QD, s, z,
                sqn, skn, svn, sln, sdn, scale, low, bh, start, count, n, H,
                f, e, BF, BE, C, DECAY, True, NORM, NORMALIZE, FEATURE, HAS_VALID, TILE_NORMS, DECAY_GRAD, TYPE, PRECISION,
            )  # fmt: skip
    else:
        for low in range(0, count, C):
            s, z = _query_tile(
                Q, K, V, LEVEL, VALID, DO, DEN, DD, TZ, DQ, QD, s, z,
                sqn, skn, svn, sln, sdn, scale, low, bh, start, count, n, H,
                f, e, BF, BE, C, DECAY, False, NORM, NORMALIZE, FEATURE, HAS_VALID, TILE_NORMS, DECAY_GRAD, TYPE, PRECISION,
            )  # fmt: skip


@triton.jit
def _key_tile(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, TA, DK, DV, KD, s, z,
    sqh, sqn, skn, svn, sln, sdh, sdn, scale, low, bg, start, count, n, tiles, wide, G, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NARROW: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
    TILE_NORMS: tl.constexpr, DECAY_GRAD: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one tile and return the transposed adjoint (e f) and its norm before the tile.

    Factors of outputs are given to the queries, so that the gradients of outputs stay as they are.
    """
    d = tl.arange(0, BF)
    c = tl.arange(0, BE)
    j = low + tl.arange(0, C)
    k = walked_keys(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID)
    if KEYS and FEATURE != 0:
        x = token_rows(K, j, skn, d, count, f)  # loaded long before it is needed
    early, own, up = k, 1.0, 1.0
    if DECAY > 0:
        level = walked_levels(LEVEL, j, sln, d, count, f, DECAY)
        before, queries_from, keys_from, end = tile_borders(LEVEL, low, sln, d, count, f, C, DECAY, NARROW)
        up = exp_of(level - queries_from[None, :])
        own = exp_of(keys_from[None, :] - level)
        early = k.to(tl.float32) * own
        s = s * exp_of(end - keys_from)[None, :]
        z = z * exp_of(end - keys_from)
    half = s.to(TYPE)
    if KEYS:
        v = token_rows(V, j, svn, c, count, e).to(TYPE)
        dk = tl.dot(v, half, input_precision=PRECISION)
        if NORM:
            dk += z[None, :]
        if DECAY > 0 and not NARROW:
            dk = dk * own  # what follows is added without it
    if VALUES:
        dv = tl.dot(early.to(TYPE), tl.trans(half), input_precision=PRECISION)
    if DECAY > 0 and not NARROW:
        s = s * exp_of(end - before)[None, :]
        z = z * exp_of(end - before)
    for head in range(R):
        do = token_rows(DO + head * sdh, j, sdn, c, count, e).to(TYPE)
        q = apply_feature(token_rows(Q + head * sqh, j, sqn, d, count, f), FEATURE)
        if NORMALIZE != 0:
            q = q.to(tl.float32) * output_factor(DEN + head * n, j, count, 1.0, NORMALIZE)[:, None]
        late = q
        if DECAY > 0:
            late = q.to(tl.float32) * up
        queries = late.to(TYPE)
        if KEYS and NORM:
            dd = tl.load(DD + head * n + j, mask=j < count, other=0.0)
            if TILE_NORMS:
                z += sums_of_tile(TA + head * tiles * f, low, d, f, C)
            else:
                z += tl.sum(late.to(tl.float32) * dd[:, None], 0)
        if VALUES:
            a = walked_scores(
                queries, early.to(TYPE), q, k, LEVEL, low, sln, d, count, f, C, DECAY, NARROW, True, TYPE, PRECISION
            )  # fmt: skip
            dv = tl.dot(a.to(TYPE), do, dv, input_precision=PRECISION)
        if KEYS:
            da = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            if NORM:
                da += dd[None, :]
            dk = _tile_grads(dk, da, queries, q, 1.0, LEVEL, low, sln, d, count, f, C, DECAY, NARROW, True, TYPE, PRECISION)
        s = tl.dot(tl.trans(do), queries, s, input_precision=PRECISION)
    if DECAY > 0 and NARROW:
        s = s * exp_of(queries_from - before)[None, :]
        z = z * exp_of(queries_from - before)
    if VALUES:
        mask = (j[:, None] < count) & (c[None, :] < e)
        tl.store(DV + j[:, None] * (G * e) + c[None, :], (dv * scale).to(DV.dtype.element_ty), mask=mask)
    if KEYS:
        dk = dk * scale
        if DECAY > 0 and NARROW:
            dk = dk * own
        mask = (j[:, None] < count) & (d[None, :] < f)
        if DECAY_GRAD:
            product = k.to(tl.float32) * dk
            if DECAY == 1:
                tl.store(KD + bg * n + start + j, tl.sum(product, 1), mask=j < count)
            else:
                tl.store(KD + (bg * n + start + j[:, None]) * f + d[None, :], product, mask=mask)
        if FEATURE != 0:
            dk = dk * feature_slope(x, FEATURE)
        if HAS_VALID:
            dk = tl.where(present(VALID, j, count, HAS_VALID)[:, None], dk, 0.0)
        tl.store(DK + j[:, None] * (G * wide) + d[None, :], dk.to(DK.dtype.element_ty), mask=mask)
    return s, z


@triton.jit
def _walk_keys(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, ADJ, ADJ_Z, TA, DK, DV, KD,
    sqh, sqn, skn, svn, sln, sdh, sdn,
    scale, bg, at, start, count, n, tiles, wide, G, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr, HAS_ADJOINT: tl.constexpr,
    TILE_NORMS: tl.constexpr,
    DECAY_GRAD: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK (b n g f of wide), DV (b n g e) or both of one segment, from its last tile to its first.

    KEYS, VALUES: which of them. ADJ, ADJ_Z: the adjoint behind the segment, at row `at`. With DECAY_GRAD KD gets k . dk: (b g n),
    or (b g n f) for a decay per feature.
    """
    d = tl.arange(0, BF)
    c = tl.arange(0, BE)
    s = tl.zeros([BE, BF], tl.float32)
    z = tl.zeros([BF], tl.float32)
    if HAS_ADJOINT:  # the scale of the queries is applied to results alone
        mask = (d[None, :] < f) & (c[:, None] < e)
        s += tl.load(ADJ + at * e + d[None, :] * e + c[:, None], mask=mask, other=0.0).to(tl.float32) * (1.0 / scale)
        if NORM:
            z += tl.load(ADJ_Z + at + d, mask=d < f, other=0.0) * (1.0 / scale)
    narrow = True
    if DECAY > 0:
        narrow = is_narrow(LEVEL, sln, d, count, f, C, DECAY)
    chunks = tl.cdiv(count, C)
    if narrow:
        for x in range(chunks):
            s, z = _key_tile(
                Q, K, V, LEVEL, VALID, DO, DEN, DD, TA, DK, DV, KD, s, z, sqh, sqn, skn, svn, sln, sdh, sdn,
                scale, (chunks - 1 - x) * C, bg, start, count, n, tiles, wide, G, R,
                f, e, BF, BE, C, DECAY, True, NORM, NORMALIZE, FEATURE, HAS_VALID, TILE_NORMS, DECAY_GRAD, KEYS, VALUES,
                TYPE, PRECISION,
            )  # fmt: skip
    else:
        for x in range(chunks):
            s, z = _key_tile(
                Q, K, V, LEVEL, VALID, DO, DEN, DD, TA, DK, DV, KD, s, z, sqh, sqn, skn, svn, sln, sdh, sdn,
                scale, (chunks - 1 - x) * C, bg, start, count, n, tiles, wide, G, R,
                f, e, BF, BE, C, DECAY, False, NORM, NORMALIZE, FEATURE, HAS_VALID, TILE_NORMS, DECAY_GRAD, KEYS, VALUES,
                TYPE, PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n", "segs", "SEG", "slots", "behind", "tiles"])
def linear_walk_grads(
    Q, K, V, LEVEL, VALID, DO, DEN, DD, S, Z, ADJ, ADJ_Z, TZ, TA, DQ, DK, DV, QD, KD,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, slb, slh, sln, sdb, sdh, sdn,
    scale, n, segs, SEG, slots, behind, tiles, wide, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr,
    HAS_VALID: tl.constexpr, HAS_STATE: tl.constexpr, HAS_ADJOINT: tl.constexpr, DECAY_GRAD: tl.constexpr,
    TOGETHER: tl.constexpr, TILE_NORMS: tl.constexpr, ADJOINT_NORMS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DQ of one segment and query head, or DK and DV of one key-value head: in one program if TOGETHER, else in two.

    R query heads read one key-value head, and their gradients are added one after the other. There are `slots` states before
    segments and `behind` adjoints behind them, one where it is the same for all; without HAS_STATE or HAS_ADJOINT they are 0.
    TILE_NORMS: TZ (b g tiles f) holds the sums of the keys of every tile. ADJOINT_NORMS: TA (b h tiles f) holds what every tile
    adds to the norm of the adjoint. A row of DK has room for `wide` numbers.
    """
    parts = R + (1 if TOGETHER else 2)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    part, seg, bg = pid % parts, (pid // parts) % segs, (pid // parts // segs).to(tl.int64)
    G = H // R
    b, g = bg // G, bg % G
    start = (seg * SEG).to(tl.int64)
    count = tl.minimum(n - seg * SEG, SEG)
    h = g * R + tl.where(part < R, part, 0)
    bh = b * H + h
    Q += b * sqb + h * sqh + start * sqn
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    LEVEL += b * slb + g * slh + start * sln
    VALID += b * n + start
    DO += b * sdb + h * sdh + start * sdn
    DEN += bh * n + start
    DD += bh * n + start
    DK += ((b * n + start) * G + g) * wide
    DV += ((b * n + start) * G + g) * e
    TZ += (bg * tiles + seg * (SEG // C)) * f
    TA += (bh * tiles + seg * (SEG // C)) * f
    at = (bg * behind + tl.minimum(seg, behind - 1)) * f
    if part < R:
        _walk_queries(
            Q, K, V, LEVEL, VALID, DO, DEN, DD, S, Z, TZ, DQ + ((b * n + start) * H + h) * f, QD,
            sqn, skn, svn, sln, sdn, scale, bh, (bg * slots + seg) * f, start, count, n, H,
            f, e, BF, BE, C, DECAY, NORM, NORMALIZE, FEATURE, HAS_VALID, HAS_STATE, TILE_NORMS, DECAY_GRAD, TYPE, PRECISION,
        )  # fmt: skip
    elif TOGETHER:
        _walk_keys(
            Q, K, V, LEVEL, VALID, DO, DEN, DD, ADJ, ADJ_Z, TA, DK, DV, KD,
            sqh, sqn, skn, svn, sln, sdh, sdn, scale, bg, at, start, count, n, tiles, wide, G, R,
            f, e, BF, BE, C, DECAY, NORM, NORMALIZE, FEATURE, HAS_VALID, HAS_ADJOINT, ADJOINT_NORMS, DECAY_GRAD, True, True,
            TYPE, PRECISION,
        )  # fmt: skip
    elif part == R:
        _walk_keys(
            Q, K, V, LEVEL, VALID, DO, DEN, DD, ADJ, ADJ_Z, TA, DK, DV, KD,
            sqh, sqn, skn, svn, sln, sdh, sdn, scale, bg, at, start, count, n, tiles, wide, G, R,
            f, e, BF, BE, C, DECAY, NORM, NORMALIZE, FEATURE, HAS_VALID, HAS_ADJOINT, ADJOINT_NORMS, DECAY_GRAD, True, False,
            TYPE, PRECISION,
        )  # fmt: skip
    else:
        _walk_keys(
            Q, K, V, LEVEL, VALID, DO, DEN, DD, ADJ, ADJ_Z, TA, DK, DV, KD,
            sqh, sqn, skn, svn, sln, sdh, sdn, scale, bg, at, start, count, n, tiles, wide, G, R,
            f, e, BF, BE, C, DECAY, NORM, NORMALIZE, FEATURE, HAS_VALID, HAS_ADJOINT, ADJOINT_NORMS, DECAY_GRAD, False, True,
            TYPE, PRECISION,
        )  # fmt: skip
