"""The masks of tiles of 64 x 64 pairs: every pair is tested in one tile of each kind, and tiles of one kind are alike.

The kind of a tile comes from a few numbers for each atom, in time that follows the tiles and not their pairs: a long sequence
has millions of tiles and, unless its pairs are scattered, a few dozen kinds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.patterns import Alternative, Atom, Band, Blocks, Columns, Neighbourhood, Random, Rows, Tail
from regard.patterns.condition import UNBOUNDED
from regard.patterns.tiles import Span, ceil_div

TILE = 64  # queries and keys of a tile
MASK_BATCH = 1 << 22  # pairs that are tested together
DRAWN_CELLS = 64  # blocks of a random pattern in a tile, above which testing its pairs takes no longer
LARGEST_CODE = 1 << 62


class TileMasks(NamedTuple):
    """The masks of all kinds of tiles, and the kind of every tile."""

    bits: Tensor  # (kinds 64) int64: bit j of [x, i] is the pair of query i and key j
    full: Tensor  # (kinds) every pair
    some: Tensor  # (kinds) any pair
    kinds: Tensor  # (T)


def tile_masks(listed: list[Alternative], taken: list[Band], rows: Tensor, cols: Tensor, span: Span) -> TileMasks:
    """Test which pairs of tiles belong to one of the listed alternatives and to no band that is taken."""
    atoms = dict.fromkeys(atom for atoms in (*listed, tuple(taken)) for atom in atoms)
    kinds = _kinds(list(atoms), rows, cols, span)
    one = torch.zeros(int(kinds.max()) + 1 if len(kinds) else 0, dtype=torch.long)
    one.scatter_(0, kinds, torch.arange(len(kinds)))  # any of its tiles
    return TileMasks(*_tested(listed, taken, rows[one], cols[one], span), kinds)


def _tested(
    listed: list[Alternative], taken: list[Band], rows: Tensor, cols: Tensor, span: Span
) -> tuple[Tensor, Tensor, Tensor]:
    """Test every pair of tiles: bits (T 64) int64, which tiles are full, and which hold any pair."""
    token = torch.arange(TILE)
    found = [(torch.zeros(0, TILE, dtype=torch.long), *[torch.zeros(0, dtype=torch.bool)] * 2)]
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
        found.append((_words_of_bits(seen), seen.flatten(1).all(1), seen.flatten(1).any(1)))
    bits, full, any_pair = (torch.cat(x) for x in zip(*found, strict=True))
    return bits, full, any_pair


def _words_of_bits(found: Tensor) -> Tensor:
    """Write 64 truth values as the bits of a number: (... 64) bool -> (...) int64."""
    powers = torch.ones(TILE, dtype=torch.long) << torch.arange(TILE)
    return torch.where(found, powers, 0).sum(-1)


def _kinds(atoms: list[Atom], rows: Tensor, cols: Tensor, span: Span) -> Tensor:
    """Number the kinds of tiles (T): those of one kind hold the same pairs, those of two kinds may do so too."""
    ends = [(length - number * TILE).clamp_max(TILE) for length, number in ((span.n, rows), (span.m, cols))]
    code, room = torch.zeros_like(rows), 1
    for column in (*ends, *(column for atom in atoms for column in _marks(atom, rows, cols, span))):
        number, width = _from_zero(column)
        if room * width > LARGEST_CODE:
            code, room = _from_zero(_ranks(code))
            number, width = _from_zero(_ranks(number))
        code, room = code * width + number, room * width
    return _ranks(code)


def _from_zero(x: Tensor) -> tuple[Tensor, int]:
    """Subtract the least number; return also a bound of the results."""
    if not len(x):
        return x, 1
    low, high = (int(end) for end in x.aminmax())
    return x - low, high - low + 1


def _ranks(x: Tensor) -> Tensor:
    return x.unique(return_inverse=True)[1]


def _marks(atom: Atom, rows: Tensor, cols: Tensor, span: Span) -> list[Tensor]:
    """Return numbers (T) of tiles: the pairs of an atom are the same in two tiles for which all of these numbers are equal."""
    i, j, last = rows * TILE + span.t, cols * TILE + span.u, TILE - 1
    gap = i - j
    match atom:
        case Band(back, ahead, step):
            back, ahead = (UNBOUNDED if bound is None else bound for bound in (back, ahead))
            inside = (gap + last <= back) & (gap - last >= -ahead)
            outside = (gap - last > back) | (gap + last < -ahead)
            return [inside.long() - outside.long(), torch.where(inside, gap % step, gap).masked_fill(outside, 0)]
        case Blocks(size, around):
            inside, outside = _apart(i, j, size, around)
            clear = inside | outside
            return [inside.long() - outside.long(), *(x.masked_fill(clear, 0) for x in (gap, i % size))]
        case Neighbourhood(columns, down, _, first):
            outside = _apart(i - first, j - first, columns, down)[1]
            before = [(x - first).clamp_max(0) for x in (i, j)]  # tokens before the grid
            return [outside.long(), *(x.masked_fill(outside, 0) for x in (gap, (i - first) % columns, *before))]
        case Random():
            return _drawn_marks(atom, i, j)
        case Rows():
            return [_word_ranks(atom(0, _all_tokens(span.t, span.n), torch.tensor(0)))[rows]]
        case Columns() | Tail():
            return [_word_ranks(atom(0, torch.tensor(0), _all_tokens(span.u, span.m)))[cols]]
    return [torch.arange(len(rows))]  # nothing is known: every tile is of its own kind


def _apart(i: Tensor, j: Tensor, size: int, around: int) -> tuple[Tensor, Tensor]:
    """Return where all pairs of a tile, and where none, are at most so many blocks of a size apart."""
    least = i // size - (j + TILE - 1) // size
    most = (i + TILE - 1) // size - j // size
    return (least >= -around) & (most <= around), (least > around) | (most < -around)


def _drawn_marks(atom: Random, i: Tensor, j: Tensor) -> list[Tensor]:
    """Return which of the blocks that tiles meet were drawn, and where tiles begin in a block if that changes their pairs."""
    if not len(i):
        return []
    begins = [x % atom.block for x in (i, j)]
    down, right = (int(x.max() + TILE - 1) // atom.block + 1 for x in begins)
    if down * right > DRAWN_CELLS:
        return [torch.arange(len(i))]
    x, y = ((torch.arange(blocks) * atom.block).clamp_max(TILE - 1) for blocks in (down, right))  # a token of every block
    table = atom.table(int(i.max() + TILE - 1) // atom.block + 1)
    step = max(1, MASK_BATCH // (down * right * atom.count))
    found = []
    for own, theirs in zip(i.split(step), j.split(step), strict=True):
        chosen = table[(own[:, None] + x) // atom.block]  # (T, down, count)
        met = (theirs[:, None] + y) // atom.block  # (T, right)
        found.append((chosen[:, :, None] == met[:, None, :, None]).any(-1))
    drawn = torch.cat(found)  # (T, down, right)
    alike = [(drawn == drawn.narrow(side, 0, 1)).flatten(1).all(1) for side in (1, 2)]
    return [*drawn.flatten(1).long().unbind(1), *(x.masked_fill(same, 0) for x, same in zip(begins, alike, strict=True))]


def _all_tokens(start: int, length: int) -> Tensor:
    """Return the positions of the tokens of all tiles in order, (tiles 64)."""
    return start + torch.arange(ceil_div(length, TILE) * TILE).view(-1, TILE)


def _word_ranks(special: Tensor) -> Tensor:
    """Number the different tiles by their special tokens: (tiles 64) bool -> (tiles)."""
    return _ranks(_words_of_bits(special))
