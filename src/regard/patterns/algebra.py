"""The interface of patterns, and their combinations: `|`, `&` and PerHead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from regard.checks import shown

#: Atoms whose intersection is meant: a pattern of one head is a union of alternatives.
#:
#: >>> from regard.patterns import Blocks, Local
#: >>> (Local(4) & Blocks(8)).alternatives()
#: ((Band(back=3, ahead=3, step=1), Blocks(8)),)
Alternative = tuple["Atom", ...]

ALTERNATIVES = 256  # at most in the pattern of one head: a plan compares them with each other
PARTS = 1024  # at most in one pattern, at all depths


class Pattern:
    """Define a set of pairs (i, j), which may differ between heads h.

    A subclass needs `__call__` (the predicate), `alive` and `alternatives`. Patterns print, parse, compare and combine.

    >>> from regard import Global, Local, Pattern
    >>> both = Pattern.parse("Local(4) | Global(first=1)")
    >>> both == Local(4) | Global(first=1)
    True
    """

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        """Return True where query i of head h attends to key j; arguments broadcast.

        Also the body of a FlexAttention mask_mod, whose indices are vmapped: `lambda b, h, i, j: pattern(h, i, j)`.
        A pattern that depends on the length is bound to it first, with `bound`.
        """
        raise NotImplementedError

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        """Return True where a query at position `now` or later, in any head, can attend to key j."""
        raise NotImplementedError

    def alternatives(self) -> tuple[Alternative, ...]:
        """Return the same set as a union of intersections of atoms. Only for the pattern of one head."""
        raise NotImplementedError

    def for_head(self, h: int, heads: int) -> Pattern:  # noqa: ARG002 - most patterns are the same in every head
        return self

    def bound(self, n: int, m: int) -> Pattern:  # noqa: ARG002 - most patterns hold for any length
        """Return the pattern for exactly n queries and m keys."""
        return self

    @property
    def depends_on_length(self) -> bool:
        """Return whether the pairs among the first tokens change with the length of the sequence."""
        return self.length_grain > 0

    @property
    def length_grain(self) -> int:
        """Return g: lengths with the same ceil(length / g) have the same pairs among their tokens. 0: all lengths have."""
        return 0

    alternative_count: int = 1  # alternatives of the pattern of one head, counted without building them
    part_count: int = 1  # patterns in its text

    @property
    def lookahead(self) -> Pattern | None:
        """Return the part with an explicit look-ahead, None where there is none or an `&` removes it."""
        return None

    @property
    def backward(self) -> bool:
        """Return whether the pattern by itself excludes future keys, as Causal() does."""
        return False

    def __or__(self, other: Pattern) -> Pattern:
        return _join(Or, self, other)

    def __and__(self, other: Pattern) -> Pattern:
        return _join(And, self, other)

    @staticmethod
    def parse(text: str) -> Pattern:
        from regard.patterns import PATTERNS  # the package imports this module
        from regard.text import parse

        pattern = parse(text, PATTERNS)
        if not isinstance(pattern, Pattern):
            raise ValueError(f"{shown(text)} is not a pattern: write for example 'Local(256) | Global(first=1)'")
        return pattern

    @staticmethod
    def of(pattern: Pattern | str) -> Pattern:
        if isinstance(pattern, str):
            return Pattern.parse(pattern)
        if not isinstance(pattern, Pattern):
            raise TypeError(f"a pattern or its text is needed, not {type(pattern).__name__}")
        return pattern


class Atom(Pattern):
    """Define a pattern that a plan can enumerate directly.

    >>> from regard.patterns import Atom, Blocks, Local
    >>> isinstance(Blocks(4), Atom), isinstance(Local(4), Atom)  # a window becomes the atom Band
    (True, False)
    """

    def alternatives(self) -> tuple[Alternative, ...]:
        return ((self,),)

    def within(self, end: int) -> Atom:  # noqa: ARG002 - most atoms allocate nothing beyond the end
        """Return an atom with the same pairs among positions below `end` and sizes up to `end`."""
        return self


@dataclass(frozen=True, repr=False)
class Several(Pattern):
    """Combine several patterns."""

    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "alternative_count", self._count_alternatives())
        object.__setattr__(self, "part_count", sum(p.part_count for p in self.parts))
        if self.part_count > PARTS:
            raise ValueError(f"a pattern may have {PARTS:,} parts, not {self.part_count:,}")
        if self.alternative_count > ALTERNATIVES:
            count = shown(self.alternative_count)
            raise ValueError(f"the pattern of a head may have {ALTERNATIVES} alternatives, not {count}: take fewer parts")

    def _count_alternatives(self) -> int:
        return sum(p.alternative_count for p in self.parts)

    @property
    def lookahead(self) -> Pattern | None:
        return next((p.lookahead for p in self.parts if p.lookahead is not None), None)

    @property
    def backward(self) -> bool:
        return all(p.backward for p in self.parts)

    def for_head(self, h: int, heads: int) -> Pattern:
        return _join(type(self), *(p.for_head(h, heads) for p in self.parts))

    def bound(self, n: int, m: int) -> Pattern:
        return type(self)(tuple(p.bound(n, m) for p in self.parts))

    @property
    def length_grain(self) -> int:
        return gcd(*(p.length_grain for p in self.parts))


class Or(Several):
    """Unite patterns.

    `parts` are the patterns; `a | b` makes one.

    >>> from regard.patterns import Local, Or, Stride
    >>> Or((Local(4), Stride(8))) == Local(4) | Stride(8)
    True
    """

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        visible = self.parts[0](h, i, j)
        for p in self.parts[1:]:
            visible = visible | p(h, i, j)
        return visible

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.stack([p.alive(j, now) for p in self.parts]).any(0)

    def alternatives(self) -> tuple[Alternative, ...]:
        return tuple(a for p in self.parts for a in p.alternatives())

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


class And(Several):
    """Intersect patterns.

    `parts` are the patterns; `a & b` makes one.

    >>> from regard.patterns import And, Local, Stride
    >>> And((Local(4), Stride(2))) == Local(4) & Stride(2)
    True
    """

    def _count_alternatives(self) -> int:
        return prod(p.alternative_count for p in self.parts)

    @property
    def lookahead(self) -> Pattern | None:
        return None if self.backward else super().lookahead

    @property
    def backward(self) -> bool:
        return any(p.backward for p in self.parts)

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        visible = self.parts[0](h, i, j)
        for p in self.parts[1:]:
            visible = visible & p(h, i, j)
        return visible

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
    """Give each head a pattern of its own; with fewer patterns than heads, each is for a group of neighbouring heads.

    `parts` are the patterns, in the order of the heads.

    >>> from regard import Local, PerHead, Stride
    >>> PerHead([Local(4), Stride(8)]).for_head(3, heads=4)
    Stride(8)
    """

    def __init__(self, parts: Sequence[Pattern]) -> None:
        try:
            parts = tuple(parts)
        except TypeError:
            parts = ()
        if not parts or not all(isinstance(p, Pattern) for p in parts):
            raise ValueError("PerHead needs a list of patterns: PerHead([Local(8), Stride(4)])")
        super().__init__(parts)

    def _count_alternatives(self) -> int:
        return max(p.alternative_count for p in self.parts)

    def for_head(self, h: int, heads: int) -> Pattern:
        if heads % len(self.parts):
            raise ValueError(f"{len(self.parts)} patterns cannot be shared evenly by {heads} heads")
        return self.parts[h * len(self.parts) // heads].for_head(h, heads)

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        """Evaluate the predicate, which needs one pattern per head."""
        if not torch.compiler.is_compiling() and largest(h) >= len(self._each):
            raise ValueError(f"as a predicate PerHead needs a pattern for every head: there is none for head {largest(h)}")
        return by_head(h, self._each, i, j)

    @cached_property
    def _each(self) -> tuple[Pattern, ...]:
        return tuple(p.for_head(x, len(self.parts)) for x, p in enumerate(self.parts))

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.stack([p.alive(j, now) for p in self.parts]).any(0)

    def __repr__(self) -> str:
        return f"PerHead([{', '.join(map(repr, self.parts))}])"


def by_head(h: Any, each: Sequence[Pattern], i: Tensor, j: Tensor) -> Tensor:
    """Evaluate the pattern of head h, where h is an integer or a tensor of heads."""
    if isinstance(h, int):
        return each[h](h, i, j)
    visible = torch.zeros_like(h + i + j, dtype=torch.bool)
    for x, pattern in enumerate(each):
        visible = visible | ((h == x) & pattern(x, i, j))
    return visible


def largest(x: Any) -> int:
    """Return the largest of some indices, -1 if there are none or they are on the meta device, without numbers."""
    indices = unwrapped(torch.as_tensor(x))
    if indices.numel() and not indices.is_meta:
        return int(indices.max())
    return -1


def unwrapped(x: Tensor) -> Tensor:
    """Return the values of an index tensor: of a vmapped one, those of the whole batch. FlexAttention vmaps its mask_mod."""
    while not torch.compiler.is_compiling() and functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def _join(kind: type[Several], *patterns: Pattern) -> Pattern:
    """Combine patterns, flattened and without repetition, so that equal expressions are equal values."""
    flat: list[Pattern] = []
    for p in patterns:
        if not isinstance(p, Pattern):
            raise TypeError(f"patterns combine with patterns, not with {type(p).__name__}")
        parts = p.parts if type(p) is kind else (p,)
        flat.extend(q for q in parts if q not in flat)
    if len(flat) == 1:
        return flat[0]
    return kind(tuple(flat))
