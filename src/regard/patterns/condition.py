"""Which pairs inside the tiles of a part belong to it, as a value: a mask for PyTorch, integers for a kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.patterns import Alternative, Atom, Band, Blocks, Columns, Edges, Neighbourhood, Random, Rows, Tail

BAND, BLOCKS, ROWS, COLUMNS, TAIL, RANDOM, EDGES, NEAR_CELLS = range(8)  # kinds of the terms of a condition
UNBOUNDED = 2**62  # where a band has no end, and where no last tokens are special


class ConditionCodes(NamedTuple):
    """A condition in integers: all terms of clause 0 hold for a pair, and of every other clause at least one does not.

    Columns of `terms`: clause, kind, three numbers, index of a table or -1. What holds for a pair (i, j), by kind:

        BAND     a, b, c     -b <= i - j <= a and (i - j) % c == 0
        BLOCKS   a, b        |i // a - j // a| <= b
        ROWS     a, b        i < a, i >= b, or i in the table; COLUMNS the same of j
        TAIL     a, b        j % a >= a - b
        RANDOM   a           j // a in row i // a of the table
        EDGES    a           i * a + j in the table
        NEAR_CELLS a, b, c   at most b rows and c columns apart on a grid of a columns, behind as many tokens as the table says
    """

    terms: Tensor  # (terms, 6)
    tables: tuple[Tensor, ...]  # sorted positions, drawn key blocks (rows, count), sorted edges


class Condition(NamedTuple):
    """Pairs for which every atom of `inside` holds, and of every alternative of `outside` at least one atom does not."""

    inside: Alternative = ()
    outside: tuple[Alternative, ...] = ()

    def mask(self, i: Tensor, j: Tensor) -> Tensor:
        """Evaluate the condition for positions i and j, which broadcast."""
        found = _all_hold(self.inside, i, j)
        for atoms in self.outside:
            found = found & ~_all_hold(atoms, i, j)
        return found

    @property
    def relative(self) -> bool:
        """Return whether the condition depends on i - j alone."""
        return all(isinstance(atom, Band) for atoms in (self.inside, *self.outside) for atom in atoms)

    def codes(self, end: int) -> ConditionCodes:
        """Encode the condition for positions below `end`."""
        terms: list[list[int]] = []
        tables: list[Tensor] = []
        for clause, atoms in enumerate((self.inside, *self.outside)):
            for atom in atoms:
                kind, numbers, table = _atom_code(atom, end)
                padded = [*numbers, 0, 0, 0][:3]
                terms.append([clause, kind, *padded, -1 if table is None else len(tables)])
                tables += [] if table is None else [table]
        return ConditionCodes(torch.tensor(terms, dtype=torch.long).view(-1, 6), tuple(tables))


def _all_hold(atoms: Alternative, i: Tensor, j: Tensor) -> Tensor:
    found = torch.ones_like(i + j, dtype=torch.bool)
    for atom in atoms:
        found = found & atom(0, i, j)
    return found


def _atom_code(atom: Atom, end: int) -> tuple[int, tuple[int, ...], Tensor | None]:
    """Return the kind of an atom, its numbers and its table."""
    match atom:
        case Band(back, ahead, step):
            return BAND, (UNBOUNDED if back is None else back, UNBOUNDED if ahead is None else ahead, step), None
        case Blocks(size, around):
            return BLOCKS, (size, around), None
        case Rows() | Columns():
            kind = ROWS if isinstance(atom, Rows) else COLUMNS
            return kind, (atom.first, atom.tail if atom.last else UNBOUNDED), torch.tensor(atom.at, dtype=torch.long)
        case Tail(size, count):
            return TAIL, (size, count), None
        case Random(_, block):
            return RANDOM, (block,), atom.table(max(-(-end // block), 1))
        case Neighbourhood():
            return NEAR_CELLS, (atom.columns, *atom.sides), torch.tensor([atom.first])
        case Edges():
            return EDGES, (atom.nodes,), atom.codes
    raise NotImplementedError(f"no integer code for {type(atom).__name__}")
