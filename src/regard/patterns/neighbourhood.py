"""Patterns of a grid whose cells are tokens, row by row: an image cut into patches, a board."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.checks import need
from regard.patterns.algebra import Atom


@dataclass(frozen=True, repr=False)
class Neighbourhood(Atom):
    """i and j at most `reach` rows and `across` columns apart (`reach` unless given), on a grid with so many columns.

    The token p is in row (p - first) // columns and column (p - first) % columns; the `first` tokens before the grid, such as a
    class token, are in no pair: `Neighbourhood(8, 2, first=1) | Global(first=1)`. Models of images and of boards refuse other
    columns than theirs. Parmar et al. 2018, arXiv:1802.05751.

    `columns` are those of the grid.

    >>> import torch
    >>> from regard import Neighbourhood
    >>> seen = Neighbourhood(4, 1)(0, torch.tensor(5), torch.arange(12)).int()  # what the token in row 1, column 1 sees
    >>> seen.reshape(3, 4)
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 0]], dtype=torch.int32)
    """

    columns: int
    reach: int
    across: int | None = None
    first: int = 0

    def __post_init__(self) -> None:
        need("the columns of Neighbourhood", self.columns, 1)
        need("reach", self.reach, 0)
        need("first", self.first, 0)
        if self.across is not None:
            need("across", self.across, 0)

    @property
    def sides(self) -> tuple[int, int]:
        """Return how far it reaches over rows and over columns."""
        return self.reach, self.reach if self.across is None else self.across

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        down, right = self.sides
        i, j = i - self.first, j - self.first
        rows = i // self.columns - j // self.columns
        columns = i % self.columns - j % self.columns
        return (rows.abs() <= down) & (columns.abs() <= right) & (i >= 0) & (j >= 0)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        down, right = self.sides
        cell = j - self.first
        column = (cell % self.columns + right).clamp_max(self.columns - 1)
        last = (cell // self.columns + down) * self.columns + column + self.first
        return (cell >= 0) & (last >= now)

    def within(self, end: int) -> Neighbourhood:
        down, right = (min(side, max(end, 1)) for side in self.sides)
        return Neighbourhood(min(self.columns, max(end, 1)), down, right, min(self.first, end))

    def __repr__(self) -> str:
        across = f", across={self.across}" if self.across is not None else ""
        first = f", first={self.first}" if self.first else ""
        return f"Neighbourhood({self.columns}, {self.reach}{across}{first})"
