"""The pieces of a plan: how tokens are laid out in blocks, which blocks meet, and which pairs inside them count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache import outlives_tracing
from regard.patterns import Band

MASK_CACHE = 1 << 25  # mask elements a plan remembers between calls
MASKED_SCORE = -1e30  # the score of a pair that does not exist: finite, so that no row makes a NaN
FLOAT_MASK = 1 << 18  # mask elements that may as well be floats


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

    @outlives_tracing
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


class TileGroup(NamedTuple):
    """Tiles of one shape: query block rows[t] meets the key blocks cols[t], -1 for none."""

    rows: Tensor  # (T)
    cols: Tensor  # (T, p)


class Span(NamedTuple):
    """Where queries and keys stand: n queries from position t, m keys from position u."""

    t: int
    n: int
    u: int
    m: int


class TileBatch(NamedTuple):
    """A batch of tiles to compute, all on the device."""

    rows: Tensor  # (T)
    cols: Tensor  # (T, p), none below zero
    hidden: tuple[tuple[int, int, Tensor], ...]  # key columns low..high, and what hides pairs there: see `_mask_bias_or_bool`
    first: int | None  # rows = first + (0 .. T - 1)
    slides: int | None  # cols[t] = slides + t + (0 .. p - 1): key blocks move along with the queries

    def take(self, blocks: Tensor) -> Tensor:
        """(B blocks r ...) -> (B T r ...): the query blocks of these tiles."""
        if self.first is None:
            return blocks.index_select(1, self.rows)
        return blocks[:, self.first : self.first + len(self.rows)]

    def put(self, blocks: Tensor, found: Tensor) -> None:
        """The inverse of take: what was found for these tiles goes to their query blocks."""
        found = found.view(blocks.shape[0], len(self.rows), *blocks.shape[2:])
        if self.first is None:
            blocks.index_copy_(1, self.rows, found)
        else:
            blocks[:, self.first : self.first + len(self.rows)] = found


@dataclass(eq=False)
class TilePart:
    """One intersection of the pattern, as tiles. No query block comes twice."""

    queries: Layout
    keys: Layout
    groups: list[TileGroup]
    span: Span
    seen: Callable[[Tensor, Tensor], Tensor] | None = None  # (i, j) -> bool; None: the tiles hold no other pair
    relative: bool = False  # `seen` depends on i - j alone and tiles slide: those inside the sequence share a mask
    band: Band | None = None  # the part is this band and nothing else
    kept: dict[tuple[int, int, int, torch.device], TileBatch] = field(default_factory=dict)
    moved: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)
    room: int = MASK_CACHE

    def runs(self, most: int, device: torch.device) -> Iterator[TileBatch]:
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

    @property
    def size(self) -> int:
        """How many numbers it holds: blocks that meet, and what is remembered of them."""
        held = sum(run.rows.numel() + run.cols.numel() for run in list(self.kept.values()))
        return sum(group.rows.numel() + group.cols.numel() for group in self.groups) + held + MASK_CACHE - self.room

    def _cuts(self, group: TileGroup, step: int) -> Iterator[tuple[int, int]]:
        """Cut at the ends of the sequence too, so that the tiles inside can share a mask."""
        borders = [0, len(group.rows)]
        if self.relative:
            inside = self._inside(group).long()
            borders = [0, *(torch.nonzero(inside.diff())[:, 0] + 1).tolist(), len(group.rows)]
        for low, high in pairwise(borders):
            for at in range(low, high, step):
                yield at, min(at + step, high)

    def _inside(self, group: TileGroup) -> Tensor:
        """(T) tiles whose queries and keys all exist."""
        i, j = self._positions
        return (i >= 0).all(1)[group.rows] & ((group.cols >= 0) & (j >= 0).all(1)[group.cols.clamp_min(0)]).all(1)

    @cached_property
    def whole(self) -> bool:
        """Does every query block have a tile?"""
        return sum(len(group.rows) for group in self.groups) == self.queries.blocks

    @cached_property
    @outlives_tracing
    def _positions(self) -> tuple[Tensor, Tensor]:
        return self.queries.positions(self.span.t, self.span.n), self.keys.positions(self.span.u, self.span.m)

    @outlives_tracing
    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of queries and keys, (blocks, size) each, where they are needed."""
        if device not in self.moved:
            self.moved[device] = tuple(x.to(device) for x in self._positions)  # type: ignore[assignment]
        return self.moved[device]

    @outlives_tracing
    def _run(self, group: TileGroup, at: int, end: int, device: torch.device) -> TileBatch:
        rows, cols = group.rows[at:end], group.cols[at:end]
        hidden = () if device.type == "meta" else self._hidden(rows, cols, device)  # without numbers there is nothing to hide
        moves = cols[:1, :1] + torch.arange(len(cols))[:, None] + torch.arange(cols.shape[1])
        slides = int(cols[0, 0]) if bool((cols >= 0).all()) and torch.equal(cols, moves) else None
        first = int(rows[0]) if torch.equal(rows, rows[0] + torch.arange(len(rows))) else None
        return TileBatch(rows.to(device), cols.clamp_min(0).to(device), hidden, first, slides)

    def _hidden(self, rows: Tensor, cols: Tensor, device: torch.device) -> tuple[tuple[int, int, Tensor], ...]:
        alike = self.relative and bool(self._inside(TileGroup(rows, cols)).all())
        mask = self.mask(rows[:1], cols[:1]) if alike else self.mask(rows, cols)
        return tuple(
            (low, high, _mask_bias_or_bool(mask[..., low:high]).to(device)) for low, high in _partial(mask, self.keys.size)
        )

    def mask(self, rows: Tensor, cols: Tensor) -> Tensor:
        """(T, r, p * c) pairs of these tiles that belong to the part."""
        i, j = self._positions
        i = i[rows][:, :, None]
        j = torch.where(cols[:, :, None] >= 0, j[cols.clamp_min(0)], -1).flatten(1)[:, None]
        real = (j >= 0) & (i >= 0)
        return real if self.seen is None else real & self.seen(i.clamp_min(0), j.clamp_min(0))


def _mask_bias_or_bool(mask: Tensor) -> Tensor:
    """What makes scores UNSEEN outside the mask (T, r, x): numbers to add (faster), or where to write it (smaller)."""
    return torch.where(mask, 0.0, MASKED_SCORE) if mask.numel() <= FLOAT_MASK else ~mask


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
