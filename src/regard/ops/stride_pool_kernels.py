"""Triton kernels of weighted sums of consecutive tokens: see `regard.ops.stride_pool`."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.bucket.triton_kernels import head_at, load_tokens, store_tokens


@triton.jit
def fill_up(slot, n, rate):
    """Return what sums of strides are multiplied by: rate / the number of their tokens, 1 where they are full."""
    count = tl.minimum(n - slot * rate, rate)
    return rate.to(tl.float32) / tl.maximum(count, 1).to(tl.float32)


@triton.jit
def store_sums(
    X, TAPS, OUT, sxb, sxh, sxn, pid, n, rate, slots, tiles, heads, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr
):
    """Write the sums of a tile of strides of one head of X (b h n D): OUT (rows slots D)."""
    row = pid // tiles
    slot = pid % tiles * BM + tl.arange(0, BM)
    X = head_at(X, row, sxb, sxh, heads, 1)
    TAPS += row % heads * rate
    total = tl.zeros([BM, BD], tl.float32)
    for u in range(0, rate):
        token = slot * rate + u
        total += load_tokens(X, token, sxn, token < n, D, BD).to(tl.float32) * tl.load(TAPS + u).to(tl.float32)
    total = total * fill_up(slot, n, rate)[:, None]
    store_tokens(OUT + row.to(tl.int64) * slots * D, slot, D, total, slot < slots, D, BD)


@triton.jit(do_not_specialize=["n", "rate", "slots", "tiles", "heads", "programs"])
def stride_sums(
    K, V, TAPS_K, TAPS_V, OUT_K, OUT_V, skb, skh, skn, svb, svh, svn, n, rate, slots, tiles, heads, programs,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the sums of strides of keys by the first `programs`, of values by the others."""
    pid = tl.program_id(0)
    if pid < programs:
        store_sums(K, TAPS_K, OUT_K, skb, skh, skn, pid, n, rate, slots, tiles, heads, D, BD, BM)
    else:
        store_sums(V, TAPS_V, OUT_V, svb, svh, svn, pid - programs, n, rate, slots, tiles, heads, E, BE, BM)


@triton.jit
def store_gradients(
    X, TAPS, GRAD, OTHER, DX, PARTS, sxb, sxh, sxn, sgb, sgh, sgn, sob, soh, son, sdb, sdh, sdn,
    pid, n, rate, slots, tiles, heads, ADD: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the tokens of a tile of strides, and what they add to those of TAPS: PARTS (programs rate).

    ADD: with those that tokens have from elsewhere, OTHER.
    """
    row = pid // tiles
    slot = pid % tiles * BM + tl.arange(0, BM)
    X = head_at(X, row, sxb, sxh, heads, 1)
    DX = head_at(DX, row, sdb, sdh, heads, 1)
    OTHER = head_at(OTHER, row, sob, soh, heads, 1)
    TAPS += row % heads * rate
    grad = load_tokens(head_at(GRAD, row, sgb, sgh, heads, 1), slot, sgn, slot < slots, D, BD).to(tl.float32)
    grad = grad * fill_up(slot, n, rate)[:, None]
    PARTS += pid.to(tl.int64) * rate
    for u in range(0, rate):
        token = slot * rate + u
        x = load_tokens(X, token, sxn, token < n, D, BD).to(tl.float32)
        dx = grad * tl.load(TAPS + u).to(tl.float32)
        if ADD:
            dx += load_tokens(OTHER, token, son, token < n, D, BD).to(tl.float32)
        store_tokens(DX, token, sdn, dx, token < n, D, BD)
        tl.store(PARTS + u, tl.sum(tl.sum(x * grad, 1), 0))


@triton.jit(do_not_specialize=["n", "rate", "slots", "tiles", "heads", "programs"])
def stride_gradients(
    K, V, TAPS_K, TAPS_V, GRAD_K, GRAD_V, OTHER_K, OTHER_V, DK, DV, PARTS,
    skb, skh, skn, svb, svh, svn, sgb, sgh, sgn, shb, shh, shn, sob, soh, son, spb, sph, spn, sdb, sdh, sdn, seb, seh, sen,
    n, rate, slots, tiles, heads, programs,
    ADD: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys by the first `programs`, of values by the others: DK, DV, and PARTS (2 programs rate)."""
    pid = tl.program_id(0)
    if pid < programs:
        store_gradients(
            K, TAPS_K, GRAD_K, OTHER_K, DK, PARTS, skb, skh, skn, sgb, sgh, sgn, sob, soh, son, sdb, sdh, sdn,
            pid, n, rate, slots, tiles, heads, ADD, D, BD, BM,
        )  # fmt: skip
    else:
        PARTS += programs.to(tl.int64) * rate
        store_gradients(
            V, TAPS_V, GRAD_V, OTHER_V, DV, PARTS, svb, svh, svn, shb, shh, shn, spb, sph, spn, seb, seh, sen, pid - programs, n,
            rate, slots, tiles, heads, ADD, E, BE, BM,
        )  # fmt: skip
