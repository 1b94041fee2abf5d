"""Patterns that are listed rather than ruled: random blocks, and the edges of a graph. They belong to a length."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.mixers.patterns.algebra import Atom, Pattern, by_head, need


@lru_cache(maxsize=64)
def _draw(count: int, seed: int, rows: int, blocks: int | None) -> Tensor:
    """(rows, count) distinct key blocks per query block, -1 where there are fewer; blocks None: from those not after it.

    Row r depends only on (seed, r, how many blocks it may pick from), so a longer table starts like a shorter one.
    """
    picks = np.random.Generator(np.random.PCG64(seed)).random((rows, count))
    room = np.arange(rows) + 1 if blocks is None else np.full(rows, blocks)
    chosen = np.full((rows, count), np.iinfo(np.int64).max)
    for c in range(count):
        pick = np.floor(picks[:, c] * np.maximum(room - c, 0)).astype(np.int64)
        for earlier in np.sort(chosen[:, :c], 1).T:  # the pick-th block among those not chosen yet
            pick += pick >= earlier
        chosen[:, c] = np.where(c < room, pick, np.iinfo(np.int64).max)
    return torch.from_numpy(np.where(chosen == np.iinfo(np.int64).max, -1, chosen))


@dataclass(frozen=True, repr=False)
class Random(Atom):
    """`count` key blocks for each query block, drawn once from the seed: the same for a given seed and length.

    With past=True the blocks of a query are drawn from those not after its own, whatever the length: the causal form.
    """

    count: int
    block: int
    seed: int = 0
    per_head: bool = False
    past: bool = False
    length: int | None = None  # the number of keys it is drawn for; set by `bound`

    def __post_init__(self) -> None:
        need("the count of Random", self.count, 1)
        need("the block of Random", self.block, 1)
        need("seed", self.seed, 0)
        for name in ("per_head", "past"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.length is not None:
            need("length", self.length, 0)

    @property
    def bends_with_length(self) -> bool:
        return not self.past

    def for_head(self, h: int, heads: int) -> Pattern:  # noqa: ARG002
        return replace(self, seed=self.seed * 1_000_003 + h + 1, per_head=False) if self.per_head else self

    def bound(self, n: int, m: int) -> Pattern:  # noqa: ARG002
        return self if self.past or self.length is not None else replace(self, length=m)

    def table(self, rows: int) -> Tensor:
        """(rows, count) key blocks of the first query blocks, -1 where there are fewer."""
        if self.past:
            return _draw(self.count, self.seed, rows, None)
        if self.length is None:
            raise ValueError("Random draws its blocks for a length: call .bound(n, m) first, or use past=True")
        return _draw(self.count, self.seed, rows, -(-self.length // self.block))

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        if self.per_head:
            return by_head(h, lambda x: self.for_head(x, 0), i, j)
        rows = int(i.max()) // self.block + 1 if i.numel() else 0
        chosen = self.table(max(rows, 1)).to(i.device)[i // self.block]
        return (chosen == (j // self.block).unsqueeze(-1)).any(-1)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.ones_like(j + now, dtype=torch.bool)  # a later block may draw any earlier one

    def __repr__(self) -> str:
        more = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        return f"Random({', '.join([str(self.count), str(self.block), *more])})"


class Edges(Atom):
    """The edges of a graph, as PyTorch Geometric writes them: row 0 is the key j (source), row 1 the query i (target)."""

    def __init__(self, edges: Any, nodes: int | None = None, loops: bool = False) -> None:
        pairs = torch.as_tensor(edges).detach().cpu()
        if pairs.numel() == 0:
            pairs = pairs.reshape(2, 0).long()
        if pairs.dim() != 2 or pairs.shape[0] != 2 or pairs.is_floating_point():
            raise ValueError(f"edges must be integers of shape (2, edges), sources over targets, not {tuple(pairs.shape)}")
        if nodes is None:
            nodes = int(pairs.max()) + 1 if pairs.numel() else 0
        need("nodes", nodes, 0)
        if pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < nodes:
            raise ValueError(f"edges name nodes {int(pairs.min())} to {int(pairs.max())}, but there are only {nodes}, from 0")
        self.nodes, self.loops = nodes, bool(loops)
        own = torch.arange(nodes if loops else 0) * (nodes + 1)
        self.codes = torch.cat([pairs[1].long() * nodes + pairs[0].long(), own]).unique()  # i * nodes + j, in order

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        if not len(self.codes):
            return torch.zeros_like(i + j, dtype=torch.bool)
        codes, code = self.codes.to(i.device), i * self.nodes + j
        found = torch.searchsorted(codes, code.contiguous()).clamp_max(len(codes) - 1)
        return (codes[found] == code) & (i >= 0) & (i < self.nodes) & (j >= 0) & (j < self.nodes)

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        last = torch.full((max(self.nodes, 1),), -1)  # the last query that sees each key
        if len(self.codes):
            last.scatter_reduce_(0, self.codes % self.nodes, self.codes // self.nodes, "amax")
        return last.to(j.device)[j.clamp(0, max(self.nodes - 1, 0))] >= now

    def bound(self, n: int, m: int) -> Pattern:
        if n != self.nodes or m != self.nodes:
            raise ValueError(
                f"these edges are of a graph with {self.nodes} nodes: they say nothing about {n} queries and {m} keys"
            )
        return self

    @property
    def bends_with_length(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edges) and self.nodes == other.nodes and torch.equal(self.codes, other.codes)

    def __hash__(self) -> int:
        return hash((self.nodes, self.codes.numpy().tobytes()))

    def __repr__(self) -> str:
        pairs = [(self.codes % max(self.nodes, 1)).tolist(), (self.codes // max(self.nodes, 1)).tolist()]
        return f"Edges({pairs}, nodes={self.nodes})"
