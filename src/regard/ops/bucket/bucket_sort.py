"""Order tokens by label: after one stable sort, what a token attends to is a range of the order.

Letters: x rows (batch and heads), n tokens, r rounds. Labels (x r n) are 0 .. count - 1; padding has label `count`, is sorted
behind all others, sees nothing and is not seen. Shapes never depend on labels: no host waits, one graph compiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.patterns.tiles import ceil_div
from regard.transforms import transformed


class SortedTokens(NamedTuple):
    """Tokens in the order of their labels, and by time among equals; all (x r n)."""

    order: Tensor  # the token at each place
    place: Tensor  # the place of each token
    first: Tensor  # the first place that holds the token's label
    last: Tensor


class SortedRange(NamedTuple):
    """What each token sees: the places low .. high of the sorted order, all (x r n). Tiles of p places see `back` tiles more."""

    order: Tensor
    place: Tensor
    low: Tensor
    high: Tensor
    p: int
    back: int


def sort_by_bucket(labels: Tensor, count: int) -> SortedTokens:
    labels = labels.long()
    order = labels.sort(dim=-1, stable=True).indices
    number = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    place = torch.empty_like(order)
    place = place.scatter(-1, order, number) if transformed() else place.scatter_(-1, order, number)
    size = labels.new_zeros(*labels.shape[:-1], count + 1)
    size = size.scatter_add_(-1, labels, torch.ones_like(labels))
    end = size.cumsum(-1)
    first = (end - size).gather(-1, labels)
    last = end.gather(-1, labels) - 1
    return SortedTokens(order, place, first, last)


def newest_per_bucket(labels: Tensor, count: int, window: int) -> SortedRange:
    """Return what causal tokens see: the `window` newest of their label up to themselves, whatever comes later."""
    order, place, first, _ = sort_by_bucket(labels, count)
    n = labels.shape[-1]
    p = min(max(window // 2, 16), 128, n)  # a tile of p queries has p + window keys; below 16 there is little left to save
    high = torch.where(labels < count, place, -1)
    low = torch.maximum(first, place - window + 1)
    reach = ceil_div(window - 1, p)
    back = min(reach, ceil_div(n, p) - 1)
    return SortedRange(order, place, low, high, p, back)


def chunk_stretch(labels: Tensor, count: int, chunk: int) -> SortedRange:
    """Return what tokens see in chunks of the sorted order: those of their label in their own chunk and in the one before."""
    order, place, first, last = sort_by_bucket(labels, count)
    p = min(chunk, labels.shape[-1])
    start = place // p * p
    high = torch.minimum(last, start + p - 1)
    high = torch.where(labels < count, high, -1)
    low = torch.maximum(first, start - p)
    back = int(p < labels.shape[-1])
    return SortedRange(order, place, low, high, p, back)
