"""Triton kernels of tile attention: a band by arithmetic, other pairs by lists of tiles, any length, no atomics.

A program owns a tile of queries (forward, gradient of q) or of keys (gradients of k and v) and walks the tiles it meets:

    a band       -ahead <= i - j <= back: loop bounds from the number of the tile; masks on the tiles at its edges alone
    a list       numbers of tiles, first those that hold all their pairs, then those with a mask of one bit for each pair

Items tell a program what to compute where that is not the same arithmetic for all: see `regard.patterns.tile_list`. With STEP,
programs work inside residue classes: token = first + step * number, and distances are counted in steps.

Scores are in base 2: exp2 and log2 are one instruction. A masked score is -inf and a running maximum is finite, so no NaN
arises. Only operands that were loaded are transposed: Triton 3.6 miscompiles products with a transposed accumulator on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)
GOLDEN_32 = tl.constexpr(-1640531527)  # as in `regard.ops.dropout_hash`
SQRT2_32 = tl.constexpr(1779033703)
TILE = tl.constexpr(64)  # queries and keys of a tile of a list
FIELDS = tl.constexpr(8)  # numbers of an item


@triton.jit
def load_rows(P, rows, stride, end, C: tl.constexpr, BC: tl.constexpr, CHECK: tl.constexpr):
    """Load rows (r) of a matrix with C columns as (r BC); zeros behind the end."""
    c = tl.arange(0, BC)
    at = P + rows[:, None] * stride + c[None, :]
    if CHECK:
        x = tl.load(at, mask=(rows[:, None] < end) & (c[None, :] < C), other=0.0)
    elif BC > C:
        x = tl.load(at, mask=c[None, :] < C, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def load_columns(P, rows, stride, end, C: tl.constexpr, BC: tl.constexpr, CHECK: tl.constexpr):
    """Load rows (r) of a matrix with C columns, transposed: (BC r); zeros behind the end."""
    c = tl.arange(0, BC)
    at = P + rows[None, :] * stride + c[:, None]
    if CHECK:
        x = tl.load(at, mask=(rows[None, :] < end) & (c[:, None] < C), other=0.0)
    elif BC > C:
        x = tl.load(at, mask=c[:, None] < C, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def store_rows(P, rows, stride, end, x, C: tl.constexpr, BC: tl.constexpr):
    """Store (r BC) into rows of a matrix with C columns, except behind the end."""
    c = tl.arange(0, BC)
    at = P + rows[:, None] * stride + c[None, :]
    tl.store(at, x.to(P.dtype.element_ty), mask=(rows[:, None] < end) & (c[None, :] < C))


@triton.jit
def adjust_scores(s, apart, seen, slope, step, back, ahead, hole_back, hole_ahead,
                  EDGE: tl.constexpr, HOLE: tl.constexpr, SEEN: tl.constexpr, SLOPED: tl.constexpr):  # fmt: skip
    """Add the bias to scores and hide pairs outside of the band, inside of the hole, or not seen."""
    if SLOPED:
        s -= slope * tl.abs(apart * step).to(tl.float32)
    if EDGE:
        s = tl.where((apart <= back) & (apart >= -ahead), s, float("-inf"))
    if HOLE:
        s = tl.where((apart <= hole_back) & (apart >= -hole_ahead), float("-inf"), s)
    if SEEN:
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def kept_pairs(query_keys, key_keys, threshold):
    """Return which pairs dropout keeps, from the keys of queries and keys, which broadcast."""
    x = (query_keys ^ key_keys) * GOLDEN_32
    x = (x ^ ((x >> 15) & 0x1FFFF)) * SQRT2_32
    return x >= threshold


@triton.jit
def band_keys(m0, shift, back, ahead, keys, BM: tl.constexpr, BN: tl.constexpr):
    """Return where the keys of a tile of queries begin and end, and between which of them no mask is needed."""
    low = tl.maximum(m0 + shift - back, 0) // BN * BN
    high = tl.minimum(m0 + BM + shift + ahead, keys)
    inner = (tl.maximum(m0 + BM - 1 + shift - back, 0) + BN - 1) // BN * BN
    outer = tl.maximum(tl.minimum(m0 + shift + ahead + 1, keys), 0) // BN * BN
    inner = tl.minimum(tl.maximum(inner, low), high)
    outer = tl.maximum(tl.minimum(outer, high), inner)
    return low, inner, outer, high


@triton.jit
def band_queries(n0, shift, back, ahead, queries, BM: tl.constexpr, BN: tl.constexpr):
    """Return where the queries of a tile of keys begin and end, and between which of them no mask is needed."""
    low = tl.maximum(n0 - shift - ahead, 0) // BM * BM
    high = tl.minimum(n0 + BN - shift + back, queries)
    inner = (tl.maximum(n0 + BN - 1 - shift - ahead, 0) + BM - 1) // BM * BM
    outer = tl.maximum(tl.minimum(n0 - shift + back + 1, queries), 0) // BM * BM
    inner = tl.minimum(tl.maximum(inner, low), high)
    outer = tl.maximum(tl.minimum(outer, high), inner)
    return low, inner, outer, high


@triton.jit
def residue_class(number, t, u, n, m, step):
    """Return the first query and key of a residue class, how many there are, and how many steps the first are apart."""
    first_query = (number - t % step + step) % step
    first_key = (number - u % step + step) % step
    queries = (n - first_query + step - 1) // step
    keys = (m - first_key + step - 1) // step
    shift = (t - u + first_query - first_key) // step  # exact
    return first_query, first_key, queries, keys, shift


@triton.jit
def forward_step(acc, l, top, q, query_keys, K, V, VALID, KEYS, y, x, bits, skn, svn, first_key, step, keys, m, shift, back, ahead,
                 hole_back, hole_ahead, slope, threshold,
                 D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, EDGE: tl.constexpr, LISTED: tl.constexpr,
                 CHECK: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr, DROP: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Add the keys number y to the running sums of the queries number x."""
    j = first_key + y * step
    k = load_columns(K, j, skn, m, D, BD, CHECK)
    v = load_rows(V, j, svn, m, E, BE, CHECK)
    s = tl.dot(q, k, input_precision=PRECISION)
    seen = y[None, :] < keys
    if VALIDS:
        seen = seen & (tl.load(VALID + j, mask=j < m, other=0) != 0)[None, :]
    if LISTED:
        seen = seen & (((bits[:, None] >> (y % TILE)[None, :].to(tl.int64)) & 1) != 0)
    apart = x[:, None] - y[None, :] + shift
    s = adjust_scores(
        s, apart, seen, slope, step, back, ahead, hole_back, hole_ahead, EDGE, HOLE, CHECK or VALIDS or LISTED, SLOPED
    )
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    fade = tl.exp2(top - new)
    l = l * fade + tl.sum(p, 1)
    if DROP:
        key_keys = tl.load(KEYS + j, mask=j < m, other=0)
        p = tl.where(kept_pairs(query_keys[:, None], key_keys[None, :], threshold), p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, l, new


@triton.jit
def tile_forward(Q, K, V, O, LSE, VALID, SLOPES, QUERY_KEYS, KEY_KEYS, ITEMS, ENTRIES, MASKS, PART, PART_LSE,
                 sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son,
                 n, m, t, u, back, ahead, hole_back, hole_ahead, step, scale, threshold, kept, H, tiles, slots,
                 R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, BAND: tl.constexpr, ITEMISED: tl.constexpr, SHARED: tl.constexpr,
                 MORE: tl.constexpr, STEPPED: tl.constexpr, HOLE: tl.constexpr, VALIDS: tl.constexpr, SLOPED: tl.constexpr,
                 DROP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the outputs and log-sum-exp of one tile of queries. With MORE, what is there already counts too."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = -1
    start = 0
    middle = 0
    end = 0
    if ITEMISED:
        item = ITEMS + tile * FIELDS
        tile = tl.load(item + 1)
        start = tl.load(item + 2)
        middle = tl.load(item + 3)
        end = tl.load(item + 4)
        slot = tl.load(item + 5)
        back = tl.load(item + 6)
        ahead = tl.load(item + 7)
        if SHARED:
            b = row // H
            h = row % H
        else:
            b = row
            h = tl.load(item)
    else:
        b = row // H
        h = row % H
    g = h // R
    if STEPPED:
        first_query, first_key, queries, keys, shift = residue_class(tile // tiles, t, u, n, m, step)
        tile = tile % tiles
    else:
        first_query = 0
        first_key = 0
        queries = n
        keys = m
        shift = t - u
        step = 1
    Q += b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
    K += b.to(tl.int64) * skb + g.to(tl.int64) * skh
    V += b.to(tl.int64) * svb + g.to(tl.int64) * svh
    VALID += b.to(tl.int64) * m
    line = (b * H + h).to(tl.int64) * n
    m0 = tile * BM
    rows = tl.arange(0, BM)
    x = m0 + rows
    i = first_query + x * step
    q = load_rows(Q, i, sqn, n, D, BD, True)
    q = (q * (scale * LOG2E)).to(q.dtype)
    slope = 0.0
    if SLOPED:
        slope = tl.load(SLOPES + h) * LOG2E
    query_keys = rows
    if DROP:
        query_keys = tl.load(QUERY_KEYS + line + i, mask=i < n, other=0)
    acc = tl.zeros([BM, BE], tl.float32)
    l = tl.zeros([BM], tl.float32)
    top = tl.full([BM], LOWEST, tl.float32)
    O += b.to(tl.int64) * sob + h.to(tl.int64) * soh
    if MORE:
        acc = load_rows(O, i, son, n, E, BE, True).to(tl.float32) / kept
        top = tl.load(LSE + line + i, mask=i < n, other=LOWEST) * LOG2E
        l += tl.where(top > LOWEST, 1.0, 0.0)
    y0 = tl.arange(0, BN)
    none = x.to(tl.int64)
    if BAND:
        low, inner, outer, high = band_keys(m0, shift, back, ahead, keys, BM, BN)
        for j0 in range(low, inner, BN):
            acc, l, top = forward_step(acc, l, top, q, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, none, skn, svn, first_key, step,
                                       keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, D, E, BD, BE,
                                       True, False, True, HOLE, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
        for j0 in range(inner, outer, BN):
            acc, l, top = forward_step(acc, l, top, q, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, none, skn, svn, first_key, step,
                                       keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, D, E, BD, BE,
                                       False, False, False, HOLE, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
        for j0 in range(outer, high, BN):
            acc, l, top = forward_step(acc, l, top, q, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, none, skn, svn, first_key, step,
                                       keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, D, E, BD, BE,
                                       True, False, True, HOLE, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
    if ITEMISED:
        for z in range(start * SUB, middle * SUB):
            j0 = tl.load(ENTRIES + z // SUB * 2) * TILE + z % SUB * BN
            acc, l, top = forward_step(acc, l, top, q, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, none, skn, svn, first_key, step,
                                       keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, D, E, BD, BE,
                                       False, False, False, False, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
        for z in range(middle * SUB, end * SUB):
            entry = ENTRIES + z // SUB * 2
            j0 = tl.load(entry) * TILE + z % SUB * BN
            bits = tl.load(MASKS + tl.load(entry + 1) * TILE + rows)
            acc, l, top = forward_step(acc, l, top, q, query_keys, K, V, VALID, KEY_KEYS, j0 + y0, x, bits, skn, svn, first_key, step,
                                       keys, m, shift, back, ahead, hole_back, hole_ahead, slope, threshold, D, E, BD, BE,
                                       False, True, True, False, VALIDS, SLOPED, DROP, PRECISION)  # fmt: skip
    some = l > 0
    whole = tl.where(some, l, 1.0)
    out = acc * (kept / whole)[:, None]
    lse = tl.where(some, (top + tl.log2(whole)) * LN2, LOWEST)
    if slot >= 0:
        at = (row * slots + slot).to(tl.int64) * BM
        c = tl.arange(0, BE)
        tl.store(PART + (at + rows)[:, None] * BE + c[None, :], out)
        tl.store(PART_LSE + at + rows, lse)
    else:
        store_rows(O, i, son, n, out, E, BE)
        tl.store(LSE + line + i, lse, mask=i < n)


@triton.jit
def merge_parts(O, LSE, MERGES, PART, PART_LSE, sob, soh, son, n, H, slots,
                E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """Merge the attention of one tile of queries over several parts of its keys by log-sum-exp."""
    merge = MERGES + tl.program_id(0) * 4
    row = tl.program_id(1)
    tile = tl.load(merge + 1)
    first = tl.load(merge + 2)
    last = tl.load(merge + 3)
    if SHARED:
        b = row // H
        h = row % H
    else:
        b = row
        h = tl.load(merge)
    rows = tl.arange(0, BM)
    c = tl.arange(0, BE)
    acc = tl.zeros([BM, BE], tl.float32)
    l = tl.zeros([BM], tl.float32)
    top = tl.full([BM], LOWEST, tl.float32)
    for slot in range(first, last):
        at = (row * slots + slot).to(tl.int64) * BM
        lse = tl.load(PART_LSE + at + rows) * LOG2E
        out = tl.load(PART + (at + rows)[:, None] * BE + c[None, :])
        new = tl.maximum(top, lse)
        fade = tl.exp2(top - new)
        share = tl.where(lse > LOWEST, tl.exp2(lse - new), 0.0)
        acc = acc * fade[:, None] + out * share[:, None]
        l = l * fade + share
        top = new
    some = l > 0
    whole = tl.where(some, l, 1.0)
    i = tile * BM + rows
    O += b.to(tl.int64) * sob + h.to(tl.int64) * soh
    store_rows(O, i, son, n, acc / whole[:, None], E, BE)
    lse = tl.where(some, (top + tl.log2(whole)) * LN2, LOWEST)
    tl.store(LSE + (b * H + h).to(tl.int64) * n + i, lse, mask=i < n)


@triton.jit
def sum_parts(OUT, MERGES, PART, sb, sh, sn, n, H, slots,
              C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """Sum the gradient of one tile over the parts it was computed in."""
    merge = MERGES + tl.program_id(0) * 4
    row = tl.program_id(1)
    tile = tl.load(merge + 1)
    first = tl.load(merge + 2)
    last = tl.load(merge + 3)
    if SHARED:
        b = row // H
        h = row % H
    else:
        b = row
        h = tl.load(merge)
    rows = tl.arange(0, BM)
    c = tl.arange(0, BC)
    total = tl.zeros([BM, BC], tl.float32)
    for slot in range(first, last):
        at = (row * slots + slot).to(tl.int64) * BM
        total += tl.load(PART + (at + rows)[:, None] * BC + c[None, :])
    OUT += b.to(tl.int64) * sb + h.to(tl.int64) * sh
    store_rows(OUT, tile * BM + rows, sn, n, total, C, BC)
