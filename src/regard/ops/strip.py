"""Strip mining: work on a long dimension, a strip of it at a time, so that what it makes in between stays small.

`in_strips` is for work on every index by itself: strips are computed once more in the backward pass, which keeps none of them.
`token_runs` is for work that passes a state from one strip to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from regard.ops.budget import budget
from regard.transforms import exporting, transformed

Tensors = Sequence[Tensor | None]
CutDims = Sequence[int | None]


def in_strips(
    f: Callable[..., tuple[Tensor, ...]],
    tensors: Tensors,
    dim: int,
    each: int,
    *,
    dims: CutDims | None = None,
    room: int | None = None,
    ends: bool = False,
    recompute: bool = True,
) -> tuple[Tensor, ...]:
    """Return f(*tensors), where f works on every index by itself, a strip of indices at a time. Results are joined in `dim`.

    each: elements of the largest tensor that f makes for one index; a strip makes at most `room`, by default the device's budget.
    dims: where each tensor is cut, by default in `dim`; None: it goes whole to every strip, as does one of size 1 there.
    ends: f takes one more argument in front, the index behind the last one of its strip or a later one.
    recompute: strips are computed once more in the backward pass. False: f keeps no more than its arguments for it.
    """
    if dims is None:
        dims = (dim,) * len(tensors)
    sizes = [x.shape[own] for x, own in zip(tensors, dims, strict=True) if x is not None and own is not None]
    first = next(x for x in tensors if x is not None)
    if room is None:
        room = budget(first.device).strip
    if torch.compiler.is_compiling() and not exporting():
        n = next((size for size in sizes if size != 1), 1)
        whole = partial(f, n) if ends else f
        return _in_even_strips(whole, tensors, dims, dim, n, each, room, recompute)
    n = max(sizes)
    each = max(1, each)
    size = max(1, room // each)
    args: tuple = (n, *tensors) if ends else tuple(tensors)
    if exporting() or first.is_meta or n <= size:  # a strip would fix the size of what is exported
        return f(*args)
    # split, not narrow: its backward pass writes every gradient once, where narrow's would fill it with zeros for every strip
    strips: dict[int, Sequence] = {i + ends: x.split(size, own) for i, x, own in _to_cut(tensors, dims)}
    if ends:
        strips[0] = range(size, n + size, size)
    again = recompute and torch.is_grad_enabled() and _any_grad(tensors) and not transformed()
    found = _computed(f, args, strips, again)
    return tuple(torch.cat(several, dim) for several in zip(*found, strict=True))


def _in_even_strips(
    f: Callable[..., tuple[Tensor, ...]], tensors: Tensors, dims: CutDims, dim: int, n: int, each: int, room: int, recompute: bool
) -> tuple[Tensor, ...]:
    """As in_strips, for torch.compile: the number of strips is a power of two, so that one graph serves many lengths n.

    Strips are filled up with zeros.
    """
    first = next(x for x in tensors if x is not None)
    count = 1
    limits = budget(first.device)
    most = limits.compiled_strips * room
    while n * each > most * count:
        count *= 2
    if count == 1:
        return f(*tensors)
    size = n // count + 1  # always something to fill up: a graph without that would be another one
    strips = {i: _even(x, own, count, size) for i, x, own in _to_cut(tensors, dims)}
    again = recompute and torch.is_grad_enabled() and _any_grad(tensors)
    found = _computed(f, tensors, strips, again)
    joined = [torch.cat(several, dim) for several in zip(*found, strict=True)]
    return tuple(x.narrow(dim, 0, n) for x in joined)


def _to_cut(tensors: Tensors, dims: CutDims) -> list[tuple[int, Tensor, int]]:
    """The tensors that are cut: index, tensor and dimension of each. The others go whole to every strip."""
    cut = []
    for i, (x, dim) in enumerate(zip(tensors, dims, strict=True)):
        if x is None or dim is None:
            continue
        if x.shape[dim] != 1:
            cut.append((i, x, dim))
    return cut


def _even(x: Tensor, dim: int, count: int, size: int) -> Sequence[Tensor]:
    """Strips of one size, filled up with zeros."""
    behind = x.dim() - 1 - dim % x.dim()  # dimensions behind this one
    missing = count * size - x.shape[dim]
    x = pad(x, (0, 0) * behind + (0, missing))
    return x.unflatten(dim, (count, size)).unbind(dim)


def _any_grad(tensors: Tensors) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _computed(
    f: Callable[..., tuple[Tensor, ...]], args: Sequence, strips: Mapping[int, Sequence], again: bool
) -> list[tuple[Tensor, ...]]:
    """f(*args) with some arguments replaced by each of their strips; again: computed once more in the backward pass.

    What goes whole to every strip is bound, not passed to `checkpoint`, which would save it once for each.
    """

    def one(*parts: object) -> tuple[Tensor, ...]:
        own = list(args)
        for i, part in zip(strips, parts, strict=True):
            own[i] = part
        return f(*own)

    every = zip(*strips.values(), strict=True)
    if again:
        return [checkpoint(one, *parts, use_reentrant=False) for parts in every]
    return [one(*parts) for parts in every]


def token_runs(tensors: Sequence[Tensor], each: int) -> list[tuple[Tensor, ...]]:
    """Cut tensors (b h n ...) into runs of whole chunks of tokens, for a state that goes from run to run.

    each: elements of the features of one token. One run under torch.compile: one graph serves any number of them.
    """
    limits, n = budget(tensors[0].device), tensors[0].shape[2]
    tokens = limits.features // max(each, 1)
    chunks = max(tokens // limits.chunk, 1)
    size = chunks * limits.chunk
    if n <= size or torch.compiler.is_compiling():
        return [tuple(tensors)]
    # split, not sliced run by run: the gradient of a slice is as long as the whole
    parts = [x.split(size, 2) for x in tensors]
    return list(zip(*parts, strict=True))
