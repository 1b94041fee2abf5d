"""Work on many tiles, some at a time: what a piece needs in between is forgotten, and computed once more in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.kernels.transforms import exporting, transformed

CPU, GPU = 1 << 21, 1 << 26  # elements of the largest tensor in between: it fits a CPU's caches, or keeps a GPU busy


def in_pieces(
    f: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor | None, ...], dim: int, each: int
) -> tuple[Tensor, ...]:
    """f(*tensors), which works on every index of `dim` by itself, a few indices at a time; `each` elements are made per index.

    A tensor that is None, or has size 1 in `dim`, goes whole to every piece. Results are joined in `dim`.
    """
    if exporting():  # of any size: a piece would fix it
        return f(*tensors)
    present = [x for x in tensors if x is not None]
    n = max(x.shape[dim] for x in present)
    size = max(1, (CPU if present[0].device.type == "cpu" else GPU) // max(1, each))
    if n <= size:
        return f(*tensors)
    again = torch.is_grad_enabled() and any(x.requires_grad for x in present) and not transformed()
    # split, not narrow: its backward pass writes every gradient once, where narrow's would fill it with zeros for every piece
    parts = [[x] * -(-n // size) if x is None or x.shape[dim] == 1 else x.split(size, dim) for x in tensors]
    found = [checkpoint(f, *x, use_reentrant=False) if again else f(*x) for x in zip(*parts, strict=True)]
    return tuple(torch.cat(parts, dim) for parts in zip(*found, strict=True))
