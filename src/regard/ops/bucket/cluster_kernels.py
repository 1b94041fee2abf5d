"""Triton kernels of clusters of tokens: how similar tokens are to centroids, which of them a cluster takes, and their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import head_at, load_tokens

NOT_REAL = tl.constexpr(-(2**31))  # similarity of padding
HIGHEST = tl.constexpr(2**31 - 1)  # above every similarity
FIRST_GUESS = tl.constexpr(2**28)
LOW_HALF = tl.constexpr(2**16 - 1)  # bits of a count


@triton.jit
def unit_rows(x, shortest):
    """Return rows scaled to length one; a row shorter than `shortest` counts as that long."""
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), shortest)[:, None]


@triton.jit
def precise_dot(a, x, PARTS: tl.constexpr):
    """Return a x as precisely as in float32, of a in float32 and x in any type: a is split into PARTS of the type of x."""
    if PARTS == 1:
        return tl.dot(a, x.to(tl.float32), input_precision="tf32x3")
    one = a.to(x.dtype)
    rest = a - one.to(tl.float32)
    two = rest.to(x.dtype)
    three = (rest - two.to(tl.float32)).to(x.dtype)
    s = tl.dot(three, x)
    s = tl.dot(two, x, s)
    return tl.dot(one, x, s)


@triton.jit(do_not_specialize=["n", "heads", "tiles", "clusters"])
def similar_clusters(
    X, CENTROIDS, VALID, CODES, NEAREST, sxb, sxh, sxn, n, heads, tiles, clusters, shortest, fine, least,
    MASKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write cosines of tokens and centroids as integers, CODES (rows clusters n), and the nearest centroid, NEAREST (rows n)."""
    pid = tl.program_id(0)
    row = pid // tiles
    wide = row.to(tl.int64)
    i = pid % tiles * BM + tl.arange(0, BM)
    inside = i < n
    x = load_tokens(head_at(X, row, sxb, sxh, heads, 1), i, sxn, inside, D, BD)
    wide_x = x.to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(wide_x * wide_x, 1)), shortest)
    best = tl.full([BM], float("-inf"), tl.float32)
    label = tl.zeros([BM], tl.int32)
    for first in range(0, clusters, BC):
        c = first + tl.arange(0, BC)
        own = load_tokens(CENTROIDS + row % heads * clusters * D, c, D, c < clusters, D, BD).to(tl.float32)
        s = precise_dot(unit_rows(own, least), tl.trans(x), PARTS)
        code = (s / norm[None, :] * fine).to(tl.int32)
        if MASKED:
            real = tl.load(VALID + (row // heads).to(tl.int64) * n + i, mask=inside, other=0) != 0
            code = tl.where(real[None, :], code, NOT_REAL)
        at = CODES + (wide * clusters + c)[:, None] * n + i[None, :]
        tl.store(at, code, mask=(c < clusters)[:, None] & inside[None, :])
        top, place = tl.max(tl.where((c < clusters)[:, None], s, float("-inf")), 0, return_indices=True)
        better = top > best
        best = tl.where(better, top, best)
        label = tl.where(better, first + place, label)
    tl.store(NEAREST + wide * n + i, label, mask=inside)


@triton.jit
def smallest_taken(code, n, w):
    """Return a code that at least w of n tokens reach, and how many do: w of them, or no larger code is reached by w."""
    low = tl.full([], NOT_REAL, tl.int64)  # at least w tokens have a code as large
    high = tl.full([], HIGHEST, tl.int64)  # and fewer one as large as this
    one = tl.full([], 0, tl.int64)  # the two codes that tokens are compared to: at first a right angle and a cosine of 1/4
    two = tl.full([], FIRST_GUESS, tl.int64)
    number = n
    while (high - low > 1) & ((number != w) | (low == NOT_REAL)):
        counts = tl.sum((code >= one.to(tl.int32)).to(tl.int32) + ((code >= two.to(tl.int32)).to(tl.int32) << 16), 0)
        first = counts & LOW_HALF
        second = counts >> 16
        number = tl.where(second >= w, second, tl.where(first >= w, first, number))
        high = tl.where(second >= w, high, tl.where(first >= w, two, one))
        low = tl.where(second >= w, two, tl.where(first >= w, one, low))
        step = (high - low + 2) // 3
        one = low + step
        two = tl.minimum(one + step, high)
    return low, number


@triton.jit(do_not_specialize=["n", "w"])
def best_members(CODES, INDEX, WHERE, n, w, BLOCK: tl.constexpr):
    """Write the w most similar tokens of a cluster, of equals the earlier ones: INDEX (rows clusters w), and the place of each
    token among them, WHERE (rows clusters n), -1 for those not taken and for padding. Tokens are in order, real ones first.
    """
    pid = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n
    code = tl.load(CODES + pid * n + i, mask=inside, other=NOT_REAL)  # no larger code is reached by what is not inside
    low, number = smallest_taken(code, n, w)
    exact = (number == w) & (low > NOT_REAL)
    limit = low.to(tl.int32)
    above = (code > limit) | ((code == limit) & exact)
    equal = inside & (code == limit) & (exact == 0)
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    larger = tl.sum(above.to(tl.int32), 0)
    missing = w - larger
    sooner = before >> 16  # equal ones that come before
    taken = above | (equal & (sooner < missing))
    real = taken & (code > NOT_REAL)
    ahead = tl.where(limit > NOT_REAL, tl.minimum(sooner, missing), 0)  # padding lies behind all real ones
    place = tl.where(real, (before & LOW_HALF) + ahead, larger + sooner)
    tl.store(INDEX + pid * w + place, i, mask=taken)
    tl.store(WHERE + pid * n + i, tl.where(real, place, -1), mask=inside)


@triton.jit(do_not_specialize=["n", "heads", "segments", "size", "clusters", "parts", "skipped"])
def sum_clusters(
    X, NEAREST, VALID, SUMS, COUNTS, sxb, sxh, sxn, snb, snh, snn, n, heads, segments, size, clusters, parts, skipped, shortest,
    SHARE: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Write sums of the directions of tokens by their nearest centroid, SUMS (heads clusters parts D), and how many there are,
    COUNTS (heads clusters parts). A part is a segment of a row; those of these tokens lie behind `skipped` others.
    """
    pid = tl.program_id(0)
    row = pid // segments
    first = pid % segments * size
    end = tl.minimum(first + size, n)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    X = head_at(X, row, sxb, sxh, heads, SHARE)
    NEAREST = head_at(NEAREST, row, snb, snh, heads, 1)
    total = tl.zeros([BC, BD], tl.float32)
    count = tl.zeros([BC], tl.float32)
    for start in range(first, end, BM):
        i = start + tl.arange(0, BM)
        real = i < end
        x = load_tokens(X, i, sxn, real, D, BD)
        wide = x.to(tl.float32)
        norm = tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), shortest)
        if MASKED:
            real = real & (tl.load(VALID + (row // heads).to(tl.int64) * n + i, mask=real, other=0) != 0)
        near = tl.load(NEAREST + i.to(tl.int64) * snn, mask=real, other=-1)
        own = near[None, :] == c[:, None]
        total += precise_dot(tl.where(own, (1.0 / norm)[None, :], 0.0), x, PARTS)
        count += tl.sum(own.to(tl.float32), 1)
    part = skipped + row // heads * segments + pid % segments
    at = ((row % heads * clusters + c) * parts + part).to(tl.int64)
    f = tl.arange(0, BD)
    tl.store(SUMS + at[:, None] * D + f[None, :], total, mask=(c[:, None] < clusters) & (f[None, :] < D))
    tl.store(COUNTS + at, count, mask=c < clusters)


@triton.jit(do_not_specialize=["parts"])
def move_clusters(CENTROIDS, SUMS, COUNTS, parts, decay, least, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr):
    """Move a centroid of CENTROIDS (heads*clusters D) towards the mean of its tokens, in place: see `sum_clusters`."""
    at = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BD)
    total = tl.zeros([BP, BD], tl.float32)
    counts = tl.zeros([BP], tl.float32)
    for first in range(0, parts, BP):
        p = first + tl.arange(0, BP)
        here = (at * parts + p)[:, None] * D + f[None, :]
        total += tl.load(SUMS + here, mask=(p[:, None] < parts) & (f[None, :] < D), other=0.0)
        counts += tl.load(COUNTS + at * parts + p, mask=p < parts, other=0.0)
    count = tl.sum(counts, 0)
    old = tl.load(CENTROIDS + at * D + f, mask=f < D, other=0.0).to(tl.float32)
    moved = decay * old + (1.0 - decay) * tl.sum(total, 0) / tl.maximum(count, 1.0)
    moved = moved / tl.maximum(tl.sqrt(tl.sum(moved * moved, 0)), least)
    tl.store(CENTROIDS + at * D + f, tl.where(count > 0, moved, old).to(CENTROIDS.dtype.element_ty), mask=f < D)
