"""Triton kernels that sort tokens by few labels: labels are counted in blocks of tokens, then every token finds its place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_labels(LABELS, line, position, sb, sh, sr, sn, n, heads, rounds):
    """Load the labels of tokens of a line, a row and a round; -1 behind the last token."""
    row = line // rounds
    LABELS += row // heads * sb + row % heads * sh + line % rounds * sr
    return tl.load(LABELS + position.to(tl.int64) * sn, mask=position < n, other=-1)


@triton.jit(do_not_specialize=["n", "blocks", "heads", "rounds"])
def count_labels(LABELS, COUNTS, sb, sh, sr, sn, n, blocks, heads, rounds, SIZE: tl.constexpr, BB: tl.constexpr):
    """Write how many tokens of a block of SIZE tokens have each label, COUNTS (lines blocks BB)."""
    pid = tl.program_id(0)
    line = (pid // blocks).to(tl.int64)
    position = pid % blocks * SIZE + tl.arange(0, SIZE)
    found = load_labels(LABELS, line, position, sb, sh, sr, sn, n, heads, rounds)
    total = tl.histogram(found.to(tl.int32), BB, mask=position < n)
    tl.store(COUNTS + pid.to(tl.int64) * BB + tl.arange(0, BB), total)


@triton.jit(do_not_specialize=["n", "blocks", "total", "buckets", "heads", "rounds"])
def place_tokens(
    LABELS, COUNTS, PLACES, sb, sh, sr, sn, n, blocks, total, buckets, heads, rounds,
    MARKS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, BB: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Write PLACES of a block of tokens as `token_places` does, from the counts of all blocks of the line.

    A program is one warp, and a thread compares its token to all of a step: nothing waits for another warp.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    line = (pid // blocks).to(tl.int64)
    label = tl.arange(0, BB)
    every = tl.zeros([BB], tl.int32)
    before = tl.zeros([BB], tl.int32)
    for low in range(0, blocks, BT):
        t = low + tl.arange(0, BT)
        count = tl.load(COUNTS + (line * blocks + t)[:, None] * BB + label[None, :], mask=(t < blocks)[:, None], other=0)
        every += tl.sum(count, 0)
        before += tl.sum(tl.where((t < block)[:, None], count, 0), 0)
    end = tl.cumsum(every, 0)
    begin = end - every
    free = begin + before  # the next place of each label
    begin = tl.where(label == buckets, n, begin)  # of padding: a range without places
    end = tl.where(label == buckets, 0, end)
    PLACES += line * n
    total = total.to(tl.int64)
    step = tl.arange(0, STEP)
    earlier = step[:, None] < step[None, :]
    for start in range(block * SIZE, tl.minimum(block * SIZE + SIZE, n), STEP):
        position = start + step
        inside = position < n
        found = load_labels(LABELS, line, position, sb, sh, sr, sn, n, heads, rounds)
        rank = tl.sum(((found[:, None] == found[None, :]) & earlier).to(tl.int32), 0)  # among the tokens of its label
        at = tl.maximum(found, 0).to(tl.int32)
        place = tl.gather(free, at, 0) + rank
        first = tl.gather(begin, at, 0)
        last = tl.gather(end, at, 0) - 1
        tl.store(PLACES + place, position, mask=inside)
        tl.store(PLACES + total + place, first, mask=inside)
        tl.store(PLACES + 2 * total + place, last, mask=inside)
        if MARKS:
            tl.store(PLACES + 3 * total + position, place, mask=inside)
            tl.store(PLACES + 4 * total + position, first, mask=inside)
            tl.store(PLACES + 5 * total + position, last, mask=inside)
        free += tl.histogram(at, BB, mask=inside)
