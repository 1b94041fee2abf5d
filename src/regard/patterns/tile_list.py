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
from regard.patterns.tile_masks import TILE, tile_masks
from regard.patterns.tiles import Layout, Span, TilePart, ceil_div

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
    bits, full, some, kinds = tile_masks(listed, taken, rows, cols, plan.span)
    masks, number = bits[some].unique(dim=0, return_inverse=True)
    of_kind = torch.full_like(full, -1, dtype=torch.long)  # number of the mask
    of_kind[some] = torch.where(full[some], -1, number)
    here = some[kinds]
    rows, cols, which = rows[here], cols[here], of_kind[kinds[here]]
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
    # Global rows are one part for every few thousand keys, all with the same layouts.
    by_query = {layout: _tiles_of_blocks(layout, span.n) for layout in {part.queries for part in parts}}
    by_key = {layout: _tiles_of_blocks(layout, span.m) for layout in {part.keys for part in parts}}
    for part in parts:
        for group in part.groups:
            listed = by_key[part.keys][group.cols.clamp_min(0)]
            theirs = torch.where(group.cols[..., None] >= 0, listed, -1).flatten(1)  # (T, p * wc)
            own = by_query[part.queries][group.rows]  # (T, wr)
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
    listed = [plan.by_key if by_key else plan.by_query for plan in plans]
    starts = _running_sum([0 if tiles is None else len(tiles.entries) for tiles in listed])
    first_masks = _running_sum([0 if plan.masks is None else len(plan.masks) for plan in plans])
    together = share if by_key and not shared else 1
    rows = torch.stack([_list_rows(tiles, ceil_div(length, TILE), start) for tiles, start in zip(listed, starts, strict=False)])
    bands = torch.tensor([plan.band or NO_BAND for plan in plans])
    items, merges, slots = _cut_rows(rows, bands, together)
    entries = [x.entries + torch.tensor([0, first]) for x, first in zip(listed, first_masks, strict=False) if x is not None]
    masks = [plan.masks for plan in plans if plan.masks is not None]
    return KernelItems(
        items.to(device, torch.int32),
        torch.cat([torch.zeros(1, 2, dtype=torch.long)[:0], *entries]).to(device, torch.int32),
        torch.cat([torch.zeros(0, 2, TILE, dtype=torch.int32), *masks]).to(device),
        merges.to(device, torch.int32),
        slots,
        shared,
    )


def _list_rows(tiles: TileList | None, count: int, start: int) -> Tensor:
    """Return first, middle and last entry of all rows of a list (count, 3), whose entries are numbered from a start."""
    if tiles is None:
        return torch.full((count, 3), start)
    return torch.stack([tiles.offsets[:-1], tiles.middles, tiles.offsets[1:]], 1) + start


def _cut_rows(rows: Tensor, bands: Tensor, together: int) -> tuple[Tensor, Tensor, int]:
    """Cut the long ones of rows of tiles (heads, tiles, 3); return items, merges and the number of slots.

    Items are in the order of owner, tile, head and piece; an owner has as many heads as are merged together. Every piece has
    full tiles first, and the first one of a row has the band (heads, 2) of its head.
    """
    heads, tiles, _ = rows.shape
    numbers = torch.cartesian_prod(torch.arange(heads), torch.arange(tiles)).view(heads, tiles, 2)
    ordered = torch.cat([numbers, rows], 2).unflatten(0, (-1, together)).transpose(1, 2)
    head, tile, first, middle, last = ordered.flatten(0, 2).unbind(1)
    long = last - first > 2 * PIECE
    counts = torch.where(long, (last - first + PIECE - 1) // PIECE, 1)
    row, piece = _repeated(counts)
    low = first[row] + piece * PIECE
    high = torch.where(long[row], (low + PIECE).minimum(last[row]), last[row])
    reach = torch.where((piece == 0)[:, None], bands[head[row]], torch.tensor(NO_BAND))
    parts = counts.view(-1, together).sum(1)  # (owners * tiles)
    merged = parts > 1
    ends = torch.where(merged, parts, 0).cumsum(0)
    owner, place = _repeated(parts)
    slot = torch.where(merged[owner], (ends - parts)[owner] + place, -1)
    items = torch.stack([head[row], tile[row], low, middle[row].maximum(low).minimum(high), high, slot, *reach.unbind(1)], 1)
    at = torch.arange(len(parts))
    merges = torch.stack([at // max(tiles, 1), at % max(tiles, 1), ends - parts, ends], 1)[merged]
    return items, merges, int(ends[-1]) if len(ends) else 0


def _repeated(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat every index as often as its count; return also the number of each among its repeats."""
    index = torch.arange(len(counts)).repeat_interleave(counts)
    return index, torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]


def _running_sum(counts: list[int]) -> list[int]:
    """Return the sum of the counts before each."""
    total = [0]
    for count in counts:
        total.append(total[-1] + count)
    return total
