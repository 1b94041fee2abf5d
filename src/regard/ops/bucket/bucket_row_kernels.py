"""Triton kernels of single rows: labels of keys, and rows of tokens that clusters took."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import head_at, load_tokens, store_tokens


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


@triton.jit(do_not_specialize=["n", "each", "w", "heads", "tiles"])
def gather_rows(
    X, INDEX, REAL, TIMES, Y, sb, sh, sn, n, each, w, heads, tiles,
    MASKED: tl.constexpr, MEAN: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write rows of X through INDEX, `each` tokens in a row, w of them in a cluster; MASKED: 0 for those that are not real,
    REAL (rows w). MEAN: divided by how often the token is taken, TIMES (rows n).
    """
    pid = tl.program_id(0)
    row = pid // tiles
    i = pid % tiles * BM + tl.arange(0, BM)
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


@triton.jit(do_not_specialize=["n", "w", "clusters", "heads", "tiles"])
def sum_rows(
    X, WHERE, OUT, sb, sh, sn, n, w, clusters, heads, tiles,
    MEAN: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the sum, or the mean, of the rows of X (rows clusters w E) that belong to a token: in every cluster the one at
    WHERE (rows clusters n), none where that is -1.
    """
    pid = tl.program_id(0)
    row = pid // tiles
    i = pid % tiles * BM + tl.arange(0, BM)
    inside = i < n
    total = tl.zeros([BM, BE], tl.float32)
    times = tl.zeros([BM], tl.int32)
    for first in range(0, clusters, STEP):
        for step in tl.static_range(STEP):  # unrolled: loads do not wait for each other
            c = first + step
            cluster = row.to(tl.int64) * clusters + c
            place = tl.load(WHERE + cluster * n + i, mask=inside & (c < clusters), other=-1)
            total += load_tokens(X + cluster * w * E, place, E, place >= 0, E, BE).to(tl.float32)
            times += (place >= 0).to(tl.int32)
    if MEAN:
        total = total / tl.maximum(times, 1).to(tl.float32)[:, None]
    store_tokens(head_at(OUT, row, sb, sh, heads, 1), i, sn, total, inside, E, BE)
