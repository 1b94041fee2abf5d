"""Patterns of absolute positions: blocks, and special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from regard.checks import need, shown
from regard.patterns.algebra import Alternative, Atom, Pattern
from regard.transforms import transformed


@dataclass(frozen=True, repr=False)
class Blocks(Atom):
    """i and j in the same block of `size`, or in one of the `around` blocks on either side of it.

    >>> import torch
    >>> from regard import Blocks
    >>> Blocks(2)(0, torch.tensor(3), torch.arange(8)).int()  # what query 3 sees
    tensor([0, 0, 1, 1, 0, 0, 0, 0], dtype=torch.int32)
    >>> Blocks(2, around=1)(0, torch.tensor(3), torch.arange(8)).int()
    tensor([1, 1, 1, 1, 1, 1, 0, 0], dtype=torch.int32)
    """

    size: int
    around: int = 0

    def __post_init__(self) -> None:
        need("the size of Blocks", self.size, 1)
        need("around", self.around, 0)

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        distance = i // self.size - j // self.size
        return distance.abs() <= self.around

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        last = j // self.size + self.around
        return last >= now // self.size

    def within(self, end: int) -> Blocks:
        size = max(min(self.size, end), 1)
        farthest = max(end - 1, 0) // size
        return Blocks(size, min(self.around, farthest))

    def __repr__(self) -> str:
        around = f", around={self.around}" if self.around else ""
        return f"Blocks({self.size}{around})"


@dataclass(frozen=True, repr=False)
class SpecialTokens(Pattern):
    """Select special tokens by position: the first few, those listed, or the last few of a sequence."""

    first: int = 0
    at: tuple[int, ...] = ()
    last: int = 0
    length: int | None = None  # of the sequence whose last tokens are special; set by `bound`

    def __post_init__(self) -> None:
        need("first", self.first, 0)
        need("last", self.last, 0)
        if not isinstance(self.at, int | list | tuple):
            raise ValueError(f"at must be a position or a list of positions, not {shown(self.at)}")
        at = [self.at] if isinstance(self.at, int) else list(self.at)
        for position in at:
            need("a position in `at`", position, 0)
        listed = {p for p in at if p >= self.first}
        object.__setattr__(self, "at", tuple(sorted(listed)))
        if self.length is not None:
            need("length", self.length, 0)
        if not self.first and not self.at and not self.last:
            raise ValueError(f"{type(self).__name__} needs special tokens: first=1, last=1, or at=[0, 7]")

    @property
    def length_grain(self) -> int:
        return 1 if self.last else 0

    def special(self, i: Tensor) -> Tensor:
        """Return True at special positions."""
        found = i < self.first
        if self.at:
            at = torch.tensor(self.at, device=i.device)
            listed = (i[..., None] == at).any(-1) if transformed() else torch.isin(i, at)
            found = found | listed
        if self.last:
            return found | (i >= self.tail)
        return found

    @property
    def tail(self) -> int:
        """Return the position of the first of the last tokens."""
        if self.length is None:
            raise ValueError(f"the last tokens of {type(self).__name__} are those of a length: call .bound(n, m) first")
        return max(self.length - self.last, 0)

    def gone(self, now: Tensor) -> Tensor:
        """Return True where all special positions are before `now`: never if the last tokens are special."""
        if self.last:
            return now > 2**62
        return now > max([self.first - 1, *self.at])

    def positions(self, low: int, high: int) -> Tensor:
        """Return the special positions in low <= position < high, in order."""
        listed = [p for p in self.at if low <= p < high]
        end = min(self.first, high)
        runs: list[Iterable[int]] = [range(low, end), listed]
        if self.last:
            start = max(self.tail, low)
            runs.append(range(start, high))
        found = set(chain(*runs))
        return torch.tensor(sorted(found), dtype=torch.long)

    def _bound(self, length: int) -> Self:
        if self.last and self.length is None:
            return replace(self, length=length)
        return self

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        given = [f.name for f in fields(self) if values[f.name] != f.default]
        parts = [f"{name}={list(self.at) if name == 'at' else values[name]}" for name in given]
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class Rows(SpecialTokens, Atom):
    """i is special: it attends to all keys.

    Special tokens are the `first` few, those `at` listed positions, and the `last` few of a sequence, whose `length` is set by
    `bound` and not by a caller.

    >>> import torch
    >>> from regard import Rows
    >>> i = torch.arange(4)
    >>> Rows(first=1)(0, i[:, None], i).int()
    tensor([[1, 1, 1, 1],
            [0, 0, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 0]], dtype=torch.int32)
    """

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return self.special(i) & torch.ones_like(j, dtype=torch.bool)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return ~self.gone(now) & torch.ones_like(j, dtype=torch.bool)

    def bound(self, n: int, m: int) -> Rows:  # noqa: ARG002
        return self._bound(n)


@dataclass(frozen=True, repr=False)
class Columns(SpecialTokens, Atom):
    """j is special: all queries attend to it (attention sinks, when they are the first tokens).

    Special tokens are the `first` few, those `at` listed positions, and the `last` few of a sequence, whose `length` is set by
    `bound` and not by a caller.

    >>> import torch
    >>> from regard import Columns
    >>> i = torch.arange(4)
    >>> Columns(first=1)(0, i[:, None], i).int()
    tensor([[1, 0, 0, 0],
            [1, 0, 0, 0],
            [1, 0, 0, 0],
            [1, 0, 0, 0]], dtype=torch.int32)
    """

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return self.special(j) & torch.ones_like(i, dtype=torch.bool)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        kept = torch.ones_like(j, dtype=torch.bool) if self.last else self.special(j)
        return kept & torch.ones_like(now, dtype=torch.bool)

    def bound(self, n: int, m: int) -> Columns:  # noqa: ARG002
        return self._bound(m)


@dataclass(frozen=True, repr=False)
class Global(SpecialTokens):
    """i or j is special: global tokens attend to all tokens, and all tokens attend to them.

    Special tokens are the `first` few, those `at` listed positions, and the `last` few of a sequence, whose `length` is set by
    `bound` and not by a caller.

    >>> import torch
    >>> from regard import Global
    >>> i = torch.arange(4)
    >>> Global(first=1)(0, i[:, None], i).int()
    tensor([[1, 1, 1, 1],
            [1, 0, 0, 0],
            [1, 0, 0, 0],
            [1, 0, 0, 0]], dtype=torch.int32)
    """

    alternative_count = 2

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return self.special(i) | self.special(j)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        columns = Columns(self.first, self.at, self.last)
        return ~self.gone(now) | columns.alive(j, now)

    def alternatives(self) -> tuple[Alternative, ...]:
        return tuple((half(self.first, self.at, self.last, self.length),) for half in (Rows, Columns))

    def bound(self, n: int, m: int) -> Pattern:
        """Bind the last rows to the end of the queries, and the last columns to the end of the keys."""
        if not self.last or self.length is not None:
            return self
        rows = Rows(self.first, self.at, self.last, n)
        return rows | Columns(self.first, self.at, self.last, m)


@dataclass(frozen=True, repr=False)
class Tail(Atom):
    """j among the last `count` of its block of `size`: the summary positions of the fixed Sparse Transformer.

    >>> import torch
    >>> from regard import Tail
    >>> Tail(4, 1)(0, torch.tensor(0), torch.arange(8)).int()  # the same for every query
    tensor([0, 0, 0, 1, 0, 0, 0, 1], dtype=torch.int32)
    """

    size: int
    count: int

    def __post_init__(self) -> None:
        need("the size of Tail", self.size, 1)
        need("the count of Tail", self.count, 1)
        if self.count > self.size:
            raise ValueError(f"a block of {self.size} has no last {self.count}: count must be at most size")

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return self._last(j) & torch.ones_like(i, dtype=torch.bool)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return self._last(j) & torch.ones_like(now, dtype=torch.bool)

    def positions(self, low: int, high: int) -> Tensor:
        j = torch.arange(low, max(low, high))
        return j[self._last(j)]

    def _last(self, j: Tensor) -> Tensor:
        """Return True at the last positions of a block."""
        return j % self.size >= self.size - self.count

    def __repr__(self) -> str:
        return f"Tail({self.size}, {self.count})"
