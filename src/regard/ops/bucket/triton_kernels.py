"""Triton kernels of bucketed attention: rows are loaded through the sorted order, masks are arithmetic on places.

A row is a query head of the batch, a place an index of the sorted order of one round. Programs own tiles of places. A token has
one place in every round, so rounds run one after the other and add to what earlier rounds stored: no atomics, and nothing has a
dimension of rounds but integers. Score tiles are base-2 logarithms. A pair counts in the first round that holds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.ops.triton_math import LOG2E, hash_keeps

FLOOR = tl.constexpr(-1.0e20)  # below every score: the log-sum-exp of no pairs so far
HIDDEN = tl.constexpr(-1.0e30)  # score of a pair that is not seen: exp2(HIDDEN - FLOOR) is 0
LONELY = tl.constexpr(1.0e30)  # log-sum-exp of a row without pairs in the backward pass: its weights become 0


@triton.jit(do_not_specialize=["n", "tiles", "buckets", "bits", "heads", "rounds"])
def sort_codes(LABELS, CODES, sb, sh, sr, sn, n, tiles, buckets, bits, heads, rounds, SIZE: tl.constexpr):
    """Write what is sorted: the line (row and round), the label and the position of every token, in one integer."""
    pid = tl.program_id(0)
    line = (pid // tiles).to(tl.int64)
    position = pid % tiles * SIZE + tl.arange(0, SIZE)
    inside = position < n
    row = line // rounds
    LABELS += row // heads * sb + row % heads * sh + line % rounds * sr
    label = tl.load(LABELS + position.to(tl.int64) * sn, mask=inside, other=0)
    code = ((line * (buckets + 1) + label) << bits) | position
    tl.store(CODES + line * n + position, code.to(CODES.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "tiles", "bits"])
def label_bounds(CODES, FIRST, LAST, n, tiles, bits, SIZE: tl.constexpr):
    """Write the first and the last place of every label of every line, where tokens have it."""
    pid = tl.program_id(0)
    CODES += (pid // tiles).to(tl.int64) * n
    place = pid % tiles * SIZE + tl.arange(0, SIZE)
    inside = place < n
    group = tl.load(CODES + place, mask=inside, other=0).to(tl.int64) >> bits
    before = tl.load(CODES + place - 1, mask=inside & (place > 0), other=0).to(tl.int64) >> bits
    behind = tl.load(CODES + place + 1, mask=place < n - 1, other=0).to(tl.int64) >> bits
    tl.store(FIRST + group, place, mask=inside & ((place == 0) | (group != before)))
    tl.store(LAST + group, place, mask=inside & ((place == n - 1) | (group != behind)))


@triton.jit
def seen_places(p, first, last, reach, CAUSAL: tl.constexpr):
    """Return the first and the last place that tokens at places p see."""
    if CAUSAL:
        low = tl.maximum(first, p - reach + 1)
        high = tl.minimum(last, p)
    else:
        start = p // reach * reach
        low = tl.maximum(first, start - reach)
        high = tl.minimum(last, start + reach - 1)
    return low, high


@triton.jit
def other_places(p, first, last, reach, CAUSAL: tl.constexpr, OWN: tl.constexpr):
    """Return the same without the token itself, where it is the last of them and does not count."""
    low, high = seen_places(p, first, last, reach, CAUSAL)
    if CAUSAL and not OWN:
        high = tl.minimum(high, p - 1)
    return low, high


@triton.jit
def number_of_places(low, high):
    """Return the number of places of ranges, unsigned."""
    return tl.maximum(high - low + 1, 0).to(tl.uint32, bitcast=True)


@triton.jit
def within(place, low, number):
    """Return whether places are in ranges that begin at `low`, in one comparison."""
    return (place - low).to(tl.uint32, bitcast=True) < number


@triton.jit
def seeing_places(p, first, last, reach, CAUSAL: tl.constexpr, OWN: tl.constexpr):
    """Return the first and the last place whose tokens see the tokens at places p; without the token itself, where it is the
    first of them and does not count.
    """
    if CAUSAL:
        low = tl.maximum(first, p if OWN else p + 1)
        high = tl.minimum(last, p + reach - 1)
    else:
        start = p // reach * reach
        low = tl.maximum(first, start)
        high = tl.minimum(last, start + 2 * reach - 1)
    return low, high


@triton.jit(do_not_specialize=["n", "tiles", "total", "buckets", "bits"])
def token_places(
    CODES, FIRST, LAST, PLACES, n, tiles, total, buckets, bits, MARKS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Write PLACES (3 or 6, lines n): by place its token, the first and the last place of its label; by token its place and the
    same two. For padding these are n and -1: a range without places.
    """
    pid = tl.program_id(0)
    total = total.to(tl.int64)
    line = (pid // tiles).to(tl.int64)
    PLACES += line * n
    place = pid % tiles * SIZE + tl.arange(0, SIZE)
    inside = place < n
    code = tl.load(CODES + line * n + place, mask=inside, other=0).to(tl.int64)
    group = code >> bits
    token = (code - (group << bits)).to(tl.int32)
    padding = group - line * (buckets + 1) == buckets
    first = tl.where(padding, n, tl.load(FIRST + group, mask=inside, other=0))
    last = tl.where(padding, -1, tl.load(LAST + group, mask=inside, other=0))
    tl.store(PLACES + place, token, mask=inside)
    tl.store(PLACES + total + place, first, mask=inside)
    tl.store(PLACES + 2 * total + place, last, mask=inside)
    if MARKS:
        tl.store(PLACES + 3 * total + token, place, mask=inside)
        tl.store(PLACES + 4 * total + token, first, mask=inside)
        tl.store(PLACES + 5 * total + token, last, mask=inside)


@triton.jit
def load_tokens(X, token, stride, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of tokens, (tokens, BLOCK); columns behind SIZE are 0."""
    c = tl.arange(0, BLOCK)
    at = X + token.to(tl.int64)[:, None] * stride + c[None, :]
    if SIZE == BLOCK:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at, mask=inside[:, None] & (c[None, :] < SIZE), other=0.0)


@triton.jit
def store_tokens(X, token, stride, x, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    at = X + token.to(tl.int64)[:, None] * stride + c[None, :]
    tl.store(at, x.to(X.dtype.element_ty), mask=inside[:, None] & (c[None, :] < SIZE))


@triton.jit
def head_at(X, row, sb, sh, heads, share):
    """Return the pointer to the key-value head of a row."""
    b = row // heads
    h = row % heads // share
    return X + b.to(tl.int64) * sb + h.to(tl.int64) * sh


@triton.jit
def earlier_ranges(MARKS, token, inside, n, total, reach, ROUND: tl.constexpr, CAUSAL: tl.constexpr, KEYS: tl.constexpr):
    """Return what queries see in the rounds before ROUND, or which queries see KEYS: a tuple of first places and numbers."""
    found = ()
    for r in tl.static_range(ROUND):
        p = tl.load(MARKS + r * n + token, mask=inside, other=0)
        first = tl.load(MARKS + total + r * n + token, mask=inside, other=1)
        last = tl.load(MARKS + 2 * total + r * n + token, mask=inside, other=-1)
        if KEYS:
            low, high = seeing_places(p, first, last, reach, CAUSAL, True)
        else:
            low, high = seen_places(p, first, last, reach, CAUSAL)
        found = found + ((low, number_of_places(low, high)),)  # type: ignore[assignment]  # noqa: RUF005 - what Triton compiles
    return found


@triton.jit
def earlier_places(MARKS, token, inside, n, ROUND: tl.constexpr):
    """Load the places of tokens in the rounds before ROUND, as a tuple."""
    found = ()
    for r in tl.static_range(ROUND):
        found = found + (tl.load(MARKS + r * n + token, mask=inside, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["n", "total", "reach", "heads", "rounds", "tiles", "threshold"])
def bucket_forward(
    Q, K, V, OUT, SUM, LSE, SHORT, PLACES, ASKING, THERE,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son,
    n, total, reach, heads, rounds, tiles, scale, threshold, keep,
    SHARE: tl.constexpr, ROUND: tl.constexpr, LAST_ROUND: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    UNIT: tl.constexpr, DROP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the pairs of one round to the outputs of a tile of queries: SUM (rows n E) in float32 and LSE (rows n) hold what
    earlier rounds found. The last round writes OUT, and LONELY for rows without pairs into LSE.
    """
    total = total.to(tl.int64)
    pid = tl.program_id(0)
    row = pid // tiles
    line = (row * rounds + ROUND).to(tl.int64)
    ORDER = PLACES + line * n
    MARKS = PLACES + 3 * total + row.to(tl.int64) * rounds * n
    Q = head_at(Q, row, sqb, sqh, heads, 1)
    OUT = head_at(OUT, row, sob, soh, heads, 1)
    K = head_at(K, row, skb, skh, heads, SHARE)
    V = head_at(V, row, svb, svh, heads, SHARE)
    SHORT += (row // SHARE).to(tl.int64) * n
    SUM += row.to(tl.int64) * n * E
    LSE += row.to(tl.int64) * n
    p = pid % tiles * BM + tl.arange(0, BM)
    inside = p < n
    token = tl.load(ORDER + p, mask=inside, other=0)
    first = tl.load(ORDER + total + p, mask=inside, other=n)
    last = tl.load(ORDER + 2 * total + p, mask=inside, other=-1)
    low, high = other_places(p, first, last, reach, CAUSAL, OWN)
    number = number_of_places(low, high)
    ranges = earlier_ranges(MARKS, token, inside, n, total, reach, ROUND, CAUSAL, False)
    q = load_tokens(Q, token, sqn, inside, D, BD)
    if DROP:
        asking = tl.load(ASKING + row.to(tl.int64) * n + token, mask=inside, other=0)
    if ROUND > 0:
        acc = load_tokens(SUM, token, E, inside, E, BE)
        top = tl.load(LSE + token, mask=inside, other=FLOOR)
        weight = tl.where(top > FLOOR, 1.0, 0.0)
    else:
        acc = tl.zeros([BM, BE], tl.float32)
        top = tl.full([BM], FLOOR, tl.float32)
        weight = tl.zeros([BM], tl.float32)
    stop = tl.max(high) + 1
    for j0 in range(tl.min(low), stop, BN):
        j = j0 + tl.arange(0, BN)
        there = j < stop
        key = tl.load(ORDER + j, mask=there, other=0)
        k = load_tokens(K, key, skn, there, D, BD)
        v = load_tokens(V, key, svn, there, E, BE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if UNIT:
            short = tl.load(SHORT + key, mask=there, other=0.0)
            s *= (short * (scale * LOG2E))[None, :]
        else:
            s *= scale * LOG2E
        seen = within(j[None, :], low[:, None], number[:, None])
        if not OWN and not CAUSAL:
            seen = seen & (j[None, :] != p[:, None])
        at = earlier_places(MARKS, key, there, n, ROUND)
        for r in tl.static_range(ROUND):
            seen = seen & ~within(at[r][None, :], ranges[r][0][:, None], ranges[r][1][:, None])
        s = tl.where(seen, s, HIDDEN)
        new = tl.maximum(top, tl.max(s, 1))
        w = tl.exp2(s - new[:, None])
        fade = tl.exp2(top - new)
        weight = weight * fade + tl.sum(w, 1)
        if DROP:
            kept = hash_keeps(asking[:, None], tl.load(THERE + key, mask=there, other=0)[None, :], threshold)
            w = tl.where(kept, w * keep, 0.0)
        acc = acc * fade[:, None]
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new
    some = weight > 0
    safe = tl.where(some, weight, 1.0)
    acc = acc / safe[:, None]
    lse = top + tl.log2(safe)
    if not LAST_ROUND:
        store_tokens(SUM, token, E, acc, inside, E, BE)
        tl.store(LSE + token, lse, mask=inside)
    else:
        if not OWN:
            alone = inside & (weight == 0) & (last >= 0)
            value = load_tokens(V, token, svn, alone, E, BE).to(tl.float32)
            if DROP:
                kept = hash_keeps(asking, tl.load(THERE + token, mask=inside, other=0), threshold)
                value = value * tl.where(kept, keep, 0.0)[:, None]
            acc += value
        store_tokens(OUT, token, son, acc, inside, E, BE)
        tl.store(LSE + token, tl.where(some, lse, LONELY), mask=inside)


@triton.jit(do_not_specialize=["n", "heads", "tiles"])
def output_products(
    OUT, GRAD, DELTA, sob, soh, son, sgb, sgh, sgn, n, heads, tiles, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr
):
    """Write the product of every output row with its gradient, DELTA (rows n)."""
    pid = tl.program_id(0)
    row = pid // tiles
    i = pid % tiles * BM + tl.arange(0, BM)
    inside = i < n
    out = load_tokens(head_at(OUT, row, sob, soh, heads, 1), i, son, inside, E, BE)
    grad = load_tokens(head_at(GRAD, row, sgb, sgh, heads, 1), i, sgn, inside, E, BE)
    product = out.to(tl.float32) * grad.to(tl.float32)
    tl.store(DELTA + row.to(tl.int64) * n + i, tl.sum(product, 1), mask=inside)
