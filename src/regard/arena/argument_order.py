"""Nested expressions on the device, in constant shapes: their arguments in random order, and the value of every operator.

Where operators are symmetric, a shuffled expression has the same value. Miralles-González et al. 2025, arXiv:2501.14850.

Every token is a node of its tree: a digit, an operator with all of its arguments, or a closing bracket, which is the last child
of its operator. A child lies behind its parent and the siblings that were drawn before it, so one sort by parent and random
number gives its distance from the parent, and its place is the sum of these distances up to the root, found by doubling.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

DIGIT_VALUES = 10  # of an operator or a digit: 0 to 9


class ExpressionTrees:
    """Hold the parent and the size of every token (b n); the root and padding are children of the first token.

    `opens` and `closes` (b n) are True at operators and at their brackets; no more than `depth` operators are nested.
    """

    def __init__(self, opens: Tensor, closes: Tensor, depth: int) -> None:
        self.opens, self.closes, self.depth, self.rounds = opens, closes, depth, depth.bit_length()
        self.places = torch.arange(opens.shape[1], device=opens.device).expand_as(opens)
        self.level = level = (opens.long() - closes.long()).cumsum(1)
        self.around = level - opens.long() + closes.long()  # operators around each token; its own is around a bracket
        parent = torch.zeros_like(self.places)
        for number in range(1, depth + 1):
            begun = torch.where(opens & (level == number), self.places, 0).cummax(1).values
            parent = torch.where(self.around == number, begun, parent)
        self.parent = parent
        inside = torch.where(closes, self.places - parent, 0)
        self.size = torch.ones_like(self.places).scatter_add(1, parent, inside)

    def bracket_values(self, digits: Tensor, evaluate: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the value of every operator at its bracket (b n), and of the first operator where there is no bracket.

        `digits` (b n) are values of arguments, -1 at other tokens. `evaluate` maps how often each digit is an argument of the
        operator at a place, (b n 10), to its value.
        """
        b, n = digits.shape
        counts = torch.zeros(b, n * DIGIT_VALUES, dtype=torch.int32, device=digits.device)
        self._count(counts, digits, digits >= 0)
        values = torch.zeros_like(digits)
        for number in range(self.depth, 0, -1):
            values = evaluate(counts.view(b, n, DIGIT_VALUES))
            if number > 1:
                self._count(counts, values, self.opens & (self.level == number))
        return values.gather(1, self.parent)

    def _count(self, counts: Tensor, values: Tensor, which: Tensor) -> None:
        """Add some values to the counts of their operators."""
        place = self.parent * DIGIT_VALUES + values.clamp(min=0)
        counts.scatter_add_(1, place, which.to(counts.dtype))

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
    places = ExpressionTrees(opens, closes, depth).shuffled_places(generator)
    return torch.zeros_like(tokens).scatter(1, places, tokens)
