"""Triton kernels of clusters of tokens: how similar tokens are to centroids, which of them a cluster takes, and their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import head_at, load_tokens

NOT_REAL = tl.constexpr(-(2**31))  # similarity of padding
LEAST_SIMILAR = tl.constexpr(-(2**31) + 1)
HIGHEST = tl.constexpr(2**31 - 1)  # above every similarity
MILLION = tl.constexpr(2**20 - 1)  # bits of a count


@triton.jit
def unit_rows(x, shortest):
    """Return rows scaled to length one; a row shorter than `shortest` counts as that long."""
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), shortest)[:, None]


@triton.jit(do_not_specialize=["n", "heads", "tiles", "clusters"])
def similar_clusters(
    X, CENTROIDS, VALID, CODES, NEAREST, sxb, sxh, sxn, n, heads, tiles, clusters, shortest, fine, least,
    MASKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write cosines of tokens and centroids as integers, CODES (rows clusters n), and the nearest centroid, NEAREST (rows n)."""
    pid = tl.program_id(0)
    row = pid // tiles
    wide = row.to(tl.int64)
    i = pid % tiles * BM + tl.arange(0, BM)
    inside = i < n
    x = load_tokens(head_at(X, row, sxb, sxh, heads, 1), i, sxn, inside, D, BD).to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), shortest)
    best = tl.full([BM], float("-inf"), tl.float32)
    label = tl.zeros([BM], tl.int32)
    for first in range(0, clusters, BC):
        c = first + tl.arange(0, BC)
        own = load_tokens(CENTROIDS + row % heads * clusters * D, c, D, c < clusters, D, BD).to(tl.float32)
        s = tl.dot(unit_rows(own, least), tl.trans(x), input_precision="tf32x3")  # as precise as float32
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


@triton.jit(do_not_specialize=["n", "w"])
def best_members(CODES, INDEX, WHERE, n, w, BLOCK: tl.constexpr):
    """Write the w most similar tokens of a cluster, of equals the earlier ones: INDEX (rows clusters w), and the place of each
    token among them, WHERE (rows clusters n), -1 for those not taken and for padding. Tokens are in order, real ones first.
    """
    pid = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n
    code = tl.load(CODES + pid * n + i, mask=inside, other=NOT_REAL)
    low = tl.full([], NOT_REAL, tl.int64)  # at least w tokens have a code as large
    high = tl.full([], HIGHEST, tl.int64)  # and fewer one as large as this
    for _ in range(16):  # quarters of less than 2^32 numbers, three counts of up to 2^20 in one sum
        step = (high - low + 3) // 4
        one = code >= (low + step).to(tl.int32)
        two = code >= tl.minimum(low + 2 * step, high).to(tl.int32)
        three = code >= tl.minimum(low + 3 * step, high).to(tl.int32)
        counts = one.to(tl.int64) + (two.to(tl.int64) << 20) + (three.to(tl.int64) << 40)
        counts = tl.sum(tl.where(inside, counts, 0), 0)
        enough = ((counts & MILLION) >= w).to(tl.int64)
        enough += ((counts >> 20 & MILLION) >= w).to(tl.int64) + ((counts >> 40) >= w).to(tl.int64)
        found = tl.minimum(low + enough * step, high)
        high = tl.minimum(found + step, high)
        low = found
    limit = low.to(tl.int32)
    above = inside & (code > limit)
    equal = inside & (code == limit)
    missing = w - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    real = taken & (code >= LEAST_SIMILAR)
    number = tl.sum(real.to(tl.int32), 0)
    behind = taken & (code < LEAST_SIMILAR)
    place = tl.where(real, tl.cumsum(real.to(tl.int32), 0) - 1, number + tl.cumsum(behind.to(tl.int32), 0) - 1)
    tl.store(INDEX + pid * w + place, i, mask=taken)
    tl.store(WHERE + pid * n + i, tl.where(real, place, -1), mask=inside)


@triton.jit(do_not_specialize=["n", "heads", "segments", "size", "clusters"])
def sum_clusters(
    X, NEAREST, VALID, SUMS, sxb, sxh, sxn, snb, snh, snn, n, heads, segments, size, clusters, shortest,
    SHARE: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the sums of the directions of tokens by their nearest centroid, and behind them how many there are: SUMS
    (rows segments clusters D + 1).
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
        x = unit_rows(load_tokens(X, i, sxn, real, D, BD).to(tl.float32), shortest)
        if MASKED:
            real = real & (tl.load(VALID + (row // heads).to(tl.int64) * n + i, mask=real, other=0) != 0)
        near = tl.load(NEAREST + i.to(tl.int64) * snn, mask=real, other=-1)
        own = (near[None, :] == c[:, None]).to(tl.float32)
        total = tl.dot(own, x, total, input_precision="tf32x3")
        count += tl.sum(own, 1)
    SUMS += pid.to(tl.int64) * clusters * (D + 1)
    f = tl.arange(0, BD)
    tl.store(SUMS + c[:, None] * (D + 1) + f[None, :], total, mask=(c[:, None] < clusters) & (f[None, :] < D))
    tl.store(SUMS + c * (D + 1) + D, count, mask=c < clusters)


@triton.jit(do_not_specialize=["clusters"])
def move_clusters(CENTROIDS, SUMS, clusters, decay, least, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr):
    """Move centroids (heads clusters D) towards the means of their tokens, from SUMS (heads clusters D + 1), in place."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    f = tl.arange(0, BD)
    at = tl.program_id(0) * clusters + c
    inside = (c[:, None] < clusters) & (f[None, :] < D)
    old = tl.load(CENTROIDS + at[:, None] * D + f[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.load(SUMS + at[:, None] * (D + 1) + f[None, :], mask=inside, other=0.0)
    count = tl.load(SUMS + at * (D + 1) + D, mask=c < clusters, other=0.0)
    moved = unit_rows(decay * old + (1.0 - decay) * total / tl.maximum(count, 1.0)[:, None], least)
    moved = tl.where(count[:, None] > 0, moved, old)
    tl.store(CENTROIDS + at[:, None] * D + f[None, :], moved.to(CENTROIDS.dtype.element_ty), mask=inside)
