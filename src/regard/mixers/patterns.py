"""Which query may look at which key: patterns as values that print, parse, compare, hash and combine.

A pattern is a set of pairs (query position i, key position j). It is a predicate on index tensors, so it serves as its own
definition; `alternatives` says the same thing as a union of intersections of atoms, which is what a plan is made from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Alternative = tuple["Atom", ...]  # all of these hold


def _need(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


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
        from regard.text import parse  # the grammar is shared with specs and knows nothing about patterns

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


@dataclass(frozen=True)
class Band(Atom):
    """-ahead <= i - j <= back and i - j a multiple of step; None: no bound. What every relative pattern comes down to."""

    back: int | None
    ahead: int | None
    step: int = 1

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        gap = i - j
        seen = gap % self.step == 0 if self.step > 1 else torch.ones_like(gap, dtype=torch.bool)
        if self.back is not None:
            seen = seen & (gap <= self.back)
        return seen if self.ahead is None else seen & (gap >= -self.ahead)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.ones_like(j + now, dtype=torch.bool) if self.back is None else j >= now - self.back

    def both(self, other: Band) -> Band:
        back, ahead = (
            min((x for x in two if x is not None), default=None) for two in ((self.back, other.back), (self.ahead, other.ahead))
        )
        return Band(back, ahead, math.lcm(self.step, other.step))

    def covers(self, other: Band) -> bool:
        return other.step % self.step == 0 and self.both(other) == other


class Relative(Pattern):
    """A pattern of the distance i - j alone."""

    @property
    def band(self) -> Band:
        raise NotImplementedError

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        return self.band(h, i, j)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return self.band.alive(j, now)

    def alternatives(self) -> tuple[Alternative, ...]:
        return ((self.band,),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(getattr(self, f.name)) for f in fields(self))})"  # type: ignore[arg-type]


@dataclass(frozen=True, repr=False)
class Local(Relative):
    """|i - j| < size: a causal query sees exactly `size` keys, itself among them."""

    size: int

    def __post_init__(self) -> None:
        _need("the size of Local", self.size, 1)

    @property
    def band(self) -> Band:
        return Band(self.size - 1, self.size - 1)


@dataclass(frozen=True, repr=False)
class Truncated(Relative):
    """-ahead <= i - j <= back: a bounded past and a bounded look-ahead, as speech uses."""

    back: int
    ahead: int

    def __post_init__(self) -> None:
        _need("back", self.back, 0)
        _need("ahead", self.ahead, 0)

    @property
    def band(self) -> Band:
        return Band(self.back, self.ahead)


@dataclass(frozen=True, repr=False)
class Dilated(Relative):
    """i - j = step * t with |t| < size: a window with holes, `step` times as wide."""

    size: int
    step: int

    def __post_init__(self) -> None:
        _need("the size of Dilated", self.size, 1)
        _need("the step of Dilated", self.step, 1)

    @property
    def band(self) -> Band:
        reach = self.step * (self.size - 1)
        return Band(reach, reach, self.step)


@dataclass(frozen=True, repr=False)
class Stride(Relative):
    """(i - j) mod step = 0, however far."""

    step: int

    def __post_init__(self) -> None:
        _need("the step of Stride", self.step, 1)

    @property
    def band(self) -> Band:
        return Band(None, None, self.step)


@dataclass(frozen=True, repr=False)
class Causal(Relative):
    """i >= j: nothing from the future."""

    @property
    def band(self) -> Band:
        return Band(None, 0)


@dataclass(frozen=True, repr=False)
class Everything(Relative):
    """All pairs: full attention."""

    @property
    def band(self) -> Band:
        return Band(None, None)


@dataclass(frozen=True, repr=False)
class Blocks(Atom):
    """i and j in the same block of `size`, or in one of the `around` blocks on either side of it."""

    size: int
    around: int = 0

    def __post_init__(self) -> None:
        _need("the size of Blocks", self.size, 1)
        _need("around", self.around, 0)

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
        _need("first", self.first, 0)
        at = [self.at] if isinstance(self.at, int) else list(self.at)
        for position in at:
            _need("a position in `at`", position, 0)
        object.__setattr__(self, "at", tuple(sorted(set(at) - set(range(self.first)))))
        if not self.first and not self.at:
            raise ValueError(f"{type(self).__name__} needs special tokens: first=1, or at=[0, 7]")

    def special(self, i: Tensor) -> Tensor:
        found = i < self.first
        return found | torch.isin(i, torch.tensor(self.at, device=i.device)) if self.at else found

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
        _need("the size of Tail", self.size, 1)
        _need("the count of Tail", self.count, 1)
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


@lru_cache(maxsize=64)
def _draw(count: int, seed: int, rows: int, blocks: int | None) -> Tensor:
    """(rows, count) distinct key blocks per query block, -1 where there are fewer; blocks None: from those not after it.

    Row r depends only on (seed, r, how many blocks it may pick from), so a longer table starts like a shorter one.
    """
    picks = np.random.Generator(np.random.PCG64(seed)).random((rows, count))
    room = np.arange(rows) + 1 if blocks is None else np.full(rows, blocks)
    chosen = np.full((rows, count), np.iinfo(np.int64).max)
    for c in range(count):
        pick = np.floor(picks[:, c] * np.maximum(room - c, 0)).astype(np.int64)
        for earlier in np.sort(chosen[:, :c], 1).T:  # the pick-th block among those not chosen yet
            pick += pick >= earlier
        chosen[:, c] = np.where(c < room, pick, np.iinfo(np.int64).max)
    return torch.from_numpy(np.where(chosen == np.iinfo(np.int64).max, -1, chosen))


@dataclass(frozen=True, repr=False)
class Random(Atom):
    """`count` key blocks for each query block, drawn once from the seed: the same for a given seed and length.

    With past=True the blocks of a query are drawn from those not after its own, whatever the length: the causal form.
    """

    count: int
    block: int
    seed: int = 0
    per_head: bool = False
    past: bool = False
    length: int | None = None  # the number of keys it is drawn for; set by `bound`

    def __post_init__(self) -> None:
        _need("the count of Random", self.count, 1)
        _need("the block of Random", self.block, 1)
        _need("seed", self.seed, 0)
        for name in ("per_head", "past"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.length is not None:
            _need("length", self.length, 0)

    @property
    def bends_with_length(self) -> bool:
        return not self.past

    def for_head(self, h: int, heads: int) -> Pattern:  # noqa: ARG002
        return replace(self, seed=self.seed * 1_000_003 + h + 1, per_head=False) if self.per_head else self

    def bound(self, n: int, m: int) -> Pattern:  # noqa: ARG002
        return self if self.past or self.length is not None else replace(self, length=m)

    def table(self, rows: int) -> Tensor:
        """(rows, count) key blocks of the first query blocks, -1 where there are fewer."""
        if self.past:
            return _draw(self.count, self.seed, rows, None)
        if self.length is None:
            raise ValueError("Random draws its blocks for a length: call .bound(n, m) first, or use past=True")
        return _draw(self.count, self.seed, rows, -(-self.length // self.block))

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        if self.per_head:
            return _by_head(h, lambda x: self.for_head(x, 0), i, j)
        rows = int(i.max()) // self.block + 1 if i.numel() else 0
        chosen = self.table(max(rows, 1)).to(i.device)[i // self.block]
        return (chosen == (j // self.block).unsqueeze(-1)).any(-1)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.ones_like(j + now, dtype=torch.bool)  # a later block may draw any earlier one

    def __repr__(self) -> str:
        more = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        return f"Random({', '.join([str(self.count), str(self.block), *more])})"


class Edges(Atom):
    """The edges of a graph, as PyTorch Geometric writes them: row 0 is the key j (source), row 1 the query i (target)."""

    def __init__(self, edges: Any, nodes: int | None = None, loops: bool = False) -> None:
        pairs = torch.as_tensor(edges).detach().cpu()
        if pairs.numel() == 0:
            pairs = pairs.reshape(2, 0).long()
        if pairs.dim() != 2 or pairs.shape[0] != 2 or pairs.is_floating_point():
            raise ValueError(f"edges must be integers of shape (2, edges), sources over targets, not {tuple(pairs.shape)}")
        if nodes is None:
            nodes = int(pairs.max()) + 1 if pairs.numel() else 0
        _need("nodes", nodes, 0)
        if pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < nodes:
            raise ValueError(f"edges name nodes {int(pairs.min())} to {int(pairs.max())}, but there are only {nodes}, from 0")
        self.nodes, self.loops = nodes, bool(loops)
        own = torch.arange(nodes if loops else 0) * (nodes + 1)
        self.codes = torch.cat([pairs[1].long() * nodes + pairs[0].long(), own]).unique()  # i * nodes + j, in order

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        if not len(self.codes):
            return torch.zeros_like(i + j, dtype=torch.bool)
        codes, code = self.codes.to(i.device), i * self.nodes + j
        found = torch.searchsorted(codes, code.contiguous()).clamp_max(len(codes) - 1)
        return (codes[found] == code) & (i >= 0) & (i < self.nodes) & (j >= 0) & (j < self.nodes)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        last = torch.full((max(self.nodes, 1),), -1)  # the last query that sees each key
        if len(self.codes):
            last.scatter_reduce_(0, self.codes % self.nodes, self.codes // self.nodes, "amax")
        return last.to(j.device)[j.clamp(0, max(self.nodes - 1, 0))] >= now

    def bound(self, n: int, m: int) -> Pattern:
        if n != self.nodes or m != self.nodes:
            raise ValueError(f"these edges are of a graph with {self.nodes} nodes: they say nothing about {n} queries and {m} keys")
        return self

    @property
    def bends_with_length(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edges) and self.nodes == other.nodes and torch.equal(self.codes, other.codes)

    def __hash__(self) -> int:
        return hash((self.nodes, self.codes.numpy().tobytes()))

    def __repr__(self) -> str:
        pairs = [(self.codes % max(self.nodes, 1)).tolist(), (self.codes // max(self.nodes, 1)).tolist()]
        return f"Edges({pairs}, nodes={self.nodes})"


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
        return _by_head(h, lambda x: self.for_head(x, len(self.parts)), i, j)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.stack([p.alive(j, now) for p in self.parts]).any(0)

    def __repr__(self) -> str:
        return f"PerHead([{', '.join(map(repr, self.parts))}])"


def _by_head(h: Any, pattern: Any, i: Tensor, j: Tensor) -> Tensor:
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
        flat.extend(q for q in (p.parts if type(p) is kind else (p,)) if q not in flat)  # type: ignore[attr-defined]
    return flat[0] if len(flat) == 1 else kind(tuple(flat))


PATTERNS: dict[str, type[Pattern]] = {
    p.__name__: p
    for p in (Local, Truncated, Dilated, Stride, Blocks, Global, Rows, Columns, Tail, Random, Edges, Causal, Everything, PerHead)
}
