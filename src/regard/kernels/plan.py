"""From a pattern to the tiles that compute it, without ever looking at all n x m pairs.

A pattern is a union of intersections of atoms. Each intersection becomes a Part: its cheapest atom (the driver) says which
blocks of queries meet which blocks of keys, and the rest is a mask inside those tiles. Parts are disjoint: a later, smaller part
leaves out the pairs of the larger ones before it, so their results merge by log-sum-exp without counting a pair twice.
A stride becomes a block by reordering: residue classes are laid out one after another. Everything here is on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from regard.mixers.patterns import Alternative, Atom, Band, Blocks, Columns, Edges, Pattern, Random, Rows, Tail

TILES = ((24, 16), (96, 32), (512, 64))  # a band that reaches less far than this: queries and keys per block
WIDE = 128  # of all wider ones
LONG = 1024  # queries per tile when there are few keys, keys per tile when there are few queries
KEPT = 1 << 25  # mask elements a plan remembers between calls


@dataclass(eq=False)
class Layout:
    """Tokens arranged in blocks: `index` (blocks, size) into the sequence, -1 for nobody; None: as they come."""

    size: int
    blocks: int
    index: Tensor | None = None
    everyone: bool = True  # every token of the sequence stands somewhere, once
    there: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def positions(self, start: int, length: int) -> Tensor:
        """(blocks, size) positions of the tokens, -1 for nobody."""
        index = self.index
        if index is None:
            index = torch.arange(self.blocks * self.size).view(self.blocks, self.size)
            return torch.where(index < length, index + start, -1)
        return torch.where(index >= 0, index + start, -1)

    def moves(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """For a layout with an index: (slots) the token to put into each slot, and (tokens) the slot to find each token in.

        A slot for nobody takes any token. Without everyone, `tokens` are those of the first slots, in order.
        """
        if device not in self.there:
            assert self.index is not None
            flat = self.index.flatten()
            slots = torch.nonzero(flat >= 0)[:, 0]
            back = slots[flat[slots].argsort()] if self.everyone else slots
            self.there[device] = (flat.clamp_min(0).to(device), back.to(device))
        return self.there[device]


class Group(NamedTuple):
    """Tiles of one shape: query block rows[t] meets the key blocks cols[t], -1 for none."""

    rows: Tensor  # (T)
    cols: Tensor  # (T, p)


class Span(NamedTuple):
    """Where queries and keys stand: n queries from position t, m keys from position u."""

    t: int
    n: int
    u: int
    m: int


class Run(NamedTuple):
    """A batch of tiles to compute, all on the device."""

    rows: Tensor  # (T)
    cols: Tensor  # (T, p), none below zero
    hidden: tuple[tuple[int, int, Tensor], ...]  # key columns low..high and the pairs (T or 1, r, high - low) not to be seen there
    slides: int | None  # cols[t] = slides + t + (0 .. p - 1): key blocks move along with the queries


@dataclass(eq=False)
class Part:
    """One intersection of the pattern, as tiles. No query block comes twice."""

    queries: Layout
    keys: Layout
    groups: list[Group]
    span: Span
    seen: Callable[[Tensor, Tensor], Tensor] | None = None  # (i, j) -> bool; None: the tiles hold no other pair
    relative: bool = False  # `seen` depends on i - j alone and tiles slide: those inside the sequence share a mask
    band: Band | None = None  # the part is this band and nothing else
    kept: dict[tuple[int, int, int, torch.device], Run] = field(default_factory=dict)
    room: int = KEPT

    def runs(self, most: int, device: torch.device) -> Iterator[Run]:
        """Tiles in batches of about `most` score elements, at least one tile each."""
        for number, group in enumerate(self.groups):
            step = max(1, most // (self.queries.size * group.cols.shape[1] * self.keys.size))
            for at, end in self._cuts(group, step):
                key = (number, at, end, device)
                run = self.kept.get(key)
                if run is None:
                    run = self._run(group, at, end, device)
                    cost = sum(mask.numel() for *_, mask in run.hidden)
                    if cost <= self.room:
                        self.room -= cost
                        self.kept[key] = run
                yield run

    def _cuts(self, group: Group, step: int) -> Iterator[tuple[int, int]]:
        """Cut at the ends of the sequence too, so that the tiles inside can share a mask."""
        borders = [0, len(group.rows)]
        if self.relative:
            inside = self._inside(group).long()
            borders = [0, *(torch.nonzero(inside.diff())[:, 0] + 1).tolist(), len(group.rows)]
        for low, high in zip(borders, borders[1:], strict=False):
            for at in range(low, high, step):
                yield at, min(at + step, high)

    def _inside(self, group: Group) -> Tensor:
        """(T) tiles whose queries and keys all exist."""
        i, j = self._positions
        return (i >= 0).all(1)[group.rows] & ((group.cols >= 0) & (j >= 0).all(1)[group.cols.clamp_min(0)]).all(1)

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor]:
        return self.queries.positions(self.span.t, self.span.n), self.keys.positions(self.span.u, self.span.m)

    def _run(self, group: Group, at: int, end: int, device: torch.device) -> Run:
        rows, cols = group.rows[at:end], group.cols[at:end]
        alike = self.relative and bool(self._inside(Group(rows, cols)).all())
        mask = self.mask(rows[:1], cols[:1]) if alike else self.mask(rows, cols)
        hidden = tuple((low, high, ~mask[..., low:high].to(device)) for low, high in _partial(mask, self.keys.size))
        moves = cols[:1, :1] + torch.arange(len(cols))[:, None] + torch.arange(cols.shape[1])
        slides = int(cols[0, 0]) if bool((cols >= 0).all()) and torch.equal(cols, moves) else None
        return Run(rows.to(device), cols.clamp_min(0).to(device), hidden, slides)

    def mask(self, rows: Tensor, cols: Tensor) -> Tensor:
        """(T, r, p * c) pairs of these tiles that belong to the part."""
        i, j = self._positions
        i = i[rows][:, :, None]
        j = torch.where(cols[:, :, None] >= 0, j[cols.clamp_min(0)], -1).flatten(1)[:, None]
        real = (j >= 0) & (i >= 0)
        return real if self.seen is None else real & self.seen(i.clamp_min(0), j.clamp_min(0))


def _partial(mask: Tensor, size: int) -> list[tuple[int, int]]:
    """Runs of key columns, whole blocks of `size`, in which some pair is missing."""
    lacks = (~mask).unflatten(-1, (-1, size)).any(-1).flatten(0, 1).any(0).tolist()
    found: list[tuple[int, int]] = []
    for block, lack in enumerate(lacks):
        if lack and found and found[-1][1] == block * size:
            found[-1] = (found[-1][0], (block + 1) * size)
        elif lack:
            found.append((block * size, (block + 1) * size))
    return found


@dataclass(eq=False)
class Plan:
    """Everything that attention over one pattern computes."""

    parts: list[Part]
    span: Span


@lru_cache(maxsize=64)
def plan(pattern: Pattern, span: Span) -> Plan:
    """The tiles of the pattern of one head, bound to its length."""
    if span.n == 0 or span.m == 0:
        return Plan([], span)
    parts: list[Part] = []
    earlier: list[Alternative] = []
    for atoms in _ordered(pattern, span):
        driver = min(atoms, key=lambda a: _pairs(a, span))
        rest = tuple(a for a in atoms if a is not driver)
        for part in _tiles(driver, atoms, span):
            part.seen = _seen(driver, rest, earlier)
            part.relative = isinstance(driver, Band) and all(isinstance(a, Band) for a in chain(rest, *earlier))
            part.band = driver if isinstance(driver, Band) and not rest and not earlier else None
            parts.append(part)
        earlier.append(atoms)
    return Plan(parts, span)


def _ordered(pattern: Pattern, span: Span) -> list[Alternative]:
    """Alternatives with their bands merged, the ones inside others dropped, the largest first."""
    merged: list[Alternative] = []
    for atoms in pattern.alternatives():
        bands = [a for a in atoms if isinstance(a, Band)]
        rest = tuple(dict.fromkeys(a for a in atoms if not isinstance(a, Band)))
        band = bands[0] if bands else Band(None, None)
        for other in bands[1:]:
            band = band.both(other)
        if band == Band(None, None) and rest:
            merged.append(rest)
        elif (band.back is None or band.back >= 0) and (band.ahead is None or band.ahead >= 0):
            merged.append((*rest, band))
    merged.sort(key=lambda atoms: -min(_pairs(a, span) for a in atoms))
    kept: list[Alternative] = []
    for atoms in merged:
        if not any(_inside(atoms, other) for other in kept):
            kept.append(atoms)
    return kept


def _inside(atoms: Alternative, other: Alternative) -> bool:
    """Is every condition of `other` already among those of `atoms`? Then it adds nothing."""

    def implied(condition: Atom) -> bool:
        return any(a == condition or (isinstance(a, Band) and isinstance(condition, Band) and condition.covers(a)) for a in atoms)

    return all(implied(condition) for condition in other)


def _seen(driver: Atom, rest: Alternative, earlier: list[Alternative]) -> Callable[[Tensor, Tensor], Tensor] | None:
    exact = isinstance(driver, Blocks | Random | Edges | Rows | Columns | Tail)  # their tiles hold exactly their pairs
    inside, outside = (rest if exact else (driver, *rest)), tuple(earlier)
    if not inside and not outside:
        return None

    def seen(i: Tensor, j: Tensor) -> Tensor:
        found = torch.ones_like(i + j, dtype=torch.bool)
        for atom in inside:
            found = found & atom(0, i, j)
        for atoms in outside:
            other = torch.ones_like(found)
            for atom in atoms:
                other = other & atom(0, i, j)
            found = found & ~other
        return found

    return seen


def _pairs(atom: Atom, s: Span) -> float:
    """About how many pairs an atom holds: enough to choose a driver."""
    match atom:
        case Band(back, ahead, step):
            reach = (s.m if back is None else min(back, s.m)) + (s.m if ahead is None else min(ahead, s.m)) + 1
            return s.n * min(reach, s.m) / step
        case Blocks(size, around):
            return s.n * min(size * (2 * around + 1), s.m)
        case Random(count, block):
            return s.n * min(count * block, s.m)
        case Rows():
            return len(atom.positions(s.t, s.t + s.n)) * s.m
        case Columns() | Tail():
            return s.n * len(atom.positions(s.u, s.u + s.m))
        case Edges():
            return len(atom.codes)
    raise NotImplementedError(f"no plan for {type(atom).__name__}")


def _tiles(driver: Atom, atoms: Alternative, s: Span) -> list[Part]:
    match driver:
        case Band():
            return _band(driver, s)
        case Blocks(size, around):
            return _blocks(size, s, lambda rows: rows[:, None] + torch.arange(-around, around + 1))
        case Random(_, block):
            return _blocks(block, s, lambda rows: driver.table(int(rows.max()) + 1)[rows])
        case Rows():
            return _rows(driver.positions(s.t, s.t + s.n) - s.t, s)
        case Columns() | Tail():
            band = next((a for a in atoms if isinstance(a, Band)), Band(None, None))
            return _columns(driver.positions(s.u, s.u + s.m) - s.u, band, s)
        case Edges():
            return _edges(driver, s)
    raise NotImplementedError(f"no plan for {type(driver).__name__}")


def _grouped(rows: Tensor, low: Tensor, high: Tensor, base: Tensor | int, blocks: int) -> list[Group]:
    """Tiles whose key blocks are base + low .. base + high, those outside 0 .. blocks - 1 missing, grouped by their number."""
    groups = []
    for p in (high - low + 1).unique().tolist():
        if p > 0:
            here = high - low + 1 == p
            cols = low[here][:, None] + torch.arange(p)
            first = base[here][:, None] if isinstance(base, Tensor) else base
            groups.append(Group(rows[here], torch.where((cols >= 0) & (cols < blocks), cols + first, -1)))
    return groups


def _band(band: Band, s: Span) -> list[Part]:
    """Per residue class, a run of query blocks each meeting a run of key blocks."""
    queries, first, many = _classes(s.t, s.n, band.step, s, band)
    keys, start, count = _classes(s.u, s.m, band.step, s, band)
    r, gap = queries.size, first - start  # a query block begins `gap` after the key block of the same number
    block = torch.arange(many)
    low = torch.zeros(many, dtype=torch.long) if band.back is None else (block * r + gap - band.back // band.step) // r
    top = (block + 1) * r - 1 + gap + (0 if band.ahead is None else band.ahead // band.step)
    high = torch.full((many,), count - 1) if band.ahead is None else top // r
    if band.back is None:
        high = high.clamp_max(count - 1)
    if band.ahead is None:
        low = low.clamp_min(0)
    base = torch.arange(band.step).repeat_interleave(many)
    groups = _grouped(base * many + block.repeat(band.step), low.repeat(band.step), high.repeat(band.step), base * count, count)
    return [Part(queries, keys, groups, s)]


def _classes(start: int, length: int, step: int, s: Span, band: Band) -> tuple[Layout, int, int]:
    """A layout by residue class; where a class begins, counted in steps; blocks per class."""
    first = start // step
    many = -(-(start + length) // step) - first  # tokens per class, some at the ends nobody
    reach = sum((s.m if x is None else min(x, s.m)) // step for x in (band.back, band.ahead))
    tile = next((size for most, size in TILES if reach < most), WIDE)
    r = min(tile, max(-(-max(s.n, s.m) // step), 1))
    blocks = -(-many // r)
    if step == 1:
        return Layout(r, blocks), first, blocks
    token = (first + torch.arange(blocks * r)) * step + torch.arange(step)[:, None] - start
    index = torch.where((token >= 0) & (token < length), token, -1)
    return Layout(r, step * blocks, index.view(step * blocks, r)), first, blocks


def _aligned(start: int, length: int, size: int) -> tuple[Layout, int]:
    """A layout in blocks that begin at multiples of size, and the number of the first of them."""
    first = start // size
    blocks = -(-(start + length) // size) - first
    if start % size == 0:
        return Layout(size, blocks), first
    token = first * size - start + torch.arange(blocks * size).view(blocks, size)
    return Layout(size, blocks, torch.where((token >= 0) & (token < length), token, -1)), first


def _blocks(size: int, s: Span, meets: Callable[[Tensor], Tensor]) -> list[Part]:
    """Query block number x meets the key blocks meets(x)."""
    queries, first = _aligned(s.t, s.n, size)
    keys, start = _aligned(s.u, s.m, size)
    cols = meets(first + torch.arange(queries.blocks)) - start
    cols = torch.where((cols >= 0) & (cols < keys.blocks), cols, -1)
    rows = torch.arange(queries.blocks)
    pieces = -(-size // WIDE)
    if pieces > 1 and size % pieces == 0 and queries.index is None:  # a long block in shorter strips of queries
        queries = Layout(size // pieces, queries.blocks * pieces)
        rows, cols = torch.arange(queries.blocks), cols.repeat_interleave(pieces, 0)
    some = (cols >= 0).any(1)
    return [Part(queries, keys, [Group(rows[some], cols[some])], s)] if some.any() else []


def _rows(index: Tensor, s: Span) -> list[Part]:
    """A few queries, all keys, in strips of keys."""
    if not len(index):
        return []
    queries, keys = _listed(index, WIDE), Layout(min(LONG, s.m), -(-s.m // min(LONG, s.m)))
    rows, parts = torch.arange(queries.blocks), []
    for cols in torch.arange(keys.blocks).split(max(1, LONG // queries.size)):
        parts.append(Part(queries, keys, [Group(rows, cols.expand(len(rows), -1))], s))
    return parts


def _columns(index: Tensor, band: Band, s: Span) -> list[Part]:
    """All queries, a few keys, of which the band may rule out whole blocks."""
    if not len(index):
        return []
    keys = _listed(index, WIDE)
    r = min(s.n, LONG if keys.blocks == 1 else WIDE)
    queries = Layout(r, -(-s.n // r))
    rows = torch.arange(queries.blocks)
    low, high = s.t + rows * r, s.t + ((rows + 1) * r - 1).clamp_max(s.n - 1)
    lowest = low - band.back if band.back is not None else torch.full_like(low, s.u)
    highest = high + band.ahead if band.ahead is not None else torch.full_like(high, s.u + s.m)
    first = torch.searchsorted(index + s.u, lowest) // keys.size
    last = (torch.searchsorted(index + s.u, highest, right=True) - 1).div(keys.size, rounding_mode="floor")
    return [Part(queries, keys, _grouped(rows, first, last, 0, keys.blocks), s)]


def _listed(index: Tensor, most: int) -> Layout:
    size = min(len(index), most)
    blocks = -(-len(index) // size)
    padded = torch.full((blocks * size,), -1)
    padded[: len(index)] = index
    return Layout(size, blocks, padded.view(blocks, size), everyone=False)


def _edges(edges: Edges, s: Span) -> list[Part]:
    """One query and its neighbours to a tile; queries of similar degree together."""
    i, j = edges.codes // max(edges.nodes, 1), edges.codes % max(edges.nodes, 1)
    here = (i >= s.t) & (i < s.t + s.n) & (j >= s.u) & (j < s.u + s.m)
    i, j = i[here] - s.t, j[here] - s.u
    degree = torch.bincount(i, minlength=s.n)
    first = degree.cumsum(0) - degree
    groups, low = [], 0
    for p in (2**x for x in range(64)):
        rows = torch.nonzero((degree > low) & (degree <= p))[:, 0]
        if len(rows):
            place = torch.arange(p)
            cols = j[(first[rows][:, None] + place).clamp_max(len(j) - 1)]
            groups.append(Group(rows, torch.where(place < degree[rows][:, None], cols, -1)))
        low = p
        if p >= s.m:
            break
    return [Part(Layout(1, s.n), Layout(1, s.m), groups, s)]
