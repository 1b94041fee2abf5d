"""Attention patterns: sets of pairs (query position i, key position j), as values that print, parse, compare, hash and combine.

A pattern is defined by its predicate on index tensors. `alternatives` gives the same set as a union of intersections of atoms,
from which block-sparse plans and edge lists are built.
"""

from regard.patterns.algebra import Alternative, And, Atom, Or, Pattern, PerHead
from regard.patterns.drawn import Edges, Random
from regard.patterns.fixed import Blocks, Columns, Global, Rows, Tail
from regard.patterns.neighbourhood import Neighbourhood
from regard.patterns.relative import Band, Causal, Dilated, Everything, Local, Stride, Truncated

#: Every pattern that a text may name, by that name.
#:
#: >>> from regard.patterns import PATTERNS
#: >>> PATTERNS["Local"](8)
#: Local(8)
PATTERNS: dict[str, type[Pattern]] = {
    p.__name__: p
    for p in (
        *(Local, Truncated, Dilated, Stride, Blocks, Neighbourhood, Global, Rows, Columns, Tail, Random, Edges, Causal),
        *(Everything, PerHead),
    )
}

__all__ = [
    "PATTERNS",
    "Alternative",
    "And",
    "Atom",
    "Band",
    "Blocks",
    "Causal",
    "Columns",
    "Dilated",
    "Edges",
    "Everything",
    "Global",
    "Local",
    "Neighbourhood",
    "Or",
    "Pattern",
    "PerHead",
    "Random",
    "Rows",
    "Stride",
    "Tail",
    "Truncated",
]
