"""Plans for kernels: one band by arithmetic, lists of tiles of 64 x 64 for other pairs, and bands inside residue classes.

`kernel_plan` lowers the plan of one head. Pairs are split into disjoint groups, computed one after the other:

    the natural group    tokens in order: the widest plain band, then a list of the tiles that hold pairs of no band
    a strided band       the widest one, in residue classes; a hole leaves out the pairs of the natural band

A tile of the list is full, or has a mask of one bit for each pair; equal masks are stored once. `kernel_items` distributes the
tiles of all heads over programs: a long row of tiles, as global tokens have, is cut into pieces that are merged afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache import bounded_cache
from regard.patterns import Alternative, Band, Columns, Rows
from regard.patterns.plan import Plan
from regard.patterns.tiles import Layout, Span, TilePart, ceil_div

TILE = 64  # queries and keys of a tile
MASK_BATCH = 1 << 22  # pairs that are tested together
EMPTIEST = 32  # a list may score this many times the pairs that the tiles of the plan do: kernels score them that fast
FEWEST = 8  # tiles of a row of tiles that a list may always have
PIECE = 16  # tiles that one program walks, where a row of tiles is longer than twice as many
FAR = 1 << 29  # further than any distance
NO_BAND = (-FAR, -FAR)


class TileList(NamedTuple):
    """Compressed rows of tiles: those of row x are entries offsets[x] .. offsets[x + 1] - 1, the full ones up to middles[x]."""

    offsets: Tensor  # (rows + 1)
    middles: Tensor  # (rows)
    entries: Tensor  # (tiles, 2) number of the tile, number of its mask; full tiles first


class StridedBand(NamedTuple):
    """A band in residue classes, -ahead <= i - j <= back, in tokens, without the pairs of a hole of the same form."""

    step: int
    back: int
    ahead: int
    hole_back: int
    hole_ahead: int


class LedBand(NamedTuple):
    """A band, keys `columns` that all queries see, and queries `rows` that see all keys: the first ones of the sequence.

    Except for `rows`, a query sees no key behind its band; of those keys, a key is seen from `reach` queries before it on.
    """

    back: int
    ahead: int
    columns: int = 0
    rows: int = 0
    reach: int = 0


class KernelPlan(NamedTuple):
    """The plan of one head for kernels; with `refused`, a sentence about why there is none."""

    band: tuple[int, int] | None = None  # back, ahead
    by_query: TileList | None = None
    by_key: TileList | None = None
    masks: Tensor | None = None  # (masks, 2, 64) int32: bit j of [x, i] is the pair of query i and key 32 x + j of a tile
    strided: tuple[StridedBand, ...] = ()
    refused: str | None = None
    led: LedBand | None = None  # all pairs of the band and the lists, where they are of this form

    @property
    def size(self) -> int:
        """Count the numbers it holds."""
        lists = (self.by_query, self.by_key)
        return sum(x.entries.numel() for x in lists if x is not None) + (0 if self.masks is None else self.masks.numel())


@bounded_cache(lambda made: made.size)
def kernel_plan(plan: Plan) -> KernelPlan:
    """Lower the plan of one head."""
    alternatives = list(dict.fromkeys(_atoms(part) for part in plan.parts))
    bands = [a[0] for a in alternatives if len(a) == 1 and isinstance(a[0], Band)]
    band = max((x for x in bands if x.step == 1), key=lambda x: _width(x, plan.span), default=None)
    strided = max((x for x in bands if x.step > 1), key=lambda x: _width(x, plan.span), default=None)
    listed = [a for a in alternatives if a not in ((band,), (strided,))]
    bounds = None if band is None else _bounds(band)
    holes = () if strided is None else (StridedBand(strided.step, *_bounds(strided), *(bounds or NO_BAND)),)
    if not listed:
        return KernelPlan(bounds, strided=holes)
    taken = [x for x in (band, strided) if x is not None]
    led = None if band is None or strided is not None else _led_band(band, listed, plan.span)
    return _listed_plan(plan, listed, taken, bounds)._replace(strided=holes, led=led)


def _led_band(band: Band, listed: list[Alternative], span: Span) -> LedBand | None:
    """Return a band with leading global tokens, if all other alternatives are such tokens, without or all with its `ahead`."""
    shift, (back, ahead) = span.t - span.u, _bounds(band)
    columns = rows = 0
    limits = set()
    for atoms in listed:
        tokens, *others = sorted(atoms, key=lambda atom: isinstance(atom, Band))
        limits.add(tuple(others))
        if isinstance(tokens, Columns):
            columns = max(columns, _leading(tokens, span.u, span.m))
        elif isinstance(tokens, Rows):
            rows = max(rows, _leading(tokens, span.t, span.n))
        else:
            return None
    capped = limits == {(Band(None, band.ahead),)}
    if not capped and limits != {()}:
        return None
    if rows and rows - 1 + shift - back > columns:  # a key that is no column has a global query behind its window
        return None
    if capped:
        rows = 0  # all they see is in the band or in the columns
    elif columns and columns - 1 > rows + shift + ahead:  # a query that is no global one has a column behind its window
        return None
    return LedBand(back, ahead, columns, rows, ahead if capped else span.n + span.m) if 0 < max(columns, rows) <= TILE else None


def _leading(tokens: Columns | Rows, start: int, length: int) -> int:
    """Return how many tokens from the start on are special; more than any tile has if there are others."""
    found = tokens.positions(start, start + length)
    return len(found) if torch.equal(found, start + torch.arange(len(found))) else FAR


def _atoms(part: TilePart) -> Alternative:
    """Return the whole intersection of atoms that a part belongs to."""
    rest = (atom for atom in part.condition.inside if atom != part.driver)
    return (part.driver, *rest)


def _bounds(band: Band) -> tuple[int, int]:
    """Return how far a band reaches back and ahead, in tokens, at most further than any distance."""
    return tuple(FAR if x is None else min(x, FAR) for x in (band.back, band.ahead))  # type: ignore[return-value]


def _width(band: Band, span: Span) -> int:
    back, ahead = _bounds(band)
    return min(back, span.n + span.m) + min(ahead, span.n + span.m)


def _listed_plan(plan: Plan, listed: list[Alternative], taken: list[Band], bounds: tuple[int, int] | None) -> KernelPlan:
    """List the tiles of alternatives, without the pairs that bands have taken."""
    rows, cols = _candidates([part for part in plan.parts if _atoms(part) in listed], plan.span)
    scored = sum(part.scored for part in plan.parts)
    room = min(TILE, plan.span.n) * min(TILE, plan.span.m)  # of a tile
    if len(rows) * room > max(EMPTIEST * scored, FEWEST * plan.span.n * TILE):
        return KernelPlan(refused=f"its pairs are too scattered for tiles of {TILE} x {TILE}")
    bits, full, some = _masks(listed, taken, rows, cols, plan.span)
    rows, cols, bits, full = rows[some], cols[some], bits[some], full[some]
    masks, which = bits.unique(dim=0, return_inverse=True)
    which = torch.where(full, -1, which)
    tiles = ceil_div(plan.span.n, TILE), ceil_div(plan.span.m, TILE)
    by_query = _compressed(rows, cols, which, tiles[0])
    by_key = _compressed(cols, rows, which, tiles[1])
    return KernelPlan(bounds, by_query, by_key, _words(masks))


def _words(bits: Tensor) -> Tensor:
    """Split 64 bits into two words: (masks 64) int64 -> (masks 2 64) int32."""
    return torch.stack([bits, bits >> 32], 1).to(torch.int32)


def _candidates(parts: list[TilePart], span: Span) -> tuple[Tensor, Tensor]:
    """Return the tiles that may hold pairs of these parts: numbers of query and key tiles, each pair once, in order."""
    width = ceil_div(span.m, TILE)
    codes = [torch.zeros(0, dtype=torch.long)]
    for part in parts:
        by_query = _tiles_of_blocks(part.queries, span.n)
        by_key = _tiles_of_blocks(part.keys, span.m)
        for group in part.groups:
            theirs = torch.where(group.cols[..., None] >= 0, by_key[group.cols.clamp_min(0)], -1).flatten(1)  # (T, p * wc)
            own = by_query[group.rows]  # (T, wr)
            code = own[:, :, None] * width + theirs[:, None]
            there = (own[:, :, None] >= 0) & (theirs[:, None] >= 0)
            codes.append(code[there].unique())
    code = torch.cat(codes).unique()
    return code // width, code % width


def _tiles_of_blocks(layout: Layout, length: int) -> Tensor:
    """Return the numbers of the tiles that every block has tokens in, (blocks, at most so many), -1 for none."""
    if layout.index is None:
        block = torch.arange(layout.blocks)
        first = block * layout.size // TILE
        last = ((block + 1) * layout.size).clamp_max(length).sub(1) // TILE
        number = first[:, None] + torch.arange(int((last - first).max()) + 1)
        return torch.where(number <= last[:, None], number, -1)
    number = torch.where(layout.index >= 0, layout.index // TILE, -1).sort(1).values
    again = torch.zeros_like(number, dtype=torch.bool)
    again[:, 1:] = number[:, 1:] == number[:, :-1]
    return torch.where(again, -1, number)


def _masks(listed: list[Alternative], taken: list[Band], rows: Tensor, cols: Tensor, span: Span) -> tuple[Tensor, Tensor, Tensor]:
    """Test the pairs of tiles: bits (T 64) int64, which tiles are full, and which hold any pair."""
    token = torch.arange(TILE)
    powers = torch.ones(TILE, dtype=torch.long) << token
    found = []
    step = MASK_BATCH // (TILE * TILE)
    for some, theirs in zip(rows.split(step), cols.split(step), strict=True):
        x = (some[:, None] * TILE + token)[:, :, None]
        y = (theirs[:, None] * TILE + token)[:, None]
        inside = (x < span.n) & (y < span.m)
        i, j = x + span.t, y + span.u
        seen = torch.zeros_like(inside)
        for atoms in listed:
            holds = inside
            for atom in atoms:
                holds = holds & atom(0, i, j)
            seen = seen | holds
        for band in taken:
            seen = seen & ~band(0, i, j)
        bits = torch.where(seen, powers, 0).sum(-1)
        found.append((bits, seen.flatten(1).all(1), seen.flatten(1).any(1)))
    if not found:
        return torch.zeros(0, TILE, dtype=torch.long), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)
    bits, full, some = (torch.cat(x) for x in zip(*found, strict=True))
    return bits, full, some


def _compressed(rows: Tensor, cols: Tensor, which: Tensor, count: int) -> TileList:
    """Sort tiles by row, full ones first."""
    partial = (which >= 0).long()
    width = int(cols.max()) + 1 if len(cols) else 1
    order = ((rows * 2 + partial) * width + cols).argsort()
    zero = torch.zeros(1, dtype=torch.long)
    offsets = torch.cat([zero, torch.bincount(rows, minlength=count).cumsum(0)])
    full = torch.bincount(rows[partial == 0], minlength=count)
    entries = torch.stack([cols, which.clamp_min(0)], 1)[order]
    return TileList(offsets, offsets[:-1] + full, entries)


class KernelItems(NamedTuple):
    """What programs compute, on a device; items (count, 8): query head, tile, first, middle and last entry, slot, back, ahead."""

    items: Tensor  # int32
    entries: Tensor  # (tiles, 2) int32
    masks: Tensor  # (masks, 2, 64) int32
    merges: Tensor  # (merged tiles, 4) int32: head, tile, first and last slot
    slots: int  # results that are merged
    shared: bool  # the items are those of every head


def kernel_items(plans: tuple[KernelPlan, ...], share: int, length: int, by_key: bool, device: torch.device) -> KernelItems:
    """Distribute the tiles of heads over programs, by query or by key.

    plans: one for every query head, or one for all of them. share: query heads for each key head. A tile of keys whose query
    heads have plans of their own is computed for each of them and summed.
    """
    shared = len(plans) == 1
    listed = [_list_rows(plan.by_key if by_key else plan.by_query, length) for plan in plans]
    starts = _running_sum([0 if rows.entries is None else len(rows.entries) for rows in listed])
    first_masks = _running_sum([0 if plan.masks is None else len(plan.masks) for plan in plans])
    together = share if by_key and not shared else 1
    items: list[list[int]] = []
    merges: list[list[int]] = []
    slots = 0
    for owner in range(len(plans) // together):
        heads = range(owner * together, (owner + 1) * together)
        for tile in range(ceil_div(length, TILE)):
            pieces = []
            for head in heads:
                reach = plans[head].band or NO_BAND
                for first, middle, last in _pieces(*listed[head].rows[tile]):
                    start = starts[head]
                    pieces.append([head, tile, first + start, middle + start, last + start, -1, *reach])
                    reach = NO_BAND
            if len(pieces) > 1:
                merges.append([owner, tile, slots, slots + len(pieces)])
                for number, piece in enumerate(pieces):
                    piece[5] = slots + number
                slots += len(pieces)
            items += pieces
    entries = [rows.entries + torch.tensor([0, first_masks[x]]) for x, rows in enumerate(listed) if rows.entries is not None]
    masks = [plan.masks for plan in plans if plan.masks is not None]
    return KernelItems(
        torch.tensor(items, dtype=torch.int32).view(-1, 8).to(device),
        torch.cat([torch.zeros(1, 2, dtype=torch.long)[:0], *entries]).to(device, torch.int32),
        torch.cat([torch.zeros(0, 2, TILE, dtype=torch.int32), *masks]).to(device),
        torch.tensor(merges, dtype=torch.int32).view(-1, 4).to(device),
        slots,
        shared,
    )


class _ListRows(NamedTuple):
    """The rows of a list as integers: first, middle and last entry."""

    rows: list[tuple[int, int, int]]
    entries: Tensor | None


def _list_rows(tiles: TileList | None, length: int) -> _ListRows:
    if tiles is None:
        return _ListRows([(0, 0, 0)] * ceil_div(length, TILE), None)
    rows = zip(tiles.offsets[:-1].tolist(), tiles.middles.tolist(), tiles.offsets[1:].tolist(), strict=True)
    return _ListRows(list(rows), tiles.entries)


def _pieces(first: int, middle: int, last: int) -> list[tuple[int, int, int]]:
    """Cut a long row of tiles; every piece has full tiles first."""
    if last - first <= 2 * PIECE:
        return [(first, middle, last)]
    lows = range(first, last, PIECE)
    return [(low, min(max(middle, low), min(low + PIECE, last)), min(low + PIECE, last)) for low in lows]


def _running_sum(counts: list[int]) -> list[int]:
    """Return the sum of the counts before each."""
    total = [0]
    for count in counts:
        total.append(total[-1] + count)
    return total
