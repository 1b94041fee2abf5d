"""Patterns of fixed places: blocks, and tokens singled out by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.kernels.transforms import transformed
from regard.mixers.patterns.algebra import Alternative, Atom, Pattern, need


@dataclass(frozen=True, repr=False)
class Blocks(Atom):
    """i and j in the same block of `size`, or in one of the `around` blocks on either side of it."""

    size: int
    around: int = 0

    def __post_init__(self) -> None:
        need("the size of Blocks", self.size, 1)
        need("around", self.around, 0)

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return (i // self.size - j // self.size).abs() <= self.around

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return j // self.size + self.around >= now // self.size

    def __repr__(self) -> str:
        return f"Blocks({self.size}{f', around={self.around}' if self.around else ''})"


@dataclass(frozen=True, repr=False)
class Special(Pattern):
    """Tokens singled out by position: the first few, or those listed."""

    first: int = 0
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        need("first", self.first, 0)
        at = [self.at] if isinstance(self.at, int) else list(self.at)
        for position in at:
            need("a position in `at`", position, 0)
        object.__setattr__(self, "at", tuple(sorted(set(at) - set(range(self.first)))))
        if not self.first and not self.at:
            raise ValueError(f"{type(self).__name__} needs special tokens: first=1, or at=[0, 7]")

    def special(self, i: Tensor) -> Tensor:
        found = i < self.first
        if not self.at:
            return found
        at = torch.tensor(self.at, device=i.device)
        return found | ((i[..., None] == at).any(-1) if transformed() else torch.isin(i, at))

    @property
    def last(self) -> int:
        return max(self.first - 1, *self.at) if self.at else self.first - 1

    def positions(self, low: int, high: int) -> Tensor:
        """The special positions in low <= position < high, in order."""
        return torch.tensor([p for p in (*range(self.first), *self.at) if low <= p < high], dtype=torch.long)

    def __repr__(self) -> str:
        parts = ([f"first={self.first}"] if self.first else []) + ([f"at={list(self.at)}"] if self.at else [])
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class Rows(Special, Atom):
    """i is special: it sees everything."""

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return self.special(i) & torch.ones_like(j, dtype=torch.bool)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return (now <= self.last) & torch.ones_like(j, dtype=torch.bool)


@dataclass(frozen=True, repr=False)
class Columns(Special, Atom):
    """j is special: everything sees it (attention sinks, when they are the first tokens)."""

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return self.special(j) & torch.ones_like(i, dtype=torch.bool)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return self.special(j) & torch.ones_like(now, dtype=torch.bool)


@dataclass(frozen=True, repr=False)
class Global(Special):
    """i or j is special: some tokens see everything and are seen by everything."""

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return self.special(i) | self.special(j)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return self.special(j) | (now <= self.last)

    def alternatives(self) -> tuple[Alternative, ...]:
        return ((Rows(self.first, self.at),), (Columns(self.first, self.at),))


@dataclass(frozen=True, repr=False)
class Tail(Atom):
    """j among the last `count` of its block of `size`: the summary positions of the fixed Sparse Transformer."""

    size: int
    count: int

    def __post_init__(self) -> None:
        need("the size of Tail", self.size, 1)
        need("the count of Tail", self.count, 1)
        if self.count > self.size:
            raise ValueError(f"a block of {self.size} has no last {self.count}: count must be at most size")

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return (j % self.size >= self.size - self.count) & torch.ones_like(i, dtype=torch.bool)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return (j % self.size >= self.size - self.count) & torch.ones_like(now, dtype=torch.bool)

    def positions(self, low: int, high: int) -> Tensor:
        j = torch.arange(low, max(low, high))
        return j[j % self.size >= self.size - self.count]

    def __repr__(self) -> str:
        return f"Tail({self.size}, {self.count})"
