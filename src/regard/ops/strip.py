"""Work on many tiles, some at a time: what a piece needs in between is forgotten, and computed once more in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from regard.transforms import exporting, transformed

CPU, GPU = 1 << 21, 1 << 26  # elements of the largest tensor in between: it fits a CPU's caches, or keeps a GPU busy
COMPILED_STRIPS = 4  # times as much in a graph of torch.compile, before it is one of several pieces


def in_strips(
    f: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor | None, ...], dim: int, each: int
) -> tuple[Tensor, ...]:
    """f(*tensors), which works on every index of `dim` by itself, a few indices at a time; `each` elements are made per index.

    A tensor that is None, or has size 1 in `dim`, goes whole to every piece. Results are joined in `dim`.
    """
    if exporting():  # of any size: a piece would fix it
        return f(*tensors)
    present = [x for x in tensors if x is not None]
    room = CPU if present[0].device.type == "cpu" else GPU
    if torch.compiler.is_compiling():
        n = next((x.shape[dim] for x in present if x.shape[dim] != 1), 1)
        return in_even_strips(f, tensors, (dim,) * len(tensors), dim, n, each, room)
    n = max(x.shape[dim] for x in present)
    size = max(1, room // max(1, each))
    if n <= size:
        return f(*tensors)
    again = torch.is_grad_enabled() and any(x.requires_grad for x in present) and not transformed()
    # split, not narrow: its backward pass writes every gradient once, where narrow's would fill it with zeros for every piece
    parts = [[x] * -(-n // size) if x is None or x.shape[dim] == 1 else x.split(size, dim) for x in tensors]
    found = [checkpoint(f, *x, use_reentrant=False) if again else f(*x) for x in zip(*parts, strict=True)]
    return tuple(torch.cat(parts, dim) for parts in zip(*found, strict=True))


def in_even_strips(
    f: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    dims: Sequence[int | None],
    dim: int,
    n: int,
    each: int,
    room: int,
) -> tuple[Tensor, ...]:
    """As in_pieces, for torch.compile: the number of pieces is a power of two, so that one graph serves many lengths n.

    A tensor is cut in its own one of `dims`, None: it goes whole to every piece. Results are joined in `dim`. Pieces are filled
    up with zeros.
    """
    count = 1
    while n * each > COMPILED_STRIPS * room * count:
        count *= 2
    if count == 1:
        return f(*tensors)
    size = n // count + 1  # always something to fill up: a graph without that would be another one
    parts = [_even(x, own, count, size) for x, own in zip(tensors, dims, strict=True)]
    again = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    found = [checkpoint(f, *x, use_reentrant=False) if again else f(*x) for x in zip(*parts, strict=True)]
    return tuple(torch.cat(parts, dim).narrow(dim, 0, n) for parts in zip(*found, strict=True))


def _even(x: Tensor | None, dim: int | None, count: int, size: int) -> Sequence[Tensor | None]:
    if x is None or dim is None or x.shape[dim] == 1:
        return [x] * count
    more = (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, count * size - x.shape[dim])
    return pad(x, more).unflatten(dim, (count, size)).unbind(dim)
