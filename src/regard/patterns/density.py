"""Count the pairs and blocks of a pattern from its plan, without an n x n tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.patterns import Atom, Band, Blocks, Causal, Edges, Neighbourhood, Pattern, Random, Tail
from regard.patterns.algebra import Several
from regard.patterns.fixed import SpecialTokens
from regard.patterns.plan import plan
from regard.patterns.tiles import Span, TilePart, ceil_div

DENSITY_ELEMENTS = 1 << 24


class PairCount(NamedTuple):
    """Hold numbers of pairs and blocks, summed over heads."""

    pairs: int
    possible: int  # pairs of full attention, causal if causal=True
    blocks: int  # blocks of queries x keys that hold at least one pair
    possible_blocks: int

    @property
    def density(self) -> float:
        return self.pairs / max(self.possible, 1)

    @property
    def block_density(self) -> float:
        return self.blocks / max(self.possible_blocks, 1)


def count_pairs(
    pattern: Pattern, n: int, m: int | None = None, *, causal: bool = False, heads: int = 1, block: int = 64
) -> PairCount:
    """Count the pairs and the blocks of a pattern with n queries and m keys."""
    if m is None:
        m = n
    span = Span(0, n, 0, m)
    whole = Band(None, 0 if causal else None)
    counted: dict[Pattern, tuple[int, int]] = {}
    pairs = blocks = 0
    for h in range(heads):
        own = pattern.for_head(h, heads).bound(n, m)
        if causal:
            own = own & Causal()
        if own not in counted:
            counted[own] = _pattern_pairs(own, span, block)
        pairs += counted[own][0]
        blocks += counted[own][1]
    possible = _band_pairs(whole, span)
    possible_blocks = len(_band_blocks(whole, span, block))
    return PairCount(pairs, heads * possible, blocks, heads * possible_blocks)


def cells(pattern: Pattern, n: int, block: int) -> Tensor:
    """Compute the density of the pattern of one head, bound to n tokens, in each cell of block x block pairs, (c c)."""
    span = Span(0, n, 0, n)
    wide = ceil_div(n, block)
    counts = torch.zeros(wide * wide, dtype=torch.long)
    for part in plan(pattern, span).parts:
        if part.band is not None:
            counts += _band_cells(part.band, n, block).flatten()
        else:
            for code in _tile_codes(part, span, block):
                counts += torch.bincount(code, minlength=wide * wide)
    sizes = torch.full((wide,), block)
    sizes[-1] = n - block * (wide - 1)
    return counts.view(wide, wide) / (sizes[:, None] * sizes)


def several_windows(pattern: Pattern | None) -> int:
    """Return a length at which a figure shows more than one window of a pattern: 1,024 to 32,768; of a graph, its nodes."""
    leaves = [] if pattern is None else _leaves(pattern)
    atoms = [atom for leaf in leaves for (atom,) in leaf.alternatives()]
    graphs = [atom.nodes for atom in atoms if isinstance(atom, Edges)]
    if graphs:
        return max(graphs[0], 1)
    reach = min(max((_reach(atom) for atom in atoms), default=1), 2**12)
    return max(1024, 8 << (reach - 1).bit_length())


def _leaves(pattern: Pattern) -> list[Pattern]:
    if isinstance(pattern, Several):
        return [leaf for part in pattern.parts for leaf in _leaves(part)]
    return [pattern]


def _reach(atom: Atom) -> int:
    """Return the largest distance or period of an atom."""
    match atom:
        case Band(back, ahead, step):
            return max(back or 1, ahead or 1, step)
        case Blocks(size, around):
            return size * (around + 1)
        case Neighbourhood(columns, reach):
            return columns * (reach + 1)
        case Random(_, block):
            return block
        case Tail(size, _):
            return size
        case SpecialTokens():
            return max(atom.first, atom.last, *atom.at, 1)
    return 1


def _pattern_pairs(pattern: Pattern, span: Span, block: int) -> tuple[int, int]:
    """Count the pairs and the blocks of the pattern of one head."""
    pairs, codes = 0, []
    for part in plan(pattern, span).parts:
        if part.band is not None:
            pairs += _band_pairs(part.band, span)
            codes.append(_band_blocks(part.band, span, block))
        else:
            found, block_codes = _tile_pairs(part, span, block)
            pairs += found
            codes.append(block_codes)
    return pairs, len(torch.cat(codes).unique()) if codes else 0


def _tile_pairs(part: TilePart, span: Span, block: int) -> tuple[int, Tensor]:
    """Count the pairs of a part, and list their blocks."""
    pairs, codes = 0, []
    for code in _tile_codes(part, span, block):
        pairs += len(code)
        codes.append(code.unique())
    return pairs, torch.cat(codes).unique() if codes else torch.zeros(0, dtype=torch.long)


def _tile_codes(part: TilePart, span: Span, block: int) -> Iterator[Tensor]:
    """Iterate over the block numbers of the pairs of a part, a few tiles at a time."""
    wide = ceil_div(span.m, block)
    i = part.queries.positions(span.t, span.n)
    j = part.keys.positions(span.u, span.m)
    for group in part.groups:
        elements = part.queries.size * part.keys.size * group.cols.shape[1]
        step = max(1, DENSITY_ELEMENTS // elements)
        for rows, cols in zip(group.rows.split(step), group.cols.split(step), strict=True):
            row = i[rows] // block * wide
            column = j[cols.clamp_min(0)].flatten(1) // block
            code = row[:, :, None] + column[:, None]
            yield code[part.mask(rows, cols)]


def _band_cells(band: Band, n: int, block: int) -> Tensor:
    """Count the pairs of a band in each cell: for every query in closed form, then summed over blocks of queries."""
    start = torch.arange(0, n, block)
    end = (start + block).clamp_max(n) - 1
    counts = []
    for i in torch.arange(n).split(block):
        i = i[:, None]
        low = start.expand(len(i), -1)
        high = end.expand(len(i), -1)
        if band.back is not None:
            low = torch.maximum(start, i - band.back)
        if band.ahead is not None:
            high = torch.minimum(end, i + band.ahead)
        steps = (high - i).div(band.step, rounding_mode="floor") + (i - low).div(band.step, rounding_mode="floor") + 1
        counts.append(torch.where(low <= high, steps, 0).sum(0))
    return torch.stack(counts)


def _band_pairs(band: Band, s: Span) -> int:
    """Count the pairs of a band, in closed form per query: its keys are an arithmetic progression."""
    i = torch.arange(s.t, s.t + s.n)
    end = s.u + s.m - 1
    low = torch.full_like(i, s.u)
    high = torch.full_like(i, end)
    if band.back is not None:
        low = (i - band.back).clamp_min(s.u)
    if band.ahead is not None:
        high = (i + band.ahead).clamp_max(end)
    first = -((i - low) // band.step)  # in steps from the query itself
    last = (high - i) // band.step
    return int((last - first + 1).clamp_min(0).sum())


def _band_blocks(band: Band, s: Span, block: int) -> Tensor:
    """List the blocks in which some distance i - j is in the band: the distances in a block are a contiguous range."""
    a, a_end = _block_ends(s.n, block)
    b, b_end = _block_ends(s.m, block)
    low = a[:, None] - b_end
    high = a_end[:, None] - b
    if band.ahead is not None:
        low = low.clamp_min(-band.ahead)
    if band.back is not None:
        high = high.clamp_max(band.back)
    multiple = high.div(band.step, rounding_mode="floor") * band.step  # the largest one in reach
    found = (low <= high) & (multiple >= low)
    return found.flatten().nonzero()[:, 0]


def _block_ends(n: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the first and the last position of every block."""
    first = torch.arange(0, n, block)
    return first, (first + block).clamp_max(n) - 1
