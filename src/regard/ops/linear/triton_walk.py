"""Triton kernel that walks along a segment of a sequence for the outputs of linear attention, and what all walks share.

A program holds the state before a tile of C tokens in registers and goes from tile to tile: forwards with the state for outputs
and dq, backwards with the adjoint for dk and dv (`triton_walk_grads.py`). So segments can be long, states are few, and every
tensor of tokens is read once by a program. Formulas and letters are those of `triton_kernels.py` and `triton_queries.py`.

Programs take segments from the last of the last row to the first of the first, while the sums before a walk go the other way:
what those read last is still in the cache of the card when the walk begins, and what a forward pass leaves there is what the
sums of a backward pass begin with.

Decays. With L the level of a token and M that of the middle of its tile, q' = q exp(L - M) and k' = k exp(M - L) need no decay
inside of the tile: the state is brought to its middle, the tile is one without decays, and the state is brought to its end. So it
is in all tiles of a segment (NARROW) where none decays by more than exp(LARGEST_SPREAD). Elsewhere every factor is at most 1.

An operand that is computed from a loaded one is the second of a product wherever it can be: Triton 3.6 computes first operands
twice, once for the product and once for everything else. For that states are held transposed, (e f).
"""

import triton
import triton.language as tl

from regard.ops.linear.triton_feature_decay import LARGEST_SPREAD, halved_scores
from regard.ops.linear.triton_tiles import (
    apply_feature,
    exp_of,
    inverse_norm,
    key_rows,
    level_at,
    level_rows,
    output_factor,
    token_levels,
    token_rows,
)

SOME_TILES = tl.constexpr(16)  # whose decays are compared at once


@triton.jit
def walked_keys(K, VALID, i, stride, d, count, f: tl.constexpr, FEATURE: tl.constexpr, HAS_VALID: tl.constexpr):
    """Load features of keys, 0 where they are not valid; those behind the last token are any: no query of a walk follows them."""
    if HAS_VALID or f & (f - 1) != 0 or d.shape[0] > f:
        k = key_rows(K, VALID, i, stride, d, count, f, FEATURE, HAS_VALID)
    else:
        k = apply_feature(token_rows(K, i, stride, d, count, f), FEATURE)
    return k


@triton.jit
def is_narrow(LEVEL, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
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
def walked_levels(LEVEL, i, stride, d, count, f: tl.constexpr, DECAY: tl.constexpr):
    """Load the levels of tokens i: (tokens, features), or (tokens, 1) for one number a token."""
    if DECAY == 2:
        level = level_rows(LEVEL, i, stride, d, count, f)
    else:
        level = token_levels(LEVEL, i, stride, count)[:, None]
    return level


@triton.jit
def tile_borders(LEVEL, low, stride, d, count, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, NARROW: tl.constexpr):
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
def pair_decay(LEVEL, i, stride, count, OF_KEYS: tl.constexpr):
    """Return exp(L_i - L_j) of one number a token for queries i at or behind keys j, else 0: (i, j), or (j, i) with OF_KEYS."""
    level = token_levels(LEVEL, i, stride, count)
    if OF_KEYS:
        decay = exp_of(tl.where(i[None, :] >= i[:, None], level[None, :] - level[:, None], float("-inf")))
    else:
        decay = exp_of(tl.where(i[:, None] >= i[None, :], level[:, None] - level[None, :], float("-inf")))
    return decay


@triton.jit
def walked_scores(
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
        a = a * pair_decay(LEVEL, i, stride, count, OF_KEYS)
    else:
        a = halved_scores(
            q.to(tl.float32), k.to(tl.float32), LEVEL, low, stride, d, count, f, C, OF_KEYS, TYPE, PRECISION
        )  # fmt: skip
    return a


@triton.jit
def sums_of_tile(SUMS, low, d, f: tl.constexpr, C: tl.constexpr):
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
    k = walked_keys(K, VALID, i, skn, d, count, f, FEATURE, HAS_VALID)
    v = token_rows(V, i, svn, c, count, e).to(TYPE)
    late, early = q, k
    if DECAY > 0:
        level = walked_levels(LEVEL, i, sln, d, count, f, DECAY)
        before, queries_from, keys_from, end = tile_borders(LEVEL, low, sln, d, count, f, C, DECAY, NARROW)
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
    a = walked_scores(half, early.to(TYPE), q, k, LEVEL, low, sln, d, count, f, C, DECAY, NARROW, False, TYPE, PRECISION)
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
        z += sums_of_tile(TZ, low, d, f, C)
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
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
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
        narrow = is_narrow(LEVEL, sln, d, count, f, C, DECAY)
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
