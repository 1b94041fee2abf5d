"""Rows of the catalogue: a mechanism's class, family, paper and examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regard.mixers.base import Can, Core, Dims, Mixer


@dataclass(frozen=True)
class Example:
    """Hold options of a mechanism for lengths from 40 to 2048, and how its cost grows with them.

    `options` are those of the mechanism. FLOPs of a pass over n tokens grow as n ** `cost`, and the state after t tokens as t **
    `memory` (None: it does not stream). `weights`: the output is a matrix, which does not depend on values, times the values.

    >>> from regard import CATALOGUE, Example
    >>> Example({"features": 32}, cost=1, memory=0) in CATALOGUE["performer"].examples
    True
    """

    options: dict[str, Any] = field(default_factory=dict)
    cost: float = 2  # FLOPs of a pass over n tokens grow as n ** cost
    memory: int | None = 1  # the state after t tokens grows as t ** memory; None: it does not stream
    weights: bool = True  # out = A v with an A that does not depend on v: the identity for v shows A


@dataclass(frozen=True)
class Row:
    """Describe one mechanism; the tests check these claims.

    `name` is that of texts, `make` the class, built as make(dims, *, options); `family`, `summary` and `paper` are for tables,
    `examples` for tests, the first one for tables too. `compiles`: torch.compile makes one graph of it. `chooses`: it compares,
    as buckets do, so that half precision may turn a near tie over.

    >>> from regard import CATALOGUE
    >>> row = CATALOGUE["linear"]
    >>> row.family, row.examples[0].cost, str(row.can)
    ('kernel', 1, 'causal, cross, padding, stream')
    """

    name: str
    make: type[Core] | type[Mixer]  # (dims, *, options)
    family: str
    summary: str
    paper: str
    examples: tuple[Example, ...]  # the first is shown in tables and figures
    compiles: bool = True  # by torch.compile, without a graph break
    chooses: bool = False  # by comparing (hashes, clusters): in low precision rounding may turn a near tie over

    @property
    def weights(self) -> bool:
        return self.examples[0].weights

    @property
    def can(self) -> Can:
        """Return the capabilities with the options of the first example, in the bidirectional and the causal form."""
        can = self._claims(causal=False)
        return can | self._claims(causal=True) if Can.CAUSAL in can else can

    def _claims(self, causal: bool) -> Can:
        return self.make(Dims(width=32, heads=4, causal=causal, max_len=64), **self.examples[0].options).can
