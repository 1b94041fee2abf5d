"""What positions add to attention, by distance: to the score of a pair, and to its output.

    s_ij = scale q_i.k_j - slope |i - j| + by_query[i, c],   out_i = sum_j A_ij v_j,   mass[i, c] = sum of A_ij over j of class c

with the distance class c = clamp(i - j, -clip, clip) + clip. Values by distance are then mass times a table, outside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def distance_class(distance: Tensor, clip: int) -> Tensor:
    """Return the class of each distance i - j, from 0 to 2 clip."""
    return distance.clamp(-clip, clip) + clip


class ScoreBias(NamedTuple):
    """A bias by distance, as data."""

    slopes: Tensor | None = None  # (h)
    clip: int = 0
    by_query: Tensor | None = None  # (b h n classes)
    mass: bool = False  # return the weight of every class too, in further columns behind the values

    @property
    def classes(self) -> int:
        return 2 * self.clip + 1

    @property
    def more(self) -> int:
        """Return the number of columns behind the values."""
        return self.classes if self.mass else 0

    def of(self, distance: Tensor) -> Tensor:
        """Return the class of each distance."""
        return distance_class(distance, self.clip)

    def heads(self, own: list[int] | slice) -> ScoreBias:
        """Select query heads."""
        slopes, by_query = self.slopes, self.by_query
        if slopes is not None:
            slopes = slopes[own]
        if by_query is not None:
            by_query = by_query[:, own]
        return self._replace(slopes=slopes, by_query=by_query)

    def add(self, s: Tensor, distance: Tensor) -> Tensor:
        """Add the bias to scores (b h n m); distance (b 1 n m)."""
        if self.slopes is not None:
            slopes = self.slopes.to(s.dtype)[:, None, None]
            s = s - slopes * distance.abs()
        if self.by_query is not None:
            index = self.of(distance).expand(s.shape)
            s = s + self.by_query.to(s.dtype).gather(-1, index)
        return s

    def masses(self, weights: Tensor, distance: Tensor) -> Tensor:
        """Sum the weights of every class, (b h n m) -> (b h n classes)."""
        return sum_by_class(weights, distance, self.clip)


def sum_by_class(x: Tensor, distance: Tensor, clip: int) -> Tensor:
    """Sum x (... m) over the keys of every distance class, (... classes); x is 0 where there is no pair."""
    if x.device.type != "cpu":
        return sum_by_class_ordered(x, distance, clip)
    index = distance_class(distance, clip).expand(x.shape)
    none = x.new_zeros(*x.shape[:-1], 2 * clip + 1)
    return none.scatter_add(-1, index, x)


def sum_by_class_ordered(x: Tensor, distance: Tensor, clip: int) -> Tensor:
    """Compute the same where additions come in any order, as on a GPU, and two calls must be equal nevertheless.

    Only the two outer classes hold more than one pair of a query: for all others the largest and the smallest are the sum.
    """
    if clip == 0:
        return x.sum(-1, keepdim=True)
    index = distance_class(distance, clip).expand(x.shape)
    none = x.new_zeros(*x.shape[:-1], 2 * clip + 1)
    largest = none.scatter_reduce(-1, index, x, "amax")
    smallest = none.scatter_reduce(-1, index, x, "amin")
    one = largest + smallest
    first = torch.where(distance <= -clip, x, 0).sum(-1, keepdim=True)
    last = torch.where(distance >= clip, x, 0).sum(-1, keepdim=True)
    return torch.cat([first, one[..., 1:-1], last], -1)


class TileBias:
    """A bias inside the tiles of one pass: G = b * key heads, S query heads each, T tiles, r queries and x keys in each."""

    def __init__(self, bias: ScoreBias, b: int, share: int, acc: torch.dtype) -> None:
        self.bias, self.acc = bias, acc
        self.slopes = self.by_query = None
        if bias.slopes is not None:
            self.slopes = bias.slopes.to(acc).repeat(b).view(-1, 1, share, 1, 1)
        if bias.by_query is not None:
            self.by_query = bias.by_query.flatten(0, 1).to(acc).contiguous()

    def add(self, s: Tensor, distance: Tensor, by_query: Tensor | None) -> None:
        """Add to scores (G T S r x), in place; distance (T 1 r x), by_query (G T S r classes)."""
        if self.slopes is not None:
            s.addcmul_(self.slopes, distance.abs().to(self.acc), value=-1)
        if by_query is not None:
            index = self.index(distance, s)
            s.add_(by_query.gather(-1, index))

    def index(self, distance: Tensor, like: Tensor) -> Tensor:
        """Return the distance class of every pair, in the shape of `like`."""
        return self.bias.of(distance).expand(like.shape)

    def sums(self, x: Tensor, distance: Tensor) -> Tensor:
        """Sum by class: (G T S r x) -> (G T S r classes)."""
        return sum_by_class(x, distance, self.bias.clip)
