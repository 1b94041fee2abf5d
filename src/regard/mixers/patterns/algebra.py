"""What a pattern is, and how patterns combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Alternative = tuple["Atom", ...]  # all of these hold


def need(name: str, value: Any, least: int = 1) -> int:
    """The value, if it is an integer and large enough."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    return value


class Pattern:
    """A set of pairs (i, j), possibly another one per head h."""

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        """True where query i of head h may see key j; broadcasts. Also the body of a FlexAttention mask_mod."""
        raise NotImplementedError

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        """May a query at position `now` or later, in any head, still see key j?"""
        raise NotImplementedError

    def alternatives(self) -> tuple[Alternative, ...]:
        """The same set as a union of intersections of atoms. Only for the pattern of one head."""
        raise NotImplementedError

    def for_head(self, h: int, heads: int) -> Pattern:  # noqa: ARG002 - most patterns are the same in every head
        return self

    def bound(self, n: int, m: int) -> Pattern:  # noqa: ARG002 - most patterns hold for any length
        """The pattern for exactly n queries and m keys."""
        return self

    @property
    def bends_with_length(self) -> bool:
        """Does the pattern of a longer sequence change among its first tokens?"""
        return False

    def __or__(self, other: Pattern) -> Pattern:
        return _join(Or, self, other)

    def __and__(self, other: Pattern) -> Pattern:
        return _join(And, self, other)

    @staticmethod
    def parse(text: str) -> Pattern:
        from regard.mixers.patterns import PATTERNS  # all of them, which only the package knows
        from regard.text import parse

        pattern = parse(text, PATTERNS)
        if not isinstance(pattern, Pattern):
            raise ValueError(f"{text!r} is not a pattern: write for example 'Local(256) | Global(first=1)'")
        return pattern

    @staticmethod
    def of(pattern: Pattern | str) -> Pattern:
        if isinstance(pattern, str):
            return Pattern.parse(pattern)
        if not isinstance(pattern, Pattern):
            raise TypeError(f"a pattern or its text is needed, not {type(pattern).__name__}")
        return pattern


class Atom(Pattern):
    """A pattern that a plan can enumerate by itself."""

    def alternatives(self) -> tuple[Alternative, ...]:
        return ((self,),)


@dataclass(frozen=True, repr=False)
class Several(Pattern):
    """Patterns combined."""

    parts: tuple[Pattern, ...]

    def for_head(self, h: int, heads: int) -> Pattern:
        return _join(type(self), *(p.for_head(h, heads) for p in self.parts))

    def bound(self, n: int, m: int) -> Pattern:
        return type(self)(tuple(p.bound(n, m) for p in self.parts))

    @property
    def bends_with_length(self) -> bool:
        return any(p.bends_with_length for p in self.parts)


class Or(Several):
    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        seen = self.parts[0](h, i, j)
        for p in self.parts[1:]:
            seen = seen | p(h, i, j)
        return seen

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.stack([p.alive(j, now) for p in self.parts]).any(0)

    def alternatives(self) -> tuple[Alternative, ...]:
        return tuple(a for p in self.parts for a in p.alternatives())

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


class And(Several):
    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        seen = self.parts[0](h, i, j)
        for p in self.parts[1:]:
            seen = seen & p(h, i, j)
        return seen

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.stack([p.alive(j, now) for p in self.parts]).all(0)

    def alternatives(self) -> tuple[Alternative, ...]:
        found: tuple[Alternative, ...] = ((),)
        for p in self.parts:
            found = tuple(a + b for a in found for b in p.alternatives())
        return found

    def __repr__(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, Or) else repr(p) for p in self.parts)


class PerHead(Several):
    """Another pattern in each head; with fewer patterns than heads, equal shares of neighbouring heads."""

    def __init__(self, parts: Sequence[Pattern]) -> None:
        parts = tuple(parts)
        if not parts or not all(isinstance(p, Pattern) for p in parts):
            raise ValueError("PerHead needs a list of patterns: PerHead([Local(8), Stride(4)])")
        super().__init__(parts)

    def for_head(self, h: int, heads: int) -> Pattern:
        if heads % len(self.parts):
            raise ValueError(f"{len(self.parts)} patterns cannot be shared evenly by {heads} heads")
        return self.parts[h * len(self.parts) // heads].for_head(h, heads)

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        """Called as a predicate, it needs one pattern per head."""
        return by_head(h, lambda x: self.for_head(x, len(self.parts)), i, j)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.stack([p.alive(j, now) for p in self.parts]).any(0)

    def __repr__(self) -> str:
        return f"PerHead([{', '.join(map(repr, self.parts))}])"


def by_head(h: Any, pattern: Callable[[int], Pattern], i: Tensor, j: Tensor) -> Tensor:
    h = torch.as_tensor(h, device=i.device)
    seen = torch.zeros_like(h + i + j, dtype=torch.bool)
    for x in h.unique().tolist():
        seen = seen | ((h == x) & pattern(x)(x, i, j))
    return seen


def _join(kind: type[Several], *patterns: Pattern) -> Pattern:
    """Flat and without repetition, so that equal expressions are equal values."""
    flat: list[Pattern] = []
    for p in patterns:
        if not isinstance(p, Pattern):
            raise TypeError(f"patterns combine with patterns, not with {type(p).__name__}")
        flat.extend(q for q in (p.parts if type(p) is kind else (p,)) if q not in flat)
    return flat[0] if len(flat) == 1 else kind(tuple(flat))
