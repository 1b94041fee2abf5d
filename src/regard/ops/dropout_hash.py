"""Dropout of attention weights as a function of a seed and of which pair it is: no generator, no state, no order.

The weight of head h (counted over all rows of a batch) for the query at position i and the key at position j is dropped if

    mix(query_keys(seed, h, i) xor key_keys(seed, j)) < threshold(rate)      in 32-bit integers that wrap around

so that every tiling, every backend and every order of computation drops the same weights. Both keys are 32 bits of a 64-bit
mixing function of all that they depend on. What is computed for every pair is short: one product, one shift, one product.
Multipliers are the fractional parts of the golden ratio and of the square root of two, made odd.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN, SQRT2 = 0x9E3779B97F4A7C15 - 2**64, 0x6A09E667F3BCC909  # as signed 64-bit integers
GOLDEN_32, SQRT2_32 = 0x9E3779B9 - 2**32, 0x6A09E667  # as signed 32-bit integers
HIGH32 = (1 << 32) - 1


def draw_seed(device: torch.device) -> Tensor:
    """Draw the seed of one call from PyTorch's generator of the device, () int64."""
    return torch.randint(2**62, (), dtype=torch.long, device=device)


def row_seed(seed: Tensor, row: int) -> Tensor:
    """Derive the seed of one row of a batch that is computed by itself."""
    return _mix64(_mix64(seed) + row)


def query_keys(seed: Tensor, head: Tensor, i: Tensor) -> Tensor:
    """Return the keys (int32) of queries at positions i of heads numbered over the batch; both broadcast."""
    start = _mix64(seed ^ (head * GOLDEN))
    mixed = _mix64(start + i * SQRT2)
    return (mixed >> 32).to(torch.int32)


def key_keys(seed: Tensor, j: Tensor) -> Tensor:
    """Return the keys (int32) of keys at positions j, the same for all heads."""
    start = _mix64(~seed)
    mixed = _mix64(start + j * SQRT2)
    return (mixed >> 32).to(torch.int32)


def kept_pairs(query: Tensor, key: Tensor, rate: float, out: Tensor, work: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Write 1 for pairs that are kept and 0 for dropped ones into `out`, of the shape that both keys broadcast to.

    work: two int32 tensors of that shape, which are overwritten.
    """
    if work is None:
        x = torch.empty(out.shape, dtype=torch.int32, device=out.device)
        y = torch.empty_like(x)
    else:
        x, y = work
    torch.bitwise_xor(query, key, out=x)
    x.mul_(GOLDEN_32)
    torch.bitwise_right_shift(x, 15, out=y)
    y.bitwise_and_(0x1FFFF)  # a logical shift
    x.bitwise_xor_(y).mul_(SQRT2_32)
    return torch.ge(x, keep_threshold(rate), out=out)


def kept_pairs_composite(query: Tensor, key: Tensor, rate: float) -> Tensor:
    """Return the same as booleans, in operations that every transform can follow."""
    x = (query ^ key) * GOLDEN_32
    y = (x >> 15) & 0x1FFFF  # a logical shift
    x = (x ^ y) * SQRT2_32
    return x >= keep_threshold(rate)


def head_numbers(rows: int, heads: int, chosen: list[int] | slice, device: torch.device) -> Tensor:
    """Number the chosen heads of all rows of a batch, (rows, chosen)."""
    every = torch.arange(rows * heads, device=device).view(rows, heads)
    return every[:, chosen]


def keep_threshold(rate: float) -> int:
    """Return the smallest 32-bit integer that is kept: a share `rate` of all is smaller."""
    dropped = round(rate * 2**32)
    return min(dropped, HIGH32) - 2**31


def _mix64(x: Tensor) -> Tensor:
    """Mix 64 bits: every bit of the result depends on all bits of x."""
    for shift, factor in ((29, GOLDEN), (32, SQRT2), (31, GOLDEN)):
        low_bits = (1 << (64 - shift)) - 1
        shifted = (x >> shift) & low_bits  # a logical shift
        x = (x ^ shifted) * factor
    high = (x >> 32) & HIGH32
    return x ^ high
