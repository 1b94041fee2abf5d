"""Triton kernels of single rows: labels of keys, and rows of tokens that clusters took."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import head_at, load_tokens, store_tokens

NO_SLOT = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["n", "heads", "tiles"])
def largest_products(
    K, DIRECTIONS, LABELS, skb, skh, skn, n, heads, tiles,
    SHARE: tl.constexpr, ROUNDS: tl.constexpr, F: tl.constexpr, OPPOSITE: tl.constexpr, ALIKE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write which direction of every round each key has the largest product with; DIRECTIONS (heads D ROUNDS*F)."""
    pid = tl.program_id(0)
    row = pid // tiles
    i = pid % tiles * BM + tl.arange(0, BM)
    inside = i < n
    k = load_tokens(head_at(K, row, skb, skh, heads, SHARE), i, skn, inside, D, BD)
    if not ALIKE:
        k = k.to(tl.float32)
    c = tl.arange(0, BD)
    f = tl.arange(0, BF)
    DIRECTIONS += row % heads * (D * ROUNDS * F)
    LABELS += row.to(tl.int64) * n * ROUNDS
    for r in range(ROUNDS):
        best = tl.full([BM], -1.0, tl.float32)
        label = tl.zeros([BM], tl.int32)
        for f0 in range(0, F, BF):
            there = (c[:, None] < D) & (f0 + f[None, :] < F)
            x = tl.load(DIRECTIONS + c[:, None] * (ROUNDS * F) + r * F + f0 + f[None, :], mask=there, other=0.0)
            if not ALIKE:
                x = x.to(tl.float32)
            s = tl.dot(k, x, input_precision="tf32x3")  # as precise as float32
            size = tl.abs(s) if OPPOSITE else s
            size = tl.where(f0 + f[None, :] < F, size, float("-inf"))
            top, at = tl.max(size, 1, return_indices=True)
            found = tl.minimum(f0 + at, F - 1)  # also where all products are NaN
            if OPPOSITE:
                own = tl.sum(tl.where(f[None, :] == at[:, None], s, 0.0), 1)
                found += tl.where(own < 0, F, 0)
            better = (top > best) | (f0 == 0)
            best = tl.where(better, top, best)
            label = tl.where(better, found, label)
        tl.store(LABELS + i.to(tl.int64) * ROUNDS + r, label, mask=inside)


@triton.jit(do_not_specialize=["n", "heads", "tiles"])
def inverse_norms(
    K, SHORT, skb, skh, skn, n, heads, tiles, shortest, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Write 1 / |k| of every key, SHORT (rows n); a vector shorter than `shortest` counts as that long."""
    pid = tl.program_id(0)
    row = pid // tiles
    i = pid % tiles * BM + tl.arange(0, BM)
    k = load_tokens(head_at(K, row, skb, skh, heads, 1), i, skn, i < n, D, BD).to(tl.float32)
    norm = tl.sqrt(tl.sum(k * k, 1))
    tl.store(SHORT + row.to(tl.int64) * n + i, 1.0 / tl.maximum(norm, shortest), mask=i < n)


@triton.jit
def gather_tile(
    X, INDEX, REAL, TIMES, Y, strides, row, tile, n, each, w, heads,
    MASKED: tl.constexpr, MEAN: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Gather a tile of rows: see `gather_rows`."""
    sb, sh, sn = strides
    i = tile * BM + tl.arange(0, BM)
    inside = i < each
    first = row.to(tl.int64) * each
    token = tl.load(INDEX + first + i, mask=inside, other=0)
    real = inside
    if MASKED:
        real = real & (tl.load(REAL + row.to(tl.int64) * w + i % w, mask=inside, other=0) != 0)
    x = load_tokens(head_at(X, row, sb, sh, heads, 1), token, sn, real, E, BE)
    if MEAN:
        times = tl.load(TIMES + row.to(tl.int64) * n + token, mask=real, other=1)
        x = x.to(tl.float32) / tl.maximum(times, 1).to(tl.float32)[:, None]
    store_tokens(Y + first * E, i, E, x, inside, E, BE)


@triton.jit(do_not_specialize=["n", "each", "w", "heads", "tiles"])
def gather_rows(
    X, INDEX, REAL, TIMES, Y, strides, n, each, w, heads, tiles,
    MASKED: tl.constexpr, MEAN: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write rows of X through INDEX, `each` tokens in a row, w of them in a cluster; MASKED: 0 for those that are not real,
    REAL (rows w). MEAN: divided by how often the token is taken, TIMES (rows n).
    """
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    gather_tile(X, INDEX, REAL, TIMES, Y, strides, row, tile, n, each, w, heads, MASKED, MEAN, E, BE, BM)


@triton.jit(do_not_specialize=["n", "each", "w", "heads", "tiles"])
def gather_triples(
    Q, K, V, OF_QUERIES, OF_KEYS, REAL_QUERIES, REAL_KEYS, YQ, YK, YV, q_strides, k_strides, v_strides, n, each, w, heads, tiles,
    MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """As `gather_rows`, of queries by one index and of keys and values by another; a third of the programs for each."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if tl.program_id(1) == 0:
        gather_tile(
            Q, OF_QUERIES, REAL_QUERIES, REAL_QUERIES, YQ, q_strides, row, tile, n, each, w, heads, MASKED, False, D, BD, BM
        )
    elif tl.program_id(1) == 1:
        gather_tile(K, OF_KEYS, REAL_KEYS, REAL_KEYS, YK, k_strides, row, tile, n, each, w, heads, MASKED, False, D, BD, BM)
    else:
        gather_tile(V, OF_KEYS, REAL_KEYS, REAL_KEYS, YV, v_strides, row, tile, n, each, w, heads, MASKED, False, E, BE, BM)


@triton.jit
def sum_tile(
    X, WHERE, TIMES, OUT, strides, row, tile, n, w, clusters, heads,
    MEAN: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum the rows of a tile of tokens: see `sum_rows`. In every step each token takes the next cluster that has it: few do."""
    sb, sh, sn = strides
    i = tile * BM + tl.arange(0, BM)
    inside = i < n
    total = tl.zeros([BM, BE], tl.float32)
    times = tl.zeros([BM], tl.int32)
    X += row.to(tl.int64) * clusters * w * E
    for first in range(0, clusters, BC):
        c = first + tl.arange(0, BC)[:, None]
        at = (row.to(tl.int64) * clusters + c) * n + i[None, :]
        place = tl.load(WHERE + at, mask=(c < clusters) & inside[None, :], other=-1)
        slot = tl.where(place >= 0, c * w + place, NO_SLOT)
        number = tl.sum((place >= 0).to(tl.int32), 0)
        for _ in range(tl.max(number, 0)):
            following = tl.min(slot, 0)
            total += load_tokens(X, following, E, following < NO_SLOT, E, BE).to(tl.float32)
            slot = tl.where(slot == following[None, :], NO_SLOT, slot)
        times += number
    if MEAN:
        total = total / tl.maximum(times, 1).to(tl.float32)[:, None]
        tl.store(TIMES + row.to(tl.int64) * n + i, times, mask=inside)
    store_tokens(head_at(OUT, row, sb, sh, heads, 1), i, sn, total, inside, E, BE)


@triton.jit(do_not_specialize=["n", "w", "clusters", "heads", "tiles"])
def sum_rows(
    X, WHERE, TIMES, OUT, strides, n, w, clusters, heads, tiles,
    MEAN: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the sum, or the MEAN, of the rows of X (rows clusters w E) that belong to a token: in every cluster the one at
    WHERE (rows clusters n), none where that is -1. MEAN: also their number, TIMES (rows n).
    """
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    sum_tile(X, WHERE, TIMES, OUT, strides, row, tile, n, w, clusters, heads, MEAN, E, BE, BM, BC)


@triton.jit(do_not_specialize=["n", "w", "clusters", "heads", "tiles"])
def sum_triples(
    Q, K, V, OF_QUERIES, OF_KEYS, DQ, DK, DV, q_strides, k_strides, v_strides, n, w, clusters, heads, tiles,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """As `sum_rows`, of queries by one place and of keys and values by another; a third of the programs for each."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if tl.program_id(1) == 0:
        sum_tile(Q, OF_QUERIES, OF_QUERIES, DQ, q_strides, row, tile, n, w, clusters, heads, False, D, BD, BM, BC)
    elif tl.program_id(1) == 1:
        sum_tile(K, OF_KEYS, OF_KEYS, DK, k_strides, row, tile, n, w, clusters, heads, False, D, BD, BM, BC)
    else:
        sum_tile(V, OF_KEYS, OF_KEYS, DV, v_strides, row, tile, n, w, clusters, heads, False, E, BE, BM, BC)
