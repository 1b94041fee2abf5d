"""From an atom, the driver of a part, to the blocks of queries and keys that meet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.patterns import Alternative, Atom, Band, Blocks, Columns, Edges, Neighbourhood, Random, Rows, Tail
from regard.patterns.tiles import Layout, Span, TileGroup, Tiling, ceil_div

TILE_SIZES = ((24, 16), (96, 32), (512, 64))  # a band that reaches less far than this: queries and keys per block
WIDE_TILE = 128  # of all wider ones
LONG_TILE = 1024  # queries per tile when there are few keys, keys per tile when there are few queries


def estimated_pairs(atom: Atom, s: Span) -> float:
    """Estimate how many pairs an atom holds: enough to choose a driver."""
    match atom:
        case Band(back, ahead, step):
            reach = _reach(back, s) + _reach(ahead, s) + 1
            return s.n * min(reach, s.m) / step
        case Blocks(size, around):
            reach = size * (2 * around + 1)
            return s.n * min(reach, s.m)
        case Neighbourhood():
            reach = (2 * atom.reach + 1) * atom.columns
            return s.n * min(reach, s.m)
        case Random(count, block):
            reach = count * block
            return s.n * min(reach, s.m)
        case Rows():
            rows = atom.positions(s.t, s.t + s.n)
            return len(rows) * s.m
        case Columns() | Tail():
            columns = atom.positions(s.u, s.u + s.m)
            return s.n * len(columns)
        case Edges():
            return len(atom.codes)
    raise NotImplementedError(f"no plan for {type(atom).__name__}")


def _reach(bound: int | None, s: Span) -> int:
    """Return how far a band reaches on one side, at most over all keys."""
    if bound is None:
        return s.m
    return min(bound, s.m)


def lower_atom(driver: Atom, atoms: Alternative, s: Span) -> list[Tiling]:
    """Enumerate the tiles of the driver of an alternative."""
    match driver:
        case Band():
            return _lower_band(driver, s)
        case Blocks(size, around):
            neighbours = torch.arange(-around, around + 1)
            return _lower_blocks(size, s, lambda rows: rows[:, None] + neighbours)
        case Neighbourhood(side, down):
            grid = Span(s.t - driver.first, s.n, s.u - driver.first, s.m)
            near = torch.arange(-down, down + 1)
            return _lower_blocks(side, grid, lambda rows: rows[:, None] + near)
        case Random(_, block):
            return _lower_blocks(block, s, lambda rows: driver.table(int(rows.max()) + 1)[rows])
        case Rows():
            rows = driver.positions(s.t, s.t + s.n)
            return _lower_rows(rows - s.t, s)
        case Columns() | Tail():
            bands = (atom for atom in atoms if isinstance(atom, Band))
            columns = driver.positions(s.u, s.u + s.m)
            return _lower_columns(columns - s.u, next(bands, Band(None, None)), s)
        case Edges():
            return _lower_edges(driver, s)
    raise NotImplementedError(f"no plan for {type(driver).__name__}")


def _grouped(rows: Tensor, low: Tensor, high: Tensor, base: Tensor | int, blocks: int) -> list[TileGroup]:
    """Group tiles by their number of key blocks, which are base + low .. base + high, those outside 0 .. blocks - 1 missing."""
    groups = []
    counts = high - low + 1
    for p in counts.unique().tolist():
        if p > 0:
            here = counts == p
            cols = low[here][:, None] + torch.arange(p)
            first = base[here][:, None] if isinstance(base, Tensor) else base
            inside = _inside_range(cols, blocks)
            cols = torch.where(inside, cols + first, -1)
            groups.append(TileGroup(rows[here], cols))
    return groups


def _inside_range(index: Tensor, end: int) -> Tensor:
    """Return where an index is one of 0 .. end - 1."""
    return (index >= 0) & (index < end)


def _lower_band(band: Band, s: Span) -> list[Tiling]:
    """Lower a band: per residue class, a run of query blocks each meeting a run of key blocks."""
    queries, first, many = _classes(s.t, s.n, band.step, s, band)
    keys, start, count = _classes(s.u, s.m, band.step, s, band)
    r, gap = queries.size, first - start  # a query block begins `gap` after the key block of the same number
    block = torch.arange(many)
    if band.back is None:
        low = torch.zeros(many, dtype=torch.long)
    else:
        bottom = block * r + gap - band.back // band.step
        low = bottom // r
    if band.ahead is None:
        high = torch.full((many,), count - 1)
    else:
        top = (block + 1) * r - 1 + gap + band.ahead // band.step
        high = top // r
    if band.back is None:
        high = high.clamp_max(count - 1)
    if band.ahead is None:
        low = low.clamp_min(0)
    residue = torch.arange(band.step).repeat_interleave(many)
    rows = residue * many + block.repeat(band.step)
    low = low.repeat(band.step)
    high = high.repeat(band.step)
    groups = _grouped(rows, low, high, residue * count, count)
    return [Tiling(queries, keys, groups)]


def _classes(start: int, length: int, step: int, s: Span, band: Band) -> tuple[Layout, int, int]:
    """Lay out tokens by residue class; return also where a class begins, counted in steps, and blocks per class."""
    first = start // step
    many = ceil_div(start + length, step) - first  # tokens per class, with empty slots at the ends
    reach = sum(_reach(bound, s) // step for bound in (band.back, band.ahead))
    sizes = (size for most, size in TILE_SIZES if reach < most)
    tile = next(sizes, WIDE_TILE)
    longest = ceil_div(max(s.n, s.m), step)
    r = min(tile, max(longest, 1))
    blocks = ceil_div(many, r)
    if step == 1:
        return Layout(r, blocks), first, blocks
    number = first + torch.arange(blocks * r)
    residue = torch.arange(step)[:, None]
    token = number * step + residue - start
    index = torch.where(_inside_range(token, length), token, -1)
    layout = Layout(r, step * blocks, index.view(step * blocks, r))
    return layout, first, blocks


def _aligned(start: int, length: int, size: int) -> tuple[Layout, int]:
    """Lay out tokens in blocks that begin at multiples of size; return also the number of the first block."""
    first = start // size
    blocks = ceil_div(start + length, size) - first
    if start % size == 0:
        return Layout(size, blocks), first
    slots = torch.arange(blocks * size).view(blocks, size)
    token = first * size - start + slots
    index = torch.where(_inside_range(token, length), token, -1)
    return Layout(size, blocks, index), first


def _lower_blocks(size: int, s: Span, meets: Callable[[Tensor], Tensor]) -> list[Tiling]:
    """Lower blocks: query block number x meets the key blocks meets(x)."""
    queries, first = _aligned(s.t, s.n, size)
    keys, start = _aligned(s.u, s.m, size)
    rows = torch.arange(queries.blocks)
    cols = meets(first + rows) - start
    cols = torch.where(_inside_range(cols, keys.blocks), cols, -1)
    pieces = ceil_div(size, WIDE_TILE)
    if pieces > 1 and size % pieces == 0 and queries.index is None:  # a long block in shorter strips of queries
        queries = Layout(size // pieces, queries.blocks * pieces)
        rows = torch.arange(queries.blocks)
        cols = cols.repeat_interleave(pieces, 0)
    some = (cols >= 0).any(1)
    if some.any():
        group = TileGroup(rows[some], cols[some])
        return [Tiling(queries, keys, [group])]
    return []


def _lower_rows(index: Tensor, s: Span) -> list[Tiling]:
    """Lower rows: a few queries, all keys, in strips of keys."""
    if not len(index):
        return []
    queries = _lower_listed(index, WIDE_TILE)
    size = min(LONG_TILE, s.m)
    keys = Layout(size, ceil_div(s.m, size))
    rows, parts = torch.arange(queries.blocks), []
    step = max(1, LONG_TILE // queries.size)
    for cols in torch.arange(keys.blocks).split(step):
        group = TileGroup(rows, cols.expand(len(rows), -1))
        parts.append(Tiling(queries, keys, [group]))
    return parts


def _lower_columns(index: Tensor, band: Band, s: Span) -> list[Tiling]:
    """Lower columns: all queries, a few keys, of which the band may rule out whole blocks."""
    if not len(index):
        return []
    keys = _lower_listed(index, WIDE_TILE)
    tile = LONG_TILE if keys.blocks == 1 else WIDE_TILE
    r = min(s.n, tile)
    queries = Layout(r, ceil_div(s.n, r))
    rows = torch.arange(queries.blocks)
    low = s.t + rows * r
    end = (rows + 1) * r
    high = s.t + (end - 1).clamp_max(s.n - 1)
    lowest = low - band.back if band.back is not None else torch.full_like(low, s.u)
    highest = high + band.ahead if band.ahead is not None else torch.full_like(high, s.u + s.m)
    positions = index + s.u
    first = torch.searchsorted(positions, lowest) // keys.size
    last = torch.searchsorted(positions, highest, right=True) - 1
    last = last.div(keys.size, rounding_mode="floor")
    groups = _grouped(rows, first, last, 0, keys.blocks)
    return [Tiling(queries, keys, groups)]


def _lower_listed(index: Tensor, most: int) -> Layout:
    """Lay out the listed tokens alone."""
    size = min(len(index), most)
    blocks = ceil_div(len(index), size)
    padded = torch.full((blocks * size,), -1)
    padded[: len(index)] = index
    return Layout(size, blocks, padded.view(blocks, size), complete=False)


def _lower_edges(edges: Edges, s: Span) -> list[Tiling]:
    """Lower edges: one query and its neighbours to a tile; queries of similar degree together."""
    nodes = max(edges.nodes, 1)
    i = edges.codes // nodes - s.t
    j = edges.codes % nodes - s.u
    here = _inside_range(i, s.n) & _inside_range(j, s.m)
    i = i[here]
    j = j[here]
    degree = torch.bincount(i, minlength=s.n)
    first = degree.cumsum(0) - degree
    groups, low = [], 0
    for p in (2**x for x in range(64)):
        similar = (degree > low) & (degree <= p)
        rows = torch.nonzero(similar)[:, 0]
        if len(rows):
            place = torch.arange(p)
            listed = first[rows][:, None] + place
            cols = j[listed.clamp_max(len(j) - 1)]
            exists = place < degree[rows][:, None]
            groups.append(TileGroup(rows, torch.where(exists, cols, -1)))
        low = p
        if p >= s.m:
            break
    return [Tiling(Layout(1, s.n), Layout(1, s.m), groups)]
