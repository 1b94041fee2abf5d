"""Patterns of the distance between query and key. Each is equivalent to a band."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from regard.checks import FARTHEST, need
from regard.patterns.algebra import Alternative, Atom, Pattern

Bounds = tuple[int | None, int | None, int]  # back, ahead and step of a band


def within_bounds(gap: Tensor, back: int | None, ahead: int | None, step: int) -> Tensor:
    """Return True where a gap i - j is a multiple of step from -ahead to back; None: no bound."""
    visible = gap % step == 0 if step > 1 else torch.ones_like(gap, dtype=torch.bool)
    if back is not None:
        visible = visible & (gap <= back)
    if ahead is None:
        return visible
    return visible & (gap >= -ahead)


@dataclass(frozen=True)
class Band(Atom):
    """-ahead <= i - j <= back and i - j a multiple of step; None: no bound. The atom of every relative pattern.

    `back` and `ahead` count tokens before and behind the query, `step` the distance between two keys.

    >>> import torch
    >>> from regard.patterns import Band, Local
    >>> Local(4).alternatives()
    ((Band(back=3, ahead=3, step=1),),)
    >>> Band(4, 0, 2)(0, torch.tensor(5), torch.arange(8)).int()  # what query 5 sees
    tensor([0, 1, 0, 1, 0, 1, 0, 0], dtype=torch.int32)
    """

    back: int | None
    ahead: int | None
    step: int = 1

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return within_bounds(i - j, self.back, self.ahead, self.step)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        if self.back is None:
            return torch.ones_like(j + now, dtype=torch.bool)
        return j >= now - self.back

    def both(self, other: Band) -> Band:
        """Intersect two bands."""
        step = math.lcm(self.step, other.step)
        farthest = FARTHEST**2 // 4  # no distance is a multiple of a larger step
        return Band(_tighter(self.back, other.back), _tighter(self.ahead, other.ahead), min(step, farthest))

    def within(self, end: int) -> Band:
        back, ahead = (x if x is None else min(x, end) for x in (self.back, self.ahead))
        return Band(back, ahead, min(self.step, max(end, 1)))

    def covers(self, other: Band) -> bool:
        """Return whether every pair of another band is in this one."""
        return other.step % self.step == 0 and self.both(other) == other


def _tighter(*bounds: int | None) -> int | None:
    return min((x for x in bounds if x is not None), default=None)


class RelativePattern(Pattern):
    """Define a pattern of the distance i - j alone."""

    @property
    def bounds(self) -> Bounds:
        """Return back, ahead and step."""
        raise NotImplementedError

    @property
    def band(self) -> Band:
        return Band(*self.bounds)

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return within_bounds(i - j, *self.bounds)  # without building a Band, which a tracer would have to follow

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return self.band.alive(j, now)

    def alternatives(self) -> tuple[Alternative, ...]:
        return ((self.band,),)

    @property
    def backward(self) -> bool:
        return self.band.ahead == 0

    def __repr__(self) -> str:
        values = [repr(getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(values)})"


@dataclass(frozen=True, repr=False)
class Local(RelativePattern):
    """|i - j| < size: a sliding window; in causal form `size` keys, the query's own included.

    `size` counts tokens, the query's own among them.

    >>> import torch
    >>> from regard import Local
    >>> i = torch.arange(4)
    >>> Local(2)(0, i[:, None], i).int()  # head 0, queries down, keys across
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 1, 1, 1],
            [0, 0, 1, 1]], dtype=torch.int32)
    """

    size: int

    def __post_init__(self) -> None:
        need("the size of Local", self.size, 1)

    @property
    def bounds(self) -> Bounds:
        return self.size - 1, self.size - 1, 1


@dataclass(frozen=True, repr=False)
class Truncated(RelativePattern):
    """-ahead <= i - j <= back: a bounded past and a bounded look-ahead, as in speech recognition.

    `back` and `ahead` count the tokens before and behind the query that it may see.

    >>> import torch
    >>> from regard import Truncated
    >>> i = torch.arange(4)
    >>> Truncated(1, 2)(0, i[:, None], i).int()
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 1],
            [0, 1, 1, 1],
            [0, 0, 1, 1]], dtype=torch.int32)
    """

    back: int
    ahead: int

    def __post_init__(self) -> None:
        need("back", self.back, 0)
        need("ahead", self.ahead, 0)

    @property
    def bounds(self) -> Bounds:
        return self.back, self.ahead, 1

    @property
    def lookahead(self) -> Pattern | None:
        return self if self.ahead else None


@dataclass(frozen=True, repr=False)
class Dilated(RelativePattern):
    """i - j = step * t with |t| < size: a dilated window, `step` times as wide.

    `size` counts keys on each side, the query's own among them; `step` is the distance between two of them.

    >>> import torch
    >>> from regard import Dilated
    >>> i = torch.arange(6)
    >>> Dilated(2, 3)(0, torch.tensor(3), i).int()  # what query 3 sees
    tensor([1, 0, 0, 1, 0, 0], dtype=torch.int32)
    """

    size: int
    step: int

    def __post_init__(self) -> None:
        need("the size of Dilated", self.size, 1)
        need("the step of Dilated", self.step, 1)

    @property
    def bounds(self) -> Bounds:
        reach = self.step * (self.size - 1)
        return reach, reach, self.step


@dataclass(frozen=True, repr=False)
class Stride(RelativePattern):
    """(i - j) mod step = 0 at any distance.

    `step` is the distance between two keys that a query sees.

    >>> import torch
    >>> from regard import Stride
    >>> Stride(3)(0, torch.tensor(4), torch.arange(8)).int()  # what query 4 sees
    tensor([0, 1, 0, 0, 1, 0, 0, 1], dtype=torch.int32)
    """

    step: int

    def __post_init__(self) -> None:
        need("the step of Stride", self.step, 1)

    @property
    def bounds(self) -> Bounds:
        return None, None, self.step


@dataclass(frozen=True, repr=False)
class Causal(RelativePattern):
    """i >= j: no future keys.

    It has no parameters.

    >>> from regard import Causal, Local
    >>> Local(8) & Causal()
    Local(8) & Causal()
    """

    @property
    def bounds(self) -> Bounds:
        return None, 0, 1


@dataclass(frozen=True, repr=False)
class Everything(RelativePattern):
    """All pairs: full attention.

    It has no parameters.

    >>> from regard import Everything, PerHead, Local
    >>> PerHead([Everything(), Local(8)])  # full attention in one half of the heads
    PerHead([Everything(), Local(8)])
    """

    @property
    def bounds(self) -> Bounds:
        return None, None, 1
