"""From an atom, the driver of a part, to the blocks of queries and keys that meet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.patterns import Alternative, Atom, Band, Blocks, Columns, Edges, Random, Rows, Tail
from regard.patterns.tiles import Layout, Span, TileGroup, Tiling

TILE_SIZES = ((24, 16), (96, 32), (512, 64))  # a band that reaches less far than this: queries and keys per block
WIDE_TILE = 128  # of all wider ones
LONG_TILE = 1024  # queries per tile when there are few keys, keys per tile when there are few queries


def estimated_pairs(atom: Atom, s: Span) -> float:
    """Estimate how many pairs an atom holds: enough to choose a driver."""
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


def lower_atom(driver: Atom, atoms: Alternative, s: Span) -> list[Tiling]:
    """Enumerate the tiles of the driver of an alternative."""
    match driver:
        case Band():
            return _lower_band(driver, s)
        case Blocks(size, around):
            return _lower_blocks(size, s, lambda rows: rows[:, None] + torch.arange(-around, around + 1))
        case Random(_, block):
            return _lower_blocks(block, s, lambda rows: driver.table(int(rows.max()) + 1)[rows])
        case Rows():
            return _lower_rows(driver.positions(s.t, s.t + s.n) - s.t, s)
        case Columns() | Tail():
            band = next((a for a in atoms if isinstance(a, Band)), Band(None, None))
            return _lower_columns(driver.positions(s.u, s.u + s.m) - s.u, band, s)
        case Edges():
            return _lower_edges(driver, s)
    raise NotImplementedError(f"no plan for {type(driver).__name__}")


def _grouped(rows: Tensor, low: Tensor, high: Tensor, base: Tensor | int, blocks: int) -> list[TileGroup]:
    """Group tiles by their number of key blocks, which are base + low .. base + high, those outside 0 .. blocks - 1 missing."""
    groups = []
    for p in (high - low + 1).unique().tolist():
        if p > 0:
            here = high - low + 1 == p
            cols = low[here][:, None] + torch.arange(p)
            first = base[here][:, None] if isinstance(base, Tensor) else base
            groups.append(TileGroup(rows[here], torch.where((cols >= 0) & (cols < blocks), cols + first, -1)))
    return groups


def _lower_band(band: Band, s: Span) -> list[Tiling]:
    """Lower a band: per residue class, a run of query blocks each meeting a run of key blocks."""
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
    return [Tiling(queries, keys, groups)]


def _classes(start: int, length: int, step: int, s: Span, band: Band) -> tuple[Layout, int, int]:
    """Lay out tokens by residue class; return also where a class begins, counted in steps, and blocks per class."""
    first = start // step
    many = -(-(start + length) // step) - first  # tokens per class, with empty slots at the ends
    reach = sum((s.m if x is None else min(x, s.m)) // step for x in (band.back, band.ahead))
    tile = next((size for most, size in TILE_SIZES if reach < most), WIDE_TILE)
    r = min(tile, max(-(-max(s.n, s.m) // step), 1))
    blocks = -(-many // r)
    if step == 1:
        return Layout(r, blocks), first, blocks
    token = (first + torch.arange(blocks * r)) * step + torch.arange(step)[:, None] - start
    index = torch.where((token >= 0) & (token < length), token, -1)
    return Layout(r, step * blocks, index.view(step * blocks, r)), first, blocks


def _aligned(start: int, length: int, size: int) -> tuple[Layout, int]:
    """Lay out tokens in blocks that begin at multiples of size; return also the number of the first block."""
    first = start // size
    blocks = -(-(start + length) // size) - first
    if start % size == 0:
        return Layout(size, blocks), first
    token = first * size - start + torch.arange(blocks * size).view(blocks, size)
    return Layout(size, blocks, torch.where((token >= 0) & (token < length), token, -1)), first


def _lower_blocks(size: int, s: Span, meets: Callable[[Tensor], Tensor]) -> list[Tiling]:
    """Lower blocks: query block number x meets the key blocks meets(x)."""
    queries, first = _aligned(s.t, s.n, size)
    keys, start = _aligned(s.u, s.m, size)
    cols = meets(first + torch.arange(queries.blocks)) - start
    cols = torch.where((cols >= 0) & (cols < keys.blocks), cols, -1)
    rows = torch.arange(queries.blocks)
    pieces = -(-size // WIDE_TILE)
    if pieces > 1 and size % pieces == 0 and queries.index is None:  # a long block in shorter strips of queries
        queries = Layout(size // pieces, queries.blocks * pieces)
        rows = torch.arange(queries.blocks)
        cols = cols.repeat_interleave(pieces, 0)
    some = (cols >= 0).any(1)
    if some.any():
        return [Tiling(queries, keys, [TileGroup(rows[some], cols[some])])]
    return []


def _lower_rows(index: Tensor, s: Span) -> list[Tiling]:
    """Lower rows: a few queries, all keys, in strips of keys."""
    if not len(index):
        return []
    queries = _lower_listed(index, WIDE_TILE)
    keys = Layout(min(LONG_TILE, s.m), -(-s.m // min(LONG_TILE, s.m)))
    rows, parts = torch.arange(queries.blocks), []
    for cols in torch.arange(keys.blocks).split(max(1, LONG_TILE // queries.size)):
        parts.append(Tiling(queries, keys, [TileGroup(rows, cols.expand(len(rows), -1))]))
    return parts


def _lower_columns(index: Tensor, band: Band, s: Span) -> list[Tiling]:
    """Lower columns: all queries, a few keys, of which the band may rule out whole blocks."""
    if not len(index):
        return []
    keys = _lower_listed(index, WIDE_TILE)
    r = min(s.n, LONG_TILE if keys.blocks == 1 else WIDE_TILE)
    queries = Layout(r, -(-s.n // r))
    rows = torch.arange(queries.blocks)
    low = s.t + rows * r
    high = s.t + ((rows + 1) * r - 1).clamp_max(s.n - 1)
    lowest = low - band.back if band.back is not None else torch.full_like(low, s.u)
    highest = high + band.ahead if band.ahead is not None else torch.full_like(high, s.u + s.m)
    first = torch.searchsorted(index + s.u, lowest) // keys.size
    last = (torch.searchsorted(index + s.u, highest, right=True) - 1).div(keys.size, rounding_mode="floor")
    return [Tiling(queries, keys, _grouped(rows, first, last, 0, keys.blocks))]


def _lower_listed(index: Tensor, most: int) -> Layout:
    """Lay out the listed tokens alone."""
    size = min(len(index), most)
    blocks = -(-len(index) // size)
    padded = torch.full((blocks * size,), -1)
    padded[: len(index)] = index
    return Layout(size, blocks, padded.view(blocks, size), complete=False)


def _lower_edges(edges: Edges, s: Span) -> list[Tiling]:
    """Lower edges: one query and its neighbours to a tile; queries of similar degree together."""
    i = edges.codes // max(edges.nodes, 1)
    j = edges.codes % max(edges.nodes, 1)
    here = (i >= s.t) & (i < s.t + s.n) & (j >= s.u) & (j < s.u + s.m)
    i = i[here] - s.t
    j = j[here] - s.u
    degree = torch.bincount(i, minlength=s.n)
    first = degree.cumsum(0) - degree
    groups, low = [], 0
    for p in (2**x for x in range(64)):
        rows = torch.nonzero((degree > low) & (degree <= p))[:, 0]
        if len(rows):
            place = torch.arange(p)
            cols = j[(first[rows][:, None] + place).clamp_max(len(j) - 1)]
            groups.append(TileGroup(rows, torch.where(place < degree[rows][:, None], cols, -1)))
        low = p
        if p >= s.m:
            break
    return [Tiling(Layout(1, s.n), Layout(1, s.m), groups)]
