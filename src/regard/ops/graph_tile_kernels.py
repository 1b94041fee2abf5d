"""Triton kernels of graph attention in tiles: scores LeakyReLU(a_i + b_j) of one number for each token, over a band and a list.

A program owns 64 queries (forward, gradient of a) or 64 keys (gradients of b and v) and walks the tiles it meets, as in
`regard.ops.tile.triton_kernels`. Scores are made anew in every pass and are base-2 logarithms: a and b come times log2(e), which
LeakyReLU keeps, because it is positively homogeneous. No atomics: gradients are equal in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.tile.triton_kernels import closed_range, inside_range, load_tile, load_tile_transposed, store_tile
from regard.ops.triton_math import hash_keeps

NO_PAIR = tl.constexpr(-1.0e30)
GRAPH_TILE = tl.constexpr(64)  # queries and keys of a tile
UNMASKED = tl.constexpr(0)
IN_BAND = tl.constexpr(1)
IN_BITS = tl.constexpr(2)
GRAPH_NUMBERS = ("n", "m", "shift", "back", "ahead", "slope", "threshold", "kept")  # compiled for all values


@triton.jit(do_not_specialize=["n"])
def token_dots(X, A, OUT, sxb, sxh, sxn, n, H, factor, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    """Write factor a_h . x_i of tokens x (b h/R n d) as (b h n)."""
    row = tl.program_id(1)
    b = (row // H).to(tl.int64)
    h = row % H
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    x = load_tile(X + b * sxb + h // R * sxh, tl.minimum(i, n - 1), sxn, D, BD)
    c = tl.arange(0, BD)
    a = tl.load(A + h * D + c, mask=c < D, other=0.0)
    tl.store(OUT + row.to(tl.int64) * n + i, tl.sum(x.to(tl.float32) * a[None, :], 1) * factor, mask=i < n)


@triton.jit(do_not_specialize=["n"])
def token_dot_gradients(X, A, GRAD, DX, PARTS, sxb, sxh, sxn, sdb, sdh, sdn, n, H,
                        R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Write the gradient of tokens, and what each tile adds to that of a: PARTS (b tiles h d)."""
    G = H // R
    row = tl.program_id(1)
    b = (row // G).to(tl.int64)
    g = row % G
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    here = tl.minimum(i, n - 1)
    x = load_tile(X + b * sxb + g * sxh, here, sxn, D, BD).to(tl.float32)
    c = tl.arange(0, BD)
    dx = tl.zeros([BM, BD], tl.float32)
    part = PARTS + (b * tl.num_programs(0) + tl.program_id(0)) * H * D
    for h in range(g * R, g * R + R):
        grad = tl.load(GRAD + (b * H + h) * n + i, mask=i < n, other=0.0)
        a = tl.load(A + h * D + c, mask=c < D, other=0.0)
        dx += grad[:, None] * a[None, :]
        tl.store(part + h * D + c, tl.sum(grad[:, None] * x, 0), mask=c < D)
    store_tile(DX + b * sdb + g * sdh, i, sdn, n, dx, D, BD)


@triton.jit
def product_zeros(DTYPE: tl.constexpr):
    """Return zeros (GRAPH_TILE GRAPH_TILE) that lie as the results of products do.

    Scores that are added to them lie so too, a row in four threads: as sums alone a thread would hold 32 rows, and all that
    belongs to a row 32 times.
    """
    zeros = tl.zeros([GRAPH_TILE, GRAPH_TILE], DTYPE)
    return tl.dot(zeros, zeros)


@triton.jit
def hide_tile_pairs(s, other, ranges, words, bit, MASK: tl.constexpr):
    """Return scores with pairs that do not exist at -inf; other: numbers of columns.

    ranges: columns that each row sees. words: the two halves of the 64 bits of each query, bit: the key inside of its tile; both
    have the shape of a row or a column of s.
    """
    if MASK == IN_BAND:
        low, width = ranges
        s = tl.where(inside_range(other[None, :], low[:, None], width[:, None]), s, float("-inf"))
    if MASK == IN_BITS:
        early, late = words
        word = tl.where(bit < 32, early, late)
        s = tl.where(((word >> (bit % 32)) & 1) != 0, s, float("-inf"))
    return s


@triton.jit
def graph_forward_step(sums, own, at, j0, words, E: tl.constexpr, BE: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    """Add a tile of keys to outputs (GRAPH_TILE BE), weights and largest scores (GRAPH_TILE)."""
    acc, total, top = sums
    a, ranges, drawn, zeros = own
    B, V, KEYED, svn, m, slope, threshold = at
    y = j0 + tl.arange(0, GRAPH_TILE)
    j = tl.minimum(y, m - 1)
    x = zeros + a[:, None] + tl.load(B + j)[None, :]
    s = hide_tile_pairs(tl.maximum(x, x * slope), y, ranges, words, (y % GRAPH_TILE)[None, :], MASK)
    v = load_tile(V, j, svn, E, BE)
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    fade = tl.exp2(top - new)
    total = total * fade + tl.sum(p, 1)
    if DROP:
        p = tl.where(hash_keeps(drawn[:, None], tl.load(KEYED + j)[None, :], threshold), p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, total, new


@triton.jit(do_not_specialize=GRAPH_NUMBERS)
def graph_forward(A, B, V, OUT, LSE, DRAWN, KEYED, OFFSETS, MIDDLES, ENTRIES, MASKS, svb, svh, svn, sob, soh, son,
                  n, m, shift, back, ahead, slope, threshold, kept, H,
                  R: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, LISTED: tl.constexpr, DROP: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """Write the outputs of a tile of queries, and their log-sum-exp in base 2."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    rows = tl.arange(0, GRAPH_TILE)
    i = tile * GRAPH_TILE + rows
    here = tl.minimum(i, n - 1)
    drawn = rows
    if DROP:
        drawn = tl.load(DRAWN + row * n + here)
    ranges = closed_range(tl.maximum(i + shift - back, 0), tl.minimum(i + shift + ahead, m - 1))
    own = (tl.load(A + row * n + here), ranges, drawn, product_zeros(V.dtype.element_ty))
    at = (B + row * m, V + b * svb + h // R * svh, KEYED, svn, m, slope, threshold)
    none = (rows[:, None], rows[:, None])
    sums = (
        tl.zeros([GRAPH_TILE, BE], tl.float32),
        tl.zeros([GRAPH_TILE], tl.float32),
        tl.full([GRAPH_TILE], NO_PAIR, tl.float32),
    )
    low = tl.maximum(tile * GRAPH_TILE + shift - back, 0) // GRAPH_TILE * GRAPH_TILE
    for j0 in range(low, tl.minimum(tile * GRAPH_TILE + GRAPH_TILE + shift + ahead, m), GRAPH_TILE):
        sums = graph_forward_step(sums, own, at, j0, none, E, BE, IN_BAND, DROP, PRECISION)
    if LISTED:
        middle = tl.load(MIDDLES + tile)
        for z in range(tl.load(OFFSETS + tile), middle):
            j0 = tl.load(ENTRIES + z * 2) * GRAPH_TILE
            sums = graph_forward_step(sums, own, at, j0, none, E, BE, UNMASKED, DROP, PRECISION)
        for z in range(middle, tl.load(OFFSETS + tile + 1)):
            bits = MASKS + tl.load(ENTRIES + z * 2 + 1) * 2 * GRAPH_TILE + rows
            words = (tl.load(bits)[:, None], tl.load(bits + GRAPH_TILE)[:, None])
            j0 = tl.load(ENTRIES + z * 2) * GRAPH_TILE
            sums = graph_forward_step(sums, own, at, j0, words, E, BE, IN_BITS, DROP, PRECISION)
    acc, total, top = sums
    some = total > 0
    whole = tl.where(some, total, 1.0)
    store_tile(OUT + b * sob + h * soh, i, son, n, acc * (kept / whole)[:, None], E, BE)
    tl.store(LSE + row * n + i, tl.where(some, top + tl.log2(whole), -NO_PAIR), mask=i < n)  # its weights come out 0


@triton.jit
def graph_query_step(da, own, at, j0, words, E: tl.constexpr, BE: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """Add what a tile of keys gives to the gradients of a (GRAPH_TILE)."""
    a, ranges, drawn, d_out, lse, pull, kept = own
    B, V, KEYED, svn, m, slope, threshold = at
    y = j0 + tl.arange(0, GRAPH_TILE)
    j = tl.minimum(y, m - 1)
    x = a[:, None] + tl.load(B + j)[None, :]
    s = hide_tile_pairs(tl.maximum(x, x * slope), y, ranges, words, (y % GRAPH_TILE)[None, :], MASK)
    p = tl.exp2(s - lse[:, None])
    p = tl.where(x > 0, p, p * slope)
    dp = tl.dot(d_out, load_tile_transposed(V, j, svn, E, BE), input_precision=PRECISION)
    if DROP:
        dp = tl.where(hash_keeps(drawn[:, None], tl.load(KEYED + j)[None, :], threshold), dp * kept, 0.0)
    return da + tl.sum(p * (dp - pull[:, None]), 1)


@triton.jit(do_not_specialize=GRAPH_NUMBERS)
def graph_query_gradients(A, B, V, OUT, LSE, D_OUT, PULL, DA, DRAWN, KEYED, OFFSETS, MIDDLES, ENTRIES, MASKS,
                          svb, svh, svn, sob, soh, son, sdb, sdh, sdn, n, m, shift, back, ahead, slope, threshold, kept, H,
                          R: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, LISTED: tl.constexpr, DROP: tl.constexpr,
                          PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradients of a, for a tile of queries, and what each of their weights loses (PULL)."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    rows = tl.arange(0, GRAPH_TILE)
    i = tile * GRAPH_TILE + rows
    here = tl.minimum(i, n - 1)
    d_out = load_tile(D_OUT + b * sdb + h * sdh, here, sdn, E, BE)
    out = load_tile(OUT + b * sob + h * soh, here, son, E, BE)
    pull = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(PULL + row * n + i, pull, mask=i < n)
    drawn = rows
    if DROP:
        drawn = tl.load(DRAWN + row * n + here)
    ranges = closed_range(tl.maximum(i + shift - back, 0), tl.minimum(i + shift + ahead, m - 1))
    own = (tl.load(A + row * n + here), ranges, drawn, d_out, tl.load(LSE + row * n + here), pull, kept)
    at = (B + row * m, V + b * svb + h // R * svh, KEYED, svn, m, slope, threshold)
    none = (rows[:, None], rows[:, None])
    da = tl.zeros([GRAPH_TILE], tl.float32)
    low = tl.maximum(tile * GRAPH_TILE + shift - back, 0) // GRAPH_TILE * GRAPH_TILE
    for j0 in range(low, tl.minimum(tile * GRAPH_TILE + GRAPH_TILE + shift + ahead, m), GRAPH_TILE):
        da = graph_query_step(da, own, at, j0, none, E, BE, IN_BAND, DROP, PRECISION)
    if LISTED:
        middle = tl.load(MIDDLES + tile)
        for z in range(tl.load(OFFSETS + tile), middle):
            j0 = tl.load(ENTRIES + z * 2) * GRAPH_TILE
            da = graph_query_step(da, own, at, j0, none, E, BE, UNMASKED, DROP, PRECISION)
        for z in range(middle, tl.load(OFFSETS + tile + 1)):
            bits = MASKS + tl.load(ENTRIES + z * 2 + 1) * 2 * GRAPH_TILE + rows
            words = (tl.load(bits)[:, None], tl.load(bits + GRAPH_TILE)[:, None])
            j0 = tl.load(ENTRIES + z * 2) * GRAPH_TILE
            da = graph_query_step(da, own, at, j0, words, E, BE, IN_BITS, DROP, PRECISION)
    tl.store(DA + row * n + i, da, mask=i < n)


@triton.jit
def graph_key_step(db, dv, own, at, i0, words, E: tl.constexpr, BE: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Add what a tile of queries gives to the gradients of b (GRAPH_TILE) and of values. Scores are (keys queries)."""
    key_side, y, ranges, keyed, v, kept, zeros = own
    A, D_OUT, LSE, PULL, DRAWN, sdn, n, slope, threshold = at
    w = i0 + tl.arange(0, GRAPH_TILE)
    i = tl.minimum(w, n - 1)
    x = zeros + key_side[:, None] + tl.load(A + i)[None, :]
    s = hide_tile_pairs(tl.maximum(x, x * slope), w, ranges, words, (y % GRAPH_TILE)[:, None], MASK)
    p = tl.exp2(s - tl.load(LSE + i)[None, :])
    weights = p
    p = tl.where(x > 0, p, p * slope)  # x is needed no longer: registers are few
    d_out = load_tile(D_OUT, i, sdn, E, BE)
    if DROP:
        keep = hash_keeps(tl.load(DRAWN + i)[None, :], keyed[:, None], threshold)
        weights = tl.where(keep, weights * kept, 0.0)
    dv = tl.dot(weights.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    if DROP:
        dp = tl.where(keep, dp * kept, 0.0)
    return db + tl.sum(p * (dp - tl.load(PULL + i)[None, :]), 1), dv


@triton.jit(do_not_specialize=GRAPH_NUMBERS)
def graph_key_gradients(A, B, V, LSE, D_OUT, PULL, DB, DV, DRAWN, KEYED, OFFSETS, MIDDLES, ENTRIES, MASKS,
                        svb, svh, svn, sdb, sdh, sdn, sgb, sgh, sgn, n, m, shift, back, ahead, slope, threshold, kept, H,
                        R: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, LISTED: tl.constexpr, DROP: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradients of b and of values, for a tile of keys; values sum over the query heads that share them."""
    tile = tl.program_id(0)
    G = H // R
    b = (tl.program_id(1) // G).to(tl.int64)
    g = tl.program_id(1) % G
    rows = tl.arange(0, GRAPH_TILE)
    y = tile * GRAPH_TILE + rows
    here = tl.minimum(y, m - 1)
    v = load_tile(V + b * svb + g * svh, here, svn, E, BE)
    keyed = rows
    if DROP:
        keyed = tl.load(KEYED + here)
    ranges = closed_range(tl.maximum(y - shift - ahead, 0), tl.minimum(y - shift + back, n - 1))
    zeros = product_zeros(V.dtype.element_ty)
    none = (rows[None, :], rows[None, :])
    dv = tl.zeros([GRAPH_TILE, BE], tl.float32)
    low = tl.maximum(tile * GRAPH_TILE - shift - ahead, 0) // GRAPH_TILE * GRAPH_TILE
    for h in range(g * R, g * R + R):
        row = b * H + h
        own = (tl.load(B + row * m + here), y, ranges, keyed, v, kept, zeros)
        at = (A + row * n, D_OUT + b * sdb + h * sdh, LSE + row * n, PULL + row * n, DRAWN + row * n, sdn, n, slope, threshold)
        db = tl.zeros([GRAPH_TILE], tl.float32)
        for i0 in range(low, tl.minimum(tile * GRAPH_TILE + GRAPH_TILE - shift + back, n), GRAPH_TILE):
            db, dv = graph_key_step(db, dv, own, at, i0, none, E, BE, IN_BAND, DROP, PRECISION)
        if LISTED:
            middle = tl.load(MIDDLES + tile)
            for z in range(tl.load(OFFSETS + tile), middle):
                i0 = tl.load(ENTRIES + z * 2) * GRAPH_TILE
                db, dv = graph_key_step(db, dv, own, at, i0, none, E, BE, UNMASKED, DROP, PRECISION)
            for z in range(middle, tl.load(OFFSETS + tile + 1)):
                bits = MASKS + tl.load(ENTRIES + z * 2 + 1) * 2 * GRAPH_TILE + rows
                words = (tl.load(bits)[None, :], tl.load(bits + GRAPH_TILE)[None, :])
                i0 = tl.load(ENTRIES + z * 2) * GRAPH_TILE
                db, dv = graph_key_step(db, dv, own, at, i0, words, E, BE, IN_BITS, DROP, PRECISION)
        tl.store(DB + row * m + y, db, mask=y < m)
    store_tile(DV + b * sgb + g * sgh, y, sgn, m, dv, E, BE)
