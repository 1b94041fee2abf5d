"""How many pairs and blocks a pattern has at a length, counted from its plan: never an n x n tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.patterns import Atom, Band, Blocks, Causal, Edges, Pattern, Random, Tail
from regard.patterns.algebra import Several
from regard.patterns.fixed import SpecialTokens
from regard.patterns.plan import plan
from regard.patterns.tiles import Span, TilePart

DENSITY_ELEMENTS = 1 << 24


class Census(NamedTuple):
    """Summed over heads."""

    pairs: int
    possible: int  # pairs of full attention; of causal full attention, if asked causally
    blocks: int  # blocks of queries x keys that hold at least one pair
    possible_blocks: int

    @property
    def density(self) -> float:
        return self.pairs / max(self.possible, 1)

    @property
    def block_density(self) -> float:
        return self.blocks / max(self.possible_blocks, 1)


def census(pattern: Pattern, n: int, m: int | None = None, *, causal: bool = False, heads: int = 1, block: int = 64) -> Census:
    m = n if m is None else m
    span = Span(0, n, 0, m)
    whole = Band(None, 0 if causal else None)
    counted: dict[Pattern, tuple[int, int]] = {}
    pairs = blocks = 0
    for h in range(heads):
        own = pattern.for_head(h, heads).bound(n, m)
        own = own & Causal() if causal else own
        if own not in counted:
            counted[own] = _count_pairs(own, span, block)
        pairs, blocks = pairs + counted[own][0], blocks + counted[own][1]
    return Census(pairs, heads * _band_pairs(whole, span), blocks, heads * len(_band_blocks(whole, span, block)))


def cells(pattern: Pattern, n: int, block: int) -> Tensor:
    """The share of pairs that the pattern of one head, bound to n tokens, has in each cell of block x block pairs, (c c)."""
    span, wide = Span(0, n, 0, n), -(-n // block)
    held = torch.zeros(wide * wide, dtype=torch.long)
    for part in plan(pattern, span).parts:
        if part.band is not None:
            held += _band_cells(part.band, n, block).flatten()
        else:
            for code in _tile_codes(part, span, block):
                held += torch.bincount(code, minlength=wide * wide)
    sizes = torch.full((wide,), block)
    sizes[-1] = n - block * (wide - 1)
    return held.view(wide, wide) / (sizes[:, None] * sizes)


def several_windows(pattern: Pattern | None) -> int:
    """A length at which a picture shows more than one window of a pattern: 1,024 to 32,768; of a graph, its own."""
    atoms = [] if pattern is None else [atom for leaf in _leaves(pattern) for (atom,) in leaf.alternatives()]
    if graphs := [atom.nodes for atom in atoms if isinstance(atom, Edges)]:
        return max(graphs[0], 1)
    reach = min(max((_reach(atom) for atom in atoms), default=1), 2**12)
    return max(1024, 8 << (reach - 1).bit_length())


def _leaves(pattern: Pattern) -> list[Pattern]:
    return [leaf for part in pattern.parts for leaf in _leaves(part)] if isinstance(pattern, Several) else [pattern]


def _reach(atom: Atom) -> int:
    """How far an atom goes before it repeats itself."""
    match atom:
        case Band(back, ahead, step):
            return max(back or 1, ahead or 1, step)
        case Blocks(size, around):
            return size * (around + 1)
        case Random(_, block):
            return block
        case Tail(size, _):
            return size
        case SpecialTokens():
            return max(atom.first, atom.last, *atom.at, 1)
    return 1


def _count_pairs(pattern: Pattern, span: Span, block: int) -> tuple[int, int]:
    pairs, codes = 0, []
    for part in plan(pattern, span).parts:
        if part.band is not None:
            pairs += _band_pairs(part.band, span)
            codes.append(_band_blocks(part.band, span, block))
        else:
            found, where = _tile_pairs(part, span, block)
            pairs += found
            codes.append(where)
    return pairs, len(torch.cat(codes).unique()) if codes else 0


def _tile_pairs(part: TilePart, span: Span, block: int) -> tuple[int, Tensor]:
    """How many pairs a part has, and in which blocks."""
    pairs, codes = 0, []
    for code in _tile_codes(part, span, block):
        pairs += len(code)
        codes.append(code.unique())
    return pairs, torch.cat(codes).unique() if codes else torch.zeros(0, dtype=torch.long)


def _tile_codes(part: TilePart, span: Span, block: int) -> Iterator[Tensor]:
    """The number of the block of each pair of a part, a few tiles at a time."""
    wide = -(-span.m // block)
    i, j = part.queries.positions(span.t, span.n), part.keys.positions(span.u, span.m)
    for group in part.groups:
        step = max(1, DENSITY_ELEMENTS // (part.queries.size * part.keys.size * group.cols.shape[1]))
        for rows, cols in zip(group.rows.split(step), group.cols.split(step), strict=True):
            code = (i[rows] // block * wide)[:, :, None] + (j[cols.clamp_min(0)].flatten(1) // block)[:, None]
            yield code[part.mask(rows, cols)]


def _band_cells(band: Band, n: int, block: int) -> Tensor:
    """Pairs of a band in each cell: for every query in closed form, then summed over blocks of queries."""
    start = torch.arange(0, n, block)
    end = (start + block).clamp_max(n) - 1
    counts = []
    for i in torch.arange(n).split(block):
        i = i[:, None]
        low = start.expand(len(i), -1) if band.back is None else torch.maximum(start, i - band.back)
        high = end.expand(len(i), -1) if band.ahead is None else torch.minimum(end, i + band.ahead)
        steps = (high - i).div(band.step, rounding_mode="floor") + (i - low).div(band.step, rounding_mode="floor") + 1
        counts.append(torch.where(low <= high, steps, 0).sum(0))
    return torch.stack(counts)


def _band_pairs(band: Band, s: Span) -> int:
    """In closed form per query: a band is an arithmetic progression of keys."""
    i = torch.arange(s.t, s.t + s.n)
    low = torch.full_like(i, s.u) if band.back is None else (i - band.back).clamp_min(s.u)
    high = torch.full_like(i, s.u + s.m - 1) if band.ahead is None else (i + band.ahead).clamp_max(s.u + s.m - 1)
    first, last = -((i - low) // band.step), (high - i) // band.step  # in steps from the query itself
    return int((last - first + 1).clamp_min(0).sum())


def _band_blocks(band: Band, s: Span, block: int) -> Tensor:
    """Blocks in which some distance i - j is in the band: distances inside a block are an unbroken range."""
    a, b = torch.arange(-(-s.n // block))[:, None] * block, torch.arange(-(-s.m // block)) * block
    a_end, b_end = (a + block).clamp_max(s.n) - 1, (b + block).clamp_max(s.m) - 1
    low, high = a - b_end, a_end - b
    low = low if band.ahead is None else low.clamp_min(-band.ahead)
    high = high if band.back is None else high.clamp_max(band.back)
    found = (low <= high) & (high.div(band.step, rounding_mode="floor") * band.step >= low)
    return found.flatten().nonzero()[:, 0]
