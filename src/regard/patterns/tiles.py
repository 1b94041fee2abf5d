"""The parts of a plan: how tokens are laid out in blocks, which blocks meet, and which pairs inside them count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.cache import outlives_tracing
from regard.patterns import Atom, Band, Columns, Rows, Tail
from regard.patterns.condition import Condition

MASK_CACHE = 1 << 25  # mask elements that a part keeps between calls
MASKED_SCORE = -1e30  # the score of a pair that does not exist: finite, so that no row makes a NaN
FLOAT_MASK = 1 << 18  # mask elements that may as well be floats
UNCUT_MASK = 1 << 16  # mask elements up to which one batch with a mask for every tile is faster than several
BATCH_LISTS = 16  # complete lists of batches that a part keeps
NO_CONDITION = Condition()
FULL_MASK = 1 << 22  # mask elements that are made together to find full tiles


def ceil_div(count: int, size: int) -> int:
    """Return how many pieces of a size hold a count: the quotient, rounded up."""
    return -(-count // size)


@dataclass(eq=False)
class Layout:
    """Tokens arranged in blocks: `index` (blocks, size) into the sequence, -1 for an empty slot; None: in order."""

    size: int
    blocks: int
    index: Tensor | None = None
    complete: bool = True  # every token of the sequence has a slot, exactly one
    moved: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def positions(self, start: int, length: int) -> Tensor:
        """Return the positions of the tokens (blocks, size), -1 in empty slots."""
        index = self.index
        if index is None:
            index = torch.arange(self.blocks * self.size).view(self.blocks, self.size)
            return torch.where(index < length, index + start, -1)
        return torch.where(index >= 0, index + start, -1)

    @outlives_tracing
    def moves(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return, for a layout with an index, (slots) the token of each slot, and (tokens) the slot of each token.

        An empty slot takes any token. In a layout that is not complete, `tokens` are those of the filled slots, in order.
        """
        if device not in self.moved:
            assert self.index is not None
            flat = self.index.flatten()
            slots = torch.nonzero(flat >= 0)[:, 0]
            back = slots[flat[slots].argsort()] if self.complete else slots
            self.moved[device] = (flat.clamp_min(0).to(device), back.to(device))
        return self.moved[device]

    def split(self, x: Tensor) -> Tensor:
        """Cut a sequence into blocks: (B length y) -> (B blocks size y)."""
        if self.index is not None:
            x = x.index_select(1, self.moves(x.device)[0])
        elif self.blocks * self.size > x.shape[1]:
            x = pad(x, (0, 0, 0, self.blocks * self.size - x.shape[1]))
        return x.unflatten(1, (self.blocks, self.size))

    def join(self, blocks: Tensor, length: int) -> Tensor:
        """Undo `split`: (B blocks size ...) -> (B tokens ...), with the tokens of `tokens`."""
        flat = blocks.flatten(1, 2)
        if self.index is None:
            return flat[:, :length]
        return flat.index_select(1, self.moves(flat.device)[1])

    def tokens(self, device: torch.device) -> Tensor | None:
        """Return which tokens `join` gives; None: all of them, in order."""
        if self.index is None or self.complete:
            return None
        moves, back = self.moves(device)
        return moves[back]


class TileGroup(NamedTuple):
    """Tiles of one shape: query block rows[t] meets the key blocks cols[t], -1 for none."""

    rows: Tensor  # (T)
    cols: Tensor  # (T, p)


class Tiling(NamedTuple):
    """Which blocks of queries meet which blocks of keys."""

    queries: Layout
    keys: Layout
    groups: list[TileGroup]


class Span(NamedTuple):
    """Positions of queries and keys: n queries from position t, m keys from position u."""

    t: int
    n: int
    u: int
    m: int


class TileBatch(NamedTuple):
    """A batch of tiles to compute, all on the device."""

    rows: Tensor  # (T)
    cols: Tensor  # (T, p), none below zero
    hidden: tuple[tuple[int, int, Tensor], ...]  # key columns low..high, and what hides pairs there: see `_mask_bias_or_bool`
    at: slice | Tensor  # the query blocks `rows`, as a slice where they are consecutive
    slides: int | None  # cols[t] = slides + t + (0 .. p - 1): key blocks move along with the queries


class KeyBlocks(NamedTuple):
    """Key blocks of every query block, as compressed rows: those of block x are offsets[x] .. offsets[x + 1] - 1."""

    offsets: Tensor  # (query blocks + 1)
    blocks: Tensor  # (tiles) number of the key block
    full: Tensor  # (tiles) every pair of the tile belongs to the part: it needs no mask


@dataclass(eq=False)
class TilePart:
    """One intersection of atoms of a pattern, as tiles: pure data. No query block occurs twice.

    `driver` is the atom that enumerates the tiles. A pair of the tiles belongs to the part if both tokens exist and the
    condition holds.
    """

    queries: Layout
    keys: Layout
    groups: list[TileGroup]
    span: Span
    driver: Atom
    condition: Condition
    batched: dict[tuple[int, int, int, torch.device], TileBatch] = field(default_factory=dict)
    lists: dict[tuple[int, torch.device], tuple[TileBatch, ...]] = field(default_factory=dict)
    moved: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)
    room: int = MASK_CACHE

    @property
    def kind(self) -> str:
        """Return how the tiles are enumerated.

        "band": by lo = -ahead, hi = back and step of the driver; "rows", "columns": by the tokens of a layout that is not
        complete; "list": by `key_blocks`.
        """
        match self.driver:
            case Band():
                return "band"
            case Rows():
                return "rows"
            case Columns() | Tail():
                return "columns"
        return "list"

    @property
    def band(self) -> Band | None:
        """Return the band that is the whole part, if it is one."""
        if isinstance(self.driver, Band) and self.condition == Condition((self.driver,)):
            return self.driver
        return None

    @cached_property
    def relative(self) -> bool:
        """Return whether masks depend on i - j alone and tiles slide: those inside the sequence share a mask."""
        return isinstance(self.driver, Band) and self.condition.relative

    @cached_property
    def whole(self) -> bool:
        """Return whether every query block has a tile."""
        return sum(len(group.rows) for group in self.groups) == self.queries.blocks

    @property
    def size(self) -> int:
        """Count the numbers it holds: blocks that meet, and what is cached of them."""
        cached = sum(batch.rows.numel() + batch.cols.numel() for batch in list(self.batched.values()))
        return sum(group.rows.numel() + group.cols.numel() for group in self.groups) + cached + MASK_CACHE - self.room

    @property
    def scored(self) -> int:
        """Count the pairs of the tiles, also those that are masked."""
        return sum(group.cols.numel() for group in self.groups) * self.queries.size * self.keys.size

    def batches(self, limit: int, device: torch.device) -> Iterable[TileBatch]:
        """Return the tiles in batches of about `limit` score elements, at least one tile each."""
        made = self.lists.get((limit, device))
        if made is None:
            return self._batches(limit, device)
        return made

    def _batches(self, limit: int, device: torch.device) -> Iterator[TileBatch]:
        made, count = [], 0
        for number, group in enumerate(self.groups):
            step = max(1, limit // (self.queries.size * group.cols.shape[1] * self.keys.size))
            for low, high in self._cuts(group, step):
                count += 1
                key = (number, low, high, device)
                batch = self.batched.get(key)
                if batch is None:
                    batch = self._batch(group, low, high, device)
                    cost = sum(mask.numel() for *_, mask in batch.hidden)
                    if cost <= self.room:
                        self.room -= cost
                        self.batched[key] = batch
                if key in self.batched:
                    made.append(batch)
                yield batch
        if len(made) == count and len(self.lists) < BATCH_LISTS:
            self.lists[limit, device] = tuple(made)

    def _cuts(self, group: TileGroup, step: int) -> Iterator[tuple[int, int]]:
        """Cut at the ends of the sequence too, so that the tiles inside can share a mask, unless one small batch holds all."""
        borders = [0, len(group.rows)]
        masked = len(group.rows) * self.queries.size * group.cols.shape[1] * self.keys.size
        small = len(group.rows) <= step and masked <= UNCUT_MASK
        if self.relative and not small:
            inside = self._inside(group).long()
            borders = [0, *(torch.nonzero(inside.diff())[:, 0] + 1).tolist(), len(group.rows)]
        for low, high in pairwise(borders):
            for at in range(low, high, step):
                yield at, min(at + step, high)

    def _inside(self, group: TileGroup) -> Tensor:
        """Return which tiles (T) have queries and keys in all slots."""
        i, j = self._positions
        return (i >= 0).all(1)[group.rows] & ((group.cols >= 0) & (j >= 0).all(1)[group.cols.clamp_min(0)]).all(1)

    @cached_property
    @outlives_tracing
    def _positions(self) -> tuple[Tensor, Tensor]:
        return self.queries.positions(self.span.t, self.span.n), self.keys.positions(self.span.u, self.span.m)

    @outlives_tracing
    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, (blocks, size) each, on a device."""
        if device not in self.moved:
            self.moved[device] = tuple(x.to(device) for x in self._positions)  # type: ignore[assignment]
        return self.moved[device]

    def distances(self, batch: TileBatch) -> Tensor:
        """Return i - j of the pairs of a batch of tiles, (T 1 r x)."""
        i, j = self.positions(batch.rows.device)
        return (i[batch.rows][:, :, None] - j[batch.cols].flatten(1)[:, None]).unsqueeze(1)

    @outlives_tracing
    def _batch(self, group: TileGroup, low: int, high: int, device: torch.device) -> TileBatch:
        rows, cols = group.rows[low:high], group.cols[low:high]
        hidden = () if device.type == "meta" else self._hidden(rows, cols, device)  # without numbers there is nothing to hide
        moves = cols[:1, :1] + torch.arange(len(cols))[:, None] + torch.arange(cols.shape[1])
        slides = int(cols[0, 0]) if bool((cols >= 0).all()) and torch.equal(cols, moves) else None
        there = rows.to(device)
        consecutive = torch.equal(rows, rows[0] + torch.arange(len(rows)))
        at = slice(int(rows[0]), int(rows[0]) + len(rows)) if consecutive else there
        return TileBatch(there, cols.clamp_min(0).to(device), hidden, at, slides)

    def _hidden(self, rows: Tensor, cols: Tensor, device: torch.device) -> tuple[tuple[int, int, Tensor], ...]:
        """Return runs of key columns in which pairs are missing, with what hides those: (T or 1, 1, r, high - low)."""
        alike = self.relative and bool(self._inside(TileGroup(rows, cols)).all())
        mask = self.mask(rows[:1], cols[:1]) if alike else self.mask(rows, cols)
        mask = mask.unsqueeze(1)
        return tuple(
            (low, high, _mask_bias_or_bool(mask[..., low:high]).to(device)) for low, high in _partial(mask, self.keys.size)
        )

    def mask(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return which pairs (T, r, p * c) of these tiles belong to the part."""
        i, j = self._positions
        i = i[rows][:, :, None]
        j = torch.where(cols[:, :, None] >= 0, j[cols.clamp_min(0)], -1).flatten(1)[:, None]
        real = (j >= 0) & (i >= 0)
        if self.condition == NO_CONDITION:
            return real
        return real & self.condition.mask(i.clamp_min(0), j.clamp_min(0))

    @cached_property
    @outlives_tracing
    def key_blocks(self) -> KeyBlocks:
        """List the key blocks of every query block, in order, and which tiles are full: for kernels that read lists."""
        rows, cols, full = [], [], []
        for group in self.groups:
            p = group.cols.shape[1]
            step = max(1, FULL_MASK // (self.queries.size * self.keys.size * p))
            for some, theirs in zip(group.rows.split(step), group.cols.split(step), strict=True):
                every = self.mask(some, theirs).unflatten(-1, (p, self.keys.size)).all(-1).all(1)  # (T, p)
                there = theirs >= 0
                rows.append(some[:, None].expand(there.shape)[there])
                cols.append(theirs[there])
                full.append(every[there])
        none = torch.zeros(0, dtype=torch.long)
        row = torch.cat([none, *rows])
        col = torch.cat([none, *cols])
        order = (row * self.keys.blocks + col).argsort()
        counts = torch.bincount(row, minlength=self.queries.blocks)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        return KeyBlocks(offsets, col[order], torch.cat([none.bool(), *full])[order])


def _mask_bias_or_bool(mask: Tensor) -> Tensor:
    """Return what makes scores MASKED_SCORE outside the mask: numbers to add (faster), or where to write it (smaller)."""
    if mask.numel() <= FLOAT_MASK:
        return torch.where(mask, 0.0, MASKED_SCORE)
    return ~mask


def _partial(mask: Tensor, size: int) -> list[tuple[int, int]]:
    """Find runs of key columns, whole blocks of `size`, in which some pair is missing."""
    lacks = (~mask).unflatten(-1, (-1, size)).any(-1).flatten(0, -2).any(0).tolist()
    found: list[tuple[int, int]] = []
    for block, lack in enumerate(lacks):
        if lack and found and found[-1][1] == block * size:
            found[-1] = (found[-1][0], (block + 1) * size)
        elif lack:
            found.append((block * size, (block + 1) * size))
    return found
