"""What positions add to attention: to the score of a pair, and to its answer, by how far apart the two stand.

    s_ij = scale q_i.k_j - slope |i - j| + by_query[i, c],   out_i = sum_j A_ij v_j,   mass[i, c] = sum of A_ij over j of class c

with the distance class c = clamp(i - j, -clip, clip) + clip. Values by distance are then mass times a table, outside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.patterns.tiles import TileBatch, TilePart


def distance_class(apart: Tensor, clip: int) -> Tensor:
    return apart.clamp(-clip, clip) + clip


class ScoreBias(NamedTuple):
    slopes: Tensor | None = None  # (h)
    clip: int = 0
    by_query: Tensor | None = None  # (b h n classes)
    mass: bool = False  # is the weight of every class wanted? It comes as further columns behind the values

    @property
    def classes(self) -> int:
        return 2 * self.clip + 1

    @property
    def more(self) -> int:
        """Columns behind the values."""
        return self.classes if self.mass else 0

    def of(self, apart: Tensor) -> Tensor:
        return distance_class(apart, self.clip)

    def heads(self, own: list[int] | slice) -> ScoreBias:
        """The same for some of the heads."""
        slopes, by_query = self.slopes, self.by_query
        return self._replace(
            slopes=None if slopes is None else slopes[own], by_query=None if by_query is None else by_query[:, own]
        )

    def add(self, s: Tensor, apart: Tensor) -> Tensor:
        """Scores (b h n m) with the term, of pairs that stand apart (b 1 n m)."""
        if self.slopes is not None:
            s = s - self.slopes.to(s.dtype)[:, None, None] * apart.abs()
        if self.by_query is not None:
            s = s + self.by_query.to(s.dtype).gather(-1, self.of(apart).expand(s.shape))
        return s

    def masses(self, weights: Tensor, apart: Tensor) -> Tensor:
        """The weight of every class, (b h n m) -> (b h n classes)."""
        return sum_by_class(weights, apart, self.clip)


def sum_by_class(x: Tensor, apart: Tensor, clip: int) -> Tensor:
    """The sum of x (... m) over the keys of every distance class, (... classes); x is 0 where there is no pair."""
    if x.device.type != "cpu":
        return sum_by_class_ordered(x, apart, clip)
    index = distance_class(apart, clip).expand(x.shape)
    return x.new_zeros(*x.shape[:-1], 2 * clip + 1).scatter_add(-1, index, x)


def sum_by_class_ordered(x: Tensor, apart: Tensor, clip: int) -> Tensor:
    """The same where additions come in any order, as on a GPU, and two calls must be equal all the same.

    Only the two outer classes hold more than one pair of a query: for all others the largest and the smallest are the sum.
    """
    if clip == 0:
        return x.sum(-1, keepdim=True)
    index, none = distance_class(apart, clip).expand(x.shape), x.new_zeros(*x.shape[:-1], 2 * clip + 1)
    one = none.scatter_reduce(-1, index, x, "amax") + none.scatter_reduce(-1, index, x, "amin")
    first, last = (torch.where(out, x, 0).sum(-1, keepdim=True) for out in (apart <= -clip, apart >= clip))
    return torch.cat([first, one[..., 1:-1], last], -1)


class TileBias:
    """A term inside the tiles of one pass. B = b * h rows of heads, T tiles, r queries and x keys each."""

    def __init__(self, term: ScoreBias, b: int, acc: torch.dtype) -> None:
        self.term, self.acc = term, acc
        self.slopes = None if term.slopes is None else term.slopes.to(acc).repeat(b)[:, None, None, None]
        self.by_query = None if term.by_query is None else term.by_query.flatten(0, 1).to(acc).contiguous()

    def apart(self, part: TilePart, run: TileBatch) -> Tensor:
        """i - j (T r x) of the pairs of these tiles."""
        i, j = part.places(run.rows.device)
        return i[run.rows][:, :, None] - j[run.cols].flatten(1)[:, None]

    def add(self, s: Tensor, apart: Tensor, by_query: Tensor | None) -> None:
        """To scores (B T r x), in place; by_query (B T r classes)."""
        if self.slopes is not None:
            s.addcmul_(self.slopes, apart.abs().to(self.acc), value=-1)
        if by_query is not None:
            s.add_(by_query.gather(-1, self.index(apart, s)))

    def index(self, apart: Tensor, like: Tensor) -> Tensor:
        return self.term.of(apart).expand(like.shape)

    def sums(self, x: Tensor, apart: Tensor) -> Tensor:
        """By class: (B T r x) -> (B T r classes)."""
        return sum_by_class(x, apart, self.term.clip)
