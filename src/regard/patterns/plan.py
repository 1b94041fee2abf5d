"""From a pattern to the tiles that compute it, without a tensor of all n x m pairs.

A pattern is a union of intersections of atoms. Each intersection becomes a part: its cheapest atom (the driver) enumerates which
blocks of queries meet which blocks of keys, and the other atoms are a condition inside those tiles. Parts are disjoint: a later,
smaller part leaves out the pairs of the larger ones before it, so that results merge by log-sum-exp and no pair counts twice.
A stride becomes a block by reordering: residue classes are laid out one after another. A plan is data and stays on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.cache import bounded_cache
from regard.patterns import Alternative, Atom, Band, Blocks, Columns, Edges, Pattern, Random, Rows, Tail
from regard.patterns.condition import Condition
from regard.patterns.lowering import estimated_pairs, lower_atom
from regard.patterns.tiles import Span, TilePart


@dataclass(eq=False)
class Plan:
    """The tiles of the pattern of one head, for queries and keys at the positions of a span."""

    parts: list[TilePart]
    span: Span

    @property
    def size(self) -> int:
        """Count the numbers it holds."""
        return sum(part.size for part in self.parts)


@bounded_cache(lambda made: made.size)
def plan(pattern: Pattern, span: Span) -> Plan:
    """Plan the pattern of one head, bound to its length."""
    if span.n == 0 or span.m == 0:
        return Plan([], span)
    parts: list[TilePart] = []
    earlier: list[Alternative] = []
    for atoms in _ordered(pattern, span):
        driver = min(atoms, key=lambda a: estimated_pairs(a, span))
        condition = _condition(driver, atoms, earlier)
        for tiling in lower_atom(driver, atoms, span):
            parts.append(TilePart(*tiling, span, driver, condition))
        earlier.append(atoms)
    return Plan(parts, span)


def _condition(driver: Atom, atoms: Alternative, earlier: list[Alternative]) -> Condition:
    """Return what is left to test inside of the tiles that the driver enumerates."""
    exact = isinstance(driver, Blocks | Random | Edges | Rows | Columns | Tail)  # their tiles hold exactly their pairs
    rest = tuple(a for a in atoms if a is not driver)
    return Condition(rest if exact else (driver, *rest), tuple(earlier))


def _ordered(pattern: Pattern, span: Span) -> list[Alternative]:
    """Merge the bands of each alternative, drop alternatives inside others, sort the largest first."""
    merged: list[Alternative] = []
    end = max(span.t + span.n, span.u + span.m)
    for alternative in pattern.alternatives():
        atoms = tuple(atom.within(end) for atom in alternative)
        bands = [a for a in atoms if isinstance(a, Band)]
        others = (a for a in atoms if not isinstance(a, Band))
        rest = tuple(dict.fromkeys(others))  # each once
        everything = Band(None, None)
        band = bands[0] if bands else everything
        for other in bands[1:]:
            band = band.both(other)
        if band == everything and rest:
            merged.append(rest)
        elif not _holds_nothing(band):
            merged.append((*rest, band))
    merged.sort(key=lambda atoms: -min(estimated_pairs(a, span) for a in atoms))
    kept: list[Alternative] = []
    for atoms in merged:
        if not any(_inside(atoms, other) for other in kept):
            kept.append(atoms)
    return kept


def _holds_nothing(band: Band) -> bool:
    """Return whether a bound of the band, which may be None, is below zero."""
    bounds = (band.back, band.ahead)
    return any(bound is not None and bound < 0 for bound in bounds)


def _inside(atoms: Alternative, other: Alternative) -> bool:
    """Return whether every atom of `other` is implied by `atoms`: then `atoms` adds no pair."""

    def implied(condition: Atom) -> bool:
        if condition in atoms:
            return True
        if not isinstance(condition, Band):
            return False
        return any(isinstance(a, Band) and condition.covers(a) for a in atoms)

    return all(implied(condition) for condition in other)
