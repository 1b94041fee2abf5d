"""Prefix scans along the tokens in logarithmically many steps, and how tokens are cut into chunks.

Tensors are (b g n ...): batch, key-value heads, tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.budget import budget
from regard.transforms import exporting

TensorTuple = tuple[Tensor, ...]
Join = Callable[[TensorTuple, TensorTuple], TensorTuple]


def prefix_sum(x: Tensor, first: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return y_i = keep_i y_{i-1} + x_i along the third dimension, from y_{-1} = first; plain sums without keep."""
    if keep is None:
        if torch.compiler.is_compiling():
            return x.cumsum(2) + first.unsqueeze(2)
        return prefix_scan(_join_sums, (x,), (first,))[0]
    one = torch.ones_like(keep[:, :, 0])
    return prefix_scan(_join_decay, (keep, x), (one, first))[1]


def cumulative_max(x: Tensor, first: Tensor) -> Tensor:
    """Return the maximum of `first` and all x up to each, along the third dimension."""
    if torch.compiler.is_compiling():
        largest = x.cummax(2).values
        return torch.maximum(largest, first.unsqueeze(2))
    return prefix_scan(_join_maxima, (x,), (first,))[0]


def prefix_scan(join: Join, parts: TensorTuple, first: TensorTuple) -> TensorTuple:
    """Return y_i = join(y_{i-1}, x_i) along the third dimension of parts (b g n ...), from y_{-1} = first (b g ...).

    `join` is associative. All blocks of `prefix_steps` tokens are scanned at once, then their ends in the same way: work n, steps
    prefix_steps log n / log prefix_steps.
    """
    n, size = parts[0].shape[2], budget(parts[0].device).prefix_steps
    if torch.compiler.is_compiling():
        return _prefix_of_any(join, parts, first, size, size // 2)
    if n <= size:
        steps = _prefix_steps(join, parts, 2, first)
        return tuple(torch.stack(y, 2) for y in zip(*steps, strict=True))
    chunks = tuple(split_chunks(x, size) for x in parts)
    local = _prefix_steps(join, chunks, 3)
    ends = prefix_scan(join, local[-1], first)
    return _behind_earlier_blocks(join, local, ends, first, n)


def _prefix_of_any(join: Join, parts: TensorTuple, first: TensorTuple, size: int, most: int) -> TensorTuple:
    """As prefix_scan, in one graph for all n < most and one more for each factor of `size`; surplus steps act on zeros."""
    n = parts[0].shape[2]
    if n < most:
        padded = tuple(pad_tokens(x, most) for x in parts)
        steps = _prefix_steps(join, padded, 2, first)
        return tuple(torch.stack(y, 2)[:, :, :n] for y in zip(*steps, strict=True))
    chunks = tuple(split_chunks(x, size) for x in parts)
    local = _prefix_steps(join, chunks, 3)
    ends = _prefix_of_any(join, local[-1], first, size, 2 * size)
    return _behind_earlier_blocks(join, local, ends, first, n)


def _behind_earlier_blocks(join: Join, local: list[TensorTuple], ends: TensorTuple, first: TensorTuple, n: int) -> TensorTuple:
    """The scans inside all blocks, joined with the scan up to the end of the block before."""
    starts = tuple(shift_tokens(y, y0).unsqueeze(3) for y, y0 in zip(ends, first, strict=True))
    blocks = tuple(torch.stack(y, 3) for y in zip(*local, strict=True))
    joined = join(starts, blocks)
    return tuple(y.flatten(2, 3)[:, :, :n] for y in joined)


def _prefix_steps(join: Join, parts: TensorTuple, dim: int, first: TensorTuple | None = None) -> list[TensorTuple]:
    """The scan in one step for each index of `dim`."""
    scanned: list[TensorTuple] = []
    tokens = [x.unbind(dim) for x in parts]
    for step in zip(*tokens, strict=True):
        last = scanned[-1] if scanned else first
        scanned.append(step if last is None else join(last, step))
    return scanned


def _join_sums(a: TensorTuple, b: TensorTuple) -> TensorTuple:
    """Add two sums."""
    return (a[0] + b[0],)


def _join_maxima(a: TensorTuple, b: TensorTuple) -> TensorTuple:
    """Take the larger of two maxima."""
    return (torch.maximum(a[0], b[0]),)


def _join_decay(a: TensorTuple, b: TensorTuple) -> TensorTuple:
    """Compose two maps y -> keep y + x."""
    return a[0] * b[0], torch.addcmul(b[1], b[0], a[1])


def shift_tokens(y: Tensor, first: Tensor) -> Tensor:
    """Return what is there before each step (b g n ...), from what is there after it and before the first (b g ...)."""
    if torch.compiler.is_compiling():  # where one step less could be one step: a size that has graphs of its own
        return torch.cat([first.unsqueeze(2), y], 2)[:, :, : y.shape[2]]
    return torch.cat([first.unsqueeze(2), y[:, :, :-1]], 2)


def decay_to_end(log_decay: Tensor) -> Tensor:
    """Return the share of each token that is left after those behind it, from log decays (b g n ...)."""
    suffix = log_decay.flip(2).cumsum(2).flip(2)
    none = torch.zeros_like(suffix[:, :, :1])
    return torch.cat([suffix[:, :, 1:], none], 2).exp()


def pad_tokens(x: Tensor, size: int) -> Tensor:
    """Append zeros: (b g n ...) -> (b g size ...)."""
    behind = (0, 0) * (x.dim() - 3)
    return F.pad(x, (*behind, 0, size - x.shape[2]))


def split_chunks(x: Tensor, size: int) -> Tensor:
    """Cut (b g n ...) into chunks (b g c size ...), filled up with zeros: a token of zeros writes nothing and decays nothing.

    Under torch.compile there are always two chunks or more and something to fill up: graphs differ for sizes of 0 and 1.
    """
    if exporting() and isinstance(x.shape[2], torch.SymInt):  # torch cannot prove that the chunks hold every length of a range
        raise NotImplementedError(
            "kernels that go in chunks are exported for one length: leave the length out of dynamic_shapes, the batch may stay"
        )
    if torch.compiler.is_compiling():
        chunks = max(x.shape[2] // size + 1, 2)
        return pad_tokens(x, chunks * size).unflatten(2, (chunks, size))
    if missing := -x.shape[2] % size:
        behind = (0, 0) * (x.dim() - 3)
        x = F.pad(x, (*behind, 0, missing))
    return x.contiguous().unflatten(2, (-1, size))
