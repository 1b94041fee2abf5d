"""Which query may look at which key: patterns as values that print, parse, compare, hash and combine.

A pattern is a set of pairs (query position i, key position j). It is a predicate on index tensors, which is its definition;
`alternatives` says the same thing as a union of intersections of atoms, which is what a plan is made from.
"""

from regard.patterns.algebra import Alternative, And, Atom, Or, Pattern, PerHead
from regard.patterns.drawn import Edges, Random
from regard.patterns.fixed import Blocks, Columns, Global, Rows, Tail
from regard.patterns.relative import Band, Causal, Dilated, Everything, Local, Stride, Truncated

PATTERNS: dict[str, type[Pattern]] = {
    p.__name__: p
    for p in (Local, Truncated, Dilated, Stride, Blocks, Global, Rows, Columns, Tail, Random, Edges, Causal, Everything, PerHead)
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
    "Or",
    "Pattern",
    "PerHead",
    "Random",
    "Rows",
    "Stride",
    "Tail",
    "Truncated",
]
