"""Shuffle the arguments of every operator of nested expressions, on the device and in constant shapes.

Where operators are symmetric, a shuffled expression has the same value. Miralles-González et al. 2025, arXiv:2501.14850.

Every token is a node of its tree: a digit, an operator with all of its arguments, or a closing bracket, which is the last child
of its operator. A child lies behind its parent and the siblings that were drawn before it, so one sort by parent and random
number gives its distance from the parent, and its place is the sum of these distances up to the root, found by doubling.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor


class _Trees:
    """Hold the parent and the size of every token (b n); the root and padding are children of the first token."""

    def __init__(self, opens: Tensor, closes: Tensor, depth: int) -> None:
        self.closes, self.rounds = closes, depth.bit_length()
        self.places = torch.arange(opens.shape[1], device=opens.device).expand_as(opens)
        level = (opens.long() - closes.long()).cumsum(1)
        self.around = level - opens.long() + closes.long()  # operators around each token; its own is around a bracket
        parent = torch.zeros_like(self.places)
        for number in range(1, depth + 1):
            begun = torch.where(opens & (level == number), self.places, 0).cummax(1).values
            parent = torch.where(self.around == number, begun, parent)
        self.parent = parent
        inside = torch.where(closes, self.places - parent, 0)
        self.size = torch.ones_like(self.places).scatter_add(1, parent, inside)

    def shuffled_places(self, generator: Generator | None) -> Tensor:
        """Draw an order of all siblings, brackets last, and return the new place of every token (b n)."""
        closes = self.closes
        draws = torch.rand(closes.shape, dtype=torch.float64, device=closes.device, generator=generator)
        free = self.around == 0  # the root and padding, which stay
        key = 2 * self.parent + torch.where(closes, 1.0, draws)
        order = torch.where(free, 2.0 * closes.shape[1], key).sort(1).indices
        size, parent = self.size.gather(1, order), self.parent.gather(1, order)
        before = size.cumsum(1) - size
        first = (parent != parent.roll(1, 1)) | (self.places == 0)
        behind = 1 + before - torch.where(first, before, 0).cummax(1).values
        distance = torch.where(free, self.places, torch.zeros_like(behind).scatter(1, order, behind))
        return self._to_root(distance)

    def _to_root(self, distance: Tensor) -> Tensor:
        """Add the distances of all ancestors: each round doubles how many are added."""
        place, ancestor = distance, self.parent
        for _ in range(self.rounds):
            place, ancestor = place + place.gather(1, ancestor), ancestor.gather(1, ancestor)
        return place


def shuffle_arguments(tokens: Tensor, opens: Tensor, closes: Tensor, depth: int, generator: Generator | None = None) -> Tensor:
    """Return expressions (b n) whose arguments are in random order at every operator; padding behind them stays.

    `opens` and `closes` (b n) are True at operators and at their brackets; no more than `depth` operators are nested.
    """
    places = _Trees(opens, closes, depth).shuffled_places(generator)
    return torch.zeros_like(tokens).scatter(1, places, tokens)
