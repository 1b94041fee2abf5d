"""Triton kernels that walk along a segment of a sequence: outputs of linear attention, and gradients of queries, keys and values.

A program holds the state before a tile of C tokens in registers and goes from tile to tile: forwards with the state for outputs
and dq, backwards with the adjoint for dk and dv. So segments can be long, states are few, and every tensor of tokens is read once
by a program. Formulas and letters are those of `triton_kernels.py` and `triton_queries.py`.

Decays. With L the level of a token and M that of the middle of its tile, q' = q exp(L - M) and k' = k exp(M - L) need no decay
inside of the tile: the state is brought to its middle, the tile is one without decays, and the state is brought to its end. So it
is in all tiles of a segment (NARROW) where none decays by more than exp(LARGEST_SPREAD). Elsewhere every factor is at most 1.

An operand that is computed from a loaded one is the second of a product wherever it can be: Triton 3.6 computes first operands
twice, once for the product and once for everything else. For that states are held transposed, (e f).
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import LARGEST_SPREAD, halved_grads, halved_scores
from regard.ops.linear.triton_tiles import (
    apply_feature,
    exp_of,
    feature_slope,
    inverse_norm,
    key_rows,
    level_at,
    level_rows,
    output_factor,
    present,
    token_levels,
    token_rows,
)

SOME_TILES = tl.constexpr(16)  # whose decays are compared at once


@triton.jit
def _walked_keys(K, VALID, i, stride, d, count, f: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr):
    """Load features of keys, 0 where they are not valid; those behind the last token are any: no query of a walk follows them."""
    if HAS_VALID or f & (f - 1) != 0 or d.shape[0] > f:
        k = key_rows(K, VALID, i, stride, d, count, f, FEATURE, HAS_VALID)
    else:
        k = apply_feature(token_rows(K, i, stride, d, count, f), FEATURE)
    return k


@triton.jit
def _is_narrow(LEVEL, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return whether no tile of a segment decays by more than exp(LARGEST_SPREAD) from its first token to its last."""
    spread = 0.0
    for low in range(0, count, SOME_TILES * C):
        first = low + tl.arange(0, SOME_TILES) * C
        last = first + C - 1
        if DECAY == 2:
            fall = level_rows(LEVEL, first, stride, d, count, f) - level_rows(LEVEL, last, stride, d, count, f)
            spread = tl.maximum(spread, tl.max(tl.max(fall, 1), 0))
        else:
            fall = token_levels(LEVEL, first, stride, count) - token_levels(LEVEL, last, stride, count)
            spread = tl.maximum(spread, tl.max(fall, 0))
    return spread < LARGEST_SPREAD


@triton.jit
def _tile_levels(LEVEL, i, stride, d, count, f: tl.constexpr, DECAY: tl.constexpr):
    """Load the levels of tokens i: (tokens, features), or (tokens, 1) for one number a token."""
    if DECAY == 2:
        level = level_rows(LEVEL, i, stride, d, count, f)
    else:
        level = token_levels(LEVEL, i, stride, count)[:, None]
    return level


@triton.jit
def _borders(LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, NARROW: tl.constexpr):
    """Return the levels before a tile, where its queries and its keys begin, and at its end: (f)."""
    before = level_at(LEVEL, low - 1, stride, d, f, DECAY)
    end = level_at(LEVEL, tl.minimum(low + C, count) - 1, stride, d, f, DECAY)
    if NARROW:
        late = level_at(LEVEL, tl.minimum(low + C // 2, count - 1), stride, d, f, DECAY)
        early = late
    else:
        late = before
        early = end
    return before, late, early, end


@triton.jit
def _pair_decay(LEVEL, i, stride, count, OF_KEYS: tl.constexpr):
    """Return exp(L_i - L_j) of one number a token for queries i at or behind keys j, else 0: (i, j), or (j, i) with OF_KEYS."""
    level = token_levels(LEVEL, i, stride, count)
    if OF_KEYS:
        decay = exp_of(tl.where(i[None, :] >= i[:, None], level[None, :] - level[:, None], float("-inf")))
    else:
        decay = exp_of(tl.where(i[:, None] >= i[None, :], level[:, None] - level[None, :], float("-inf")))
    return decay


@triton.jit
def _tile_scores(
    late, early, q, k, LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, NARROW: tl.constexpr,
    OF_KEYS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of queries i and keys j <= i with their decay, else 0: (i, j), or (j, i) with OF_KEYS."""
    i = low + tl.arange(0, C)
    if NARROW or DECAY == 0:
        if OF_KEYS:
            a = tl.dot(early, tl.trans(late), input_precision=PRECISION)
            a = tl.where(i[None, :] >= i[:, None], a, 0.0)
        else:
            a = tl.dot(late, tl.trans(early), input_precision=PRECISION)
            a = tl.where(i[:, None] >= i[None, :], a, 0.0)
    elif DECAY == 1:
        if OF_KEYS:
            a = tl.dot(k.to(TYPE), tl.trans(q.to(TYPE)), input_precision=PRECISION)
        else:
            a = tl.dot(q.to(TYPE), tl.trans(k.to(TYPE)), input_precision=PRECISION)
        a = a * _pair_decay(LEVEL, i, stride, count, OF_KEYS)
    else:
        a = halved_scores(
            q.to(tl.float32), k.to(tl.float32), LEVEL, low, stride, d, count, f, C, OF_KEYS, TYPE, PRECISION
        )  # fmt: skip
    return a


@triton.jit
def _tile_grads(
    total, weights, other, x, own, LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NARROW: tl.constexpr, OF_KEYS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (total + sum_j weights_ij other_j) own_i over keys j <= i, the gradient of queries i.

    OF_KEYS: that of keys, with weights (j, i). other, own: keys and the decay of queries as `_tile_scores` takes them; x: keys
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
        weights = weights * _pair_decay(LEVEL, i, stride, count, OF_KEYS)
        total = tl.dot(weights.to(TYPE), x.to(TYPE), total * own, input_precision=PRECISION)
    else:
        total = halved_grads(
            total * own, weights, x.to(tl.float32), LEVEL, low, stride, d, count, f, C, OF_KEYS, TYPE, PRECISION
        )  # fmt: skip
    return total


@triton.jit
def _sums_of_tile(SUMS, low, d, f: tl.constexpr, C: tl.constexpr):
    """Load the sum over the tile at `low` of a segment, (f), from those of all its tiles."""
    return tl.load(SUMS + (low // C) * f + d, mask=d < f, other=0.0)


@triton.jit
def _products_of_norm(half, z, d, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the products of queries (C, features), as products take them, with a norm state: (C).

    A product with ones on the diagonal gives them the layout of results: otherwise their features would be computed once more.
    """
    ones = tl.where(d[:, None] == d[None, :], 1.0, 0.0).to(TYPE)
    return tl.sum(tl.dot(half, ones, input_precision=PRECISION) * z[None, :], 1)


@triton.jit
def _output_tile(
    Q, K, V, LEVEL, VALID, TZ, OUT, DEN, s, z,
    sqn, skn, svn, sln, scale, low, count, H,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    NARROW: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr,
    TILE_NORMS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the outputs of one tile and return the transposed state (e f) and its norm behind it."""
    d = tl.arange(0, BF)
    c = tl.arange(0, BE)
    i = low + tl.arange(0, C)
    q = apply_feature(token_rows(Q, i, sqn, d, count, f), FEATURE)
    k = _walked_keys(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID)
    v = token_rows(V, i, svn, c, count, e).to(TYPE)
    late, early = q, k
    if DECAY > 0:
        level = _tile_levels(LEVEL, i, sln, d, count, f, DECAY)
        before, queries_from, keys_from, end = _borders(LEVEL, low, sln, d, count, f, C, DECAY, NARROW)
        late = q.to(tl.float32) * exp_of(level - queries_from[None, :])
        early = k.to(tl.float32) * exp_of(keys_from[None, :] - level)
        s = s * exp_of(queries_from - before)[None, :]
        z = z * exp_of(queries_from - before)
    if NORM and not TILE_NORMS:
        added = tl.sum(early.to(tl.float32), 0)
    half = late.to(TYPE)
    den = tl.zeros([C], tl.float32)
    if TILE_NORMS:
        den = _products_of_norm(half, z, d, TYPE, PRECISION)
    a = _tile_scores(half, early.to(TYPE), q, k, LEVEL, low, sln, d, count, f, C, DECAY, NARROW, False, TYPE, PRECISION)
    if NORM and not TILE_NORMS:
        den = tl.sum(late.to(tl.float32) * z[None, :], 1)
    if NORM:
        den = (den + tl.sum(a, 1)) * scale
    o = tl.dot(a.to(TYPE), v, input_precision=PRECISION)
    o = tl.dot(half, tl.trans(s.to(TYPE)), o, input_precision=PRECISION)
    if DECAY > 0 and not NARROW:
        s = s * exp_of(end - before)[None, :]
        z = z * exp_of(end - before)
    s = tl.dot(tl.trans(v), early.to(TYPE), s, input_precision=PRECISION)
    if TILE_NORMS:
        z += _sums_of_tile(TZ, low, d, f, C)
    elif NORM:
        z += added
    if DECAY > 0 and NARROW:
        s = s * exp_of(end - keys_from)[None, :]
        z = z * exp_of(end - keys_from)
    if NORMALIZE == 1:
        o = o * (scale * inverse_norm(den))[:, None]
    elif NORMALIZE == 2:
        o = o * output_factor(DEN, i, count, scale, NORMALIZE)[:, None]
    else:
        o = o * scale
    mask = (i[:, None] < count) & (c[None, :] < e)
    tl.store(OUT + i[:, None] * (H * e) + c[None, :], o.to(OUT.dtype.element_ty), mask=mask)
    if NORM:
        tl.store(DEN + i, den, mask=i < count)
    return s, z


@triton.jit(do_not_specialize=["n", "segs", "SEG", "slots", "tiles"])
def linear_walk(
    Q, K, V, LEVEL, VALID, S, Z, TZ, OUT, DEN,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, slb, slh, sln,
    scale, n, segs, SEG, slots, tiles, H, R,
    f: tl.constexpr, e: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, NORM: tl.constexpr, NORMALIZE: tl.constexpr, FEATURE: tl.constexpr,
    HAS_VALID: tl.constexpr, HAS_STATE: tl.constexpr, TILE_NORMS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute OUT (b n h e) and its norm DEN (b h n) of one segment and one query head.

    NORMALIZE is 0 for sums, 1 for sums divided by their norm, and 2 for sums with factors that DEN holds: then there is no norm.
    Without HAS_STATE the state before the segment is 0. TILE_NORMS: TZ (b g tiles f) holds the sums of the keys of every tile.
    """
    pid = tl.program_id(0)
    seg, bh = pid % segs, (pid // segs).to(tl.int64)
    b, h = bh // H, bh % H
    g = h // R
    start = (seg * SEG).to(tl.int64)
    Q += b * sqb + h * sqh + start * sqn
    K += b * skb + g * skh + start * skn
    V += b * svb + g * svh + start * svn
    LEVEL += b * slb + g * slh + start * sln
    VALID += b * n + start
    TZ += ((b * (H // R) + g) * tiles + seg * (SEG // C)) * f
    OUT += ((b * n + start) * H + h) * e
    DEN += bh * n + start
    count = tl.minimum(n - seg * SEG, SEG)
    d = tl.arange(0, BF)
    c = tl.arange(0, BE)
    s = tl.zeros([BE, BF], tl.float32)
    z = tl.zeros([BF], tl.float32)
    if HAS_STATE:
        at = ((b * (H // R) + g) * slots + seg) * f
        mask = (d[None, :] < f) & (c[:, None] < e)
        s += tl.load(S + at * e + d[None, :] * e + c[:, None], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            z += tl.load(Z + at + d, mask=d < f, other=0.0).to(tl.float32)
    narrow = True
    if DECAY > 0:
        narrow = _is_narrow(LEVEL, sln, d, count, f, C, DECAY)
    if narrow:
        for low in range(0, count, C):
            s, z = _output_tile(
                Q, K, V, LEVEL, VALID, TZ, OUT, DEN, s, z, sqn, skn, svn, sln, scale, low, count, H,
                f, e, BF, BE, C, DECAY, True, NORM, NORMALIZE, FEATURE, HAS_VALID, TILE_NORMS, TYPE, PRECISION,
            )  # fmt: skip
    else:
        for low in range(0, count, C):
            s, z = _output_tile(
                Q, K, V, LEVEL, VALID, TZ, OUT, DEN, s, z, sqn, skn, svn, sln, scale, low, count, H,
                f, e, BF, BE, C, DECAY, False, NORM, NORMALIZE, FEATURE, HAS_VALID, TILE_NORMS, TYPE, PRECISION,
            )  # fmt: skip


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
    k = _walked_keys(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID)
    factor = output_factor(DEN, i, count, scale, NORMALIZE) if NORMALIZE != 0 else scale  # loaded long before they are needed
    if FEATURE != 0 or DECAY_GRAD:
        x = token_rows(Q, i, sqn, d, count, f)
    if NORM:
        dd = tl.load(DD + i, mask=i < count, other=0.0)
    early, own = k, 1.0
    if DECAY > 0:
        level = _tile_levels(LEVEL, i, sln, d, count, f, DECAY)
        before, queries_from, keys_from, end = _borders(LEVEL, low, sln, d, count, f, C, DECAY, NARROW)
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
        z += _sums_of_tile(TZ, low, d, f, C)
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
        narrow = _is_narrow(LEVEL, sln, d, count, f, C, DECAY)
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
    k = _walked_keys(K, VALID, j, skn, d, count, f, FEATURE, HAS_VALID)
    if KEYS and FEATURE != 0:
        x = token_rows(K, j, skn, d, count, f)  # loaded long before it is needed
    early, own, up = k, 1.0, 1.0
    if DECAY > 0:
        level = _tile_levels(LEVEL, j, sln, d, count, f, DECAY)
        before, queries_from, keys_from, end = _borders(LEVEL, low, sln, d, count, f, C, DECAY, NARROW)
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
                z += _sums_of_tile(TA + head * tiles * f, low, d, f, C)
            else:
                z += tl.sum(late.to(tl.float32) * dd[:, None], 0)
        if VALUES:
            a = _tile_scores(
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
        narrow = _is_narrow(LEVEL, sln, d, count, f, C, DECAY)
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
    pid = tl.program_id(0)
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
