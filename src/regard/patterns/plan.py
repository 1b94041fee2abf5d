"""From a pattern to the tiles that compute it, without ever looking at all n x m pairs.

A pattern is a union of intersections of atoms. Each intersection becomes a Part: its cheapest atom (the driver) says which
blocks of queries meet which blocks of keys, and the rest is a mask inside those tiles. Parts are disjoint: a later, smaller part
leaves out the pairs of the larger ones before it, so their results merge by log-sum-exp without counting a pair twice.
A stride becomes a block by reordering: residue classes are laid out one after another. Everything here is on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from regard.cache import bounded_cache
from regard.patterns import Alternative, Atom, Band, Blocks, Columns, Edges, Pattern, Random, Rows, Tail
from regard.patterns.lowering import estimated_pairs, lower_atom
from regard.patterns.tiles import Span, TilePart


@dataclass(eq=False)
class Plan:
    """Everything that attention over one pattern computes."""

    parts: list[TilePart]

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return sum(part.size for part in self.parts)


@bounded_cache(lambda made: made.size)
def plan(pattern: Pattern, span: Span) -> Plan:
    """The tiles of the pattern of one head, bound to its length."""
    if span.n == 0 or span.m == 0:
        return Plan([])
    parts: list[TilePart] = []
    earlier: list[Alternative] = []
    for atoms in _ordered(pattern, span):
        driver = min(atoms, key=lambda a: estimated_pairs(a, span))
        rest = tuple(a for a in atoms if a is not driver)
        for part in lower_atom(driver, atoms, span):
            part.seen = _seen(driver, rest, earlier)
            part.relative = isinstance(driver, Band) and all(isinstance(a, Band) for a in chain(rest, *earlier))
            part.band = driver if isinstance(driver, Band) and not rest and not earlier else None
            parts.append(part)
        earlier.append(atoms)
    return Plan(parts)


def _ordered(pattern: Pattern, span: Span) -> list[Alternative]:
    """Alternatives with their bands merged, the ones inside others dropped, the largest first."""
    merged: list[Alternative] = []
    end = max(span.t + span.n, span.u + span.m)
    for alternative in pattern.alternatives():
        atoms = tuple(atom.within(end) for atom in alternative)
        bands = [a for a in atoms if isinstance(a, Band)]
        rest = tuple(dict.fromkeys(a for a in atoms if not isinstance(a, Band)))
        band = bands[0] if bands else Band(None, None)
        for other in bands[1:]:
            band = band.both(other)
        if band == Band(None, None) and rest:
            merged.append(rest)
        elif (band.back is None or band.back >= 0) and (band.ahead is None or band.ahead >= 0):
            merged.append((*rest, band))
    merged.sort(key=lambda atoms: -min(estimated_pairs(a, span) for a in atoms))
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
