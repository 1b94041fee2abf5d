"""Patterns given by lists: random blocks, and the edges of a graph. They are for one length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from regard.cache import outlives_tracing, register_cache
from regard.checks import need
from regard.patterns.algebra import Atom, Pattern, by_head, largest, unwrapped

MAX_DRAWN = 1024  # key blocks per query block: drawing takes quadratic time in their number
MAX_LISTED = 2**18  # nodes of a graph that is given as lists; larger ones as a tensor


@lru_cache(maxsize=64)
@outlives_tracing
def _draw_blocks(count: int, seed: int, rows: int, blocks: int | None) -> Tensor:
    """Draw (rows, count) distinct key blocks per query block, -1 where there are fewer; blocks None: from those not after it.

    Row r depends only on (seed, r, the number of candidate blocks), so a longer table starts with a shorter one.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    picks = rng.random((rows, count))
    none = np.iinfo(np.int64).max
    room = np.arange(rows) + 1 if blocks is None else np.full(rows, blocks)
    chosen = np.full((rows, count), none)
    for c in range(count):
        left = np.maximum(room - c, 0)
        pick = np.floor(picks[:, c] * left).astype(np.int64)
        for earlier in np.sort(chosen[:, :c], 1).T:  # skip blocks that are already chosen
            pick += pick >= earlier
        chosen[:, c] = np.where(c < room, pick, none)
    return torch.from_numpy(np.where(chosen == none, -1, chosen))


register_cache(_draw_blocks.cache_clear)


@dataclass(frozen=True, repr=False)
class Random(Atom):
    """Draw `count` key blocks for each query block: a function of the seed and the length.

    With past=True the blocks of a query are drawn from those not after its own, whatever the length: the causal form.

    `block` is the number of tokens in a block, `seed` that of the draw. With per_head=True every head draws its own. `length` is
    set by `bound` and not by a caller.

    >>> import torch
    >>> from regard import Random
    >>> i = torch.arange(12)
    >>> drawn = Random(1, 3, seed=0).bound(12, 12)
    >>> drawn(0, i[:, None], i).sum(1)  # every query sees one block of three keys
    tensor([3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])
    """

    count: int
    block: int
    seed: int = 0
    per_head: bool = False
    past: bool = False
    length: int | None = None  # number of keys; set by `bound`
    _memo = None

    def __post_init__(self) -> None:
        need("the count of Random", self.count, 1, MAX_DRAWN)
        need("the block of Random", self.block, 1)
        need("seed", self.seed, 0, 2**42)
        for name in ("per_head", "past"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.length is not None:
            need("length", self.length, 0)

    @property
    def length_grain(self) -> int:
        return 0 if self.past else self.block  # the draw is that of a number of blocks

    def for_head(self, h: int, heads: int) -> Pattern:  # noqa: ARG002
        if self.per_head:
            seed = self.seed * 1_000_003 + h + 1
            return replace(self, seed=seed, per_head=False)
        return self

    def bound(self, n: int, m: int) -> Pattern:  # noqa: ARG002
        if self.past or self.length is not None:
            return self
        return replace(self, length=m)

    def table(self, rows: int) -> Tensor:
        """Return (rows, count) key blocks of the first query blocks, -1 where there are fewer."""
        if self.past:
            return _draw_blocks(self.count, self.seed, rows, None)
        if self.length is None:
            raise ValueError("Random draws its blocks for a length: call .bound(n, m) first, or use past=True")
        blocks = -(-self.length // self.block)
        return _draw_blocks(self.count, self.seed, rows, blocks)

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:
        if self.per_head and isinstance(h, int):
            return self.for_head(h, 0)(h, i, j)
        if self.per_head:
            each = self._memoised(h, lambda: tuple(self.for_head(x, 0) for x in range(largest(h) + 1)))
            return by_head(h, each, i, j)
        table = self._memoised(i, lambda: self._table_for(i))
        chosen = table[i // self.block]
        own = j // self.block
        return (chosen == own.unsqueeze(-1)).any(-1)

    def _table_for(self, i: Tensor) -> Tensor:
        """Return the table of all rows that these queries need, on their device."""
        rows = max(largest(i) // self.block + 1, 1)
        device = unwrapped(i).device
        return self.table(rows).to(device)

    def _memoised(self, index: Tensor, make: Callable[[], Any]) -> Any:
        """Return make(), stored where indices are vmapped: FlexAttention calls a mask with values once, then traces it."""
        if torch.compiler.is_compiling() and self._memo is not None:
            return self._memo
        made = make()
        if unwrapped(index) is not index:
            object.__setattr__(self, "_memo", made)
        return made

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        return torch.ones_like(j + now, dtype=torch.bool)  # a later block may draw any earlier one

    def within(self, end: int) -> Random:
        return self if self.block <= end else replace(self, block=max(end, 1))  # all positions are in the first block

    def __repr__(self) -> str:
        given = [f.name for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        options = [f"{name}={getattr(self, name)}" for name in given]
        listed = ", ".join([f"{self.count}", f"{self.block}", *options])
        return f"Random({listed})"


MAX_WRITTEN = 4096  # edges that are written out in a text; larger graphs have a name, valid in this process


class _Graph:
    """Hold the edges shared by equal large graphs: their name is valid as long as one of them is alive."""

    def __init__(self, nodes: int, codes: Tensor) -> None:
        self.nodes, self.codes = nodes, codes


_named: WeakValueDictionary[str, _Graph] = WeakValueDictionary()


class Edges(Atom):
    """Attend along the edges of a graph, in PyTorch Geometric's form: (2, edges), row 0 the key j (source), row 1 the query i.

    With an edge j -> i node i attends to node j. A tensor, an array or two lists; duplicate edges count once.
    both=True adds the reverse of every edge, loops=True an edge from every node to itself.
    The text of a small graph holds its edges. That of a large one is a name, which can be parsed as long as the graph is alive.

    `edges` has the indices, `nodes` their number where the last ones have no edge.

    >>> import torch
    >>> from regard import Edges
    >>> i = torch.arange(3)
    >>> Edges([[0, 1], [1, 2]], loops=True)(0, i[:, None], i).int()  # 0 -> 1 -> 2
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """

    nodes: int
    codes: Tensor  # i * nodes + j, in order, each once
    _shared: _Graph | None = None

    def __init__(self, edges: Any, nodes: int | None = None, loops: bool = False, both: bool = False) -> None:
        if isinstance(edges, str):
            shared = _named.get(edges)
            if shared is None:
                raise ValueError(
                    f"the graph {edges!r} is too large to be written out, and not here: make it from its edges first"
                )
            self.nodes, self.codes, self._shared = shared.nodes, shared.codes, shared
            return
        pairs = _edge_tensor(edges)
        if nodes is None:
            nodes = int(pairs.max()) + 1 if pairs.numel() else 0
        many = need("the number of nodes", nodes, 0) > MAX_LISTED
        if many and loops and not isinstance(edges, Tensor | np.ndarray):
            raise ValueError(f"a graph given in lists may have {MAX_LISTED:,} nodes with loops, not {nodes:,}: give a tensor")
        low, high = (int(pairs.min()), int(pairs.max())) if pairs.numel() else (0, -1)
        if low < 0 or high >= nodes:
            raise ValueError(f"edges name nodes {low} to {high}, but there are only {nodes}, from 0")
        for name, value in (("loops", loops), ("both", both)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, not {value!r}")
        j, i = torch.cat([pairs, pairs.flip(0)], 1) if both else pairs
        own = torch.arange(nodes if loops else 0) * (nodes + 1)
        self.nodes = nodes
        self.codes = torch.cat([i * nodes + j, own]).unique()

    @staticmethod
    def coded(codes: Tensor, nodes: int) -> Edges:
        """Build edges from sorted unique codes i * nodes + j."""
        made = Edges.__new__(Edges)
        made.nodes, made.codes = nodes, codes
        return made

    @property
    def index(self) -> Tensor:
        """Return unique edges (2, edges), sources over targets, sorted by target and then by source."""
        i = self.codes // max(self.nodes, 1)
        j = self.codes - i * self.nodes
        return torch.stack([j, i])

    def __call__(self, h: Any, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        if not len(self.codes):
            return torch.zeros_like(i + j, dtype=torch.bool)
        codes = self.codes.to(i.device)
        code = i * self.nodes + j
        found = torch.searchsorted(codes, code.contiguous())
        found = found.clamp_max(len(codes) - 1)
        within = (i >= 0) & (i < self.nodes)
        within = within & (j >= 0) & (j < self.nodes)
        return (codes[found] == code) & within

    def alive(self, j: Tensor, now: Tensor) -> Tensor:
        size = max(self.nodes, 1)
        last = torch.full((size,), -1)  # the last query of each key
        if len(self.codes):
            keys = self.codes % self.nodes
            queries = self.codes // self.nodes
            last.scatter_reduce_(0, keys, queries, "amax")
        key = j.clamp(0, size - 1)
        return last.to(j.device)[key] >= now

    def bound(self, n: int, m: int) -> Pattern:
        if n != self.nodes or m != self.nodes:
            raise ValueError(
                f"these edges are of a graph with {self.nodes} nodes: they cannot be used with {n} queries and {m} keys. Padding "
                "takes nodes out of a graph: for graphs of several sizes use disjoint and on_graph"
            )
        return self

    @property
    def length_grain(self) -> int:
        return 1

    @cached_property
    def name(self) -> str:
        """Return a hash of the edges, the same for equal graphs in every process."""
        content = self.codes.numpy().tobytes()
        salt = str(self.nodes).encode()
        return blake2b(content, digest_size=16, salt=salt).hexdigest()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Edges) and self.nodes == other.nodes and torch.equal(self.codes, other.codes)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        if len(self.codes) > MAX_WRITTEN:
            graph = _Graph(self.nodes, self.codes)
            self._shared = _named.setdefault(self.name, graph)
            return f"Edges({self.name!r})"
        return f"Edges({self.index.tolist()}, nodes={self.nodes})"


def _edge_tensor(edges: Any) -> Tensor:
    """Convert edges of any accepted type to a tensor (2, edges)."""
    try:
        if isinstance(edges, np.ndarray):
            edges = np.array(edges)
        pairs = torch.as_tensor(edges).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"edges must be integers of shape (2, edges), sources over targets: {error}") from None
    if pairs.numel() == 0:
        return pairs.reshape(2, 0).long()
    if pairs.dim() != 2 or pairs.shape[0] != 2:
        hint = ": write edges.T" if pairs.dim() == 2 and pairs.shape[1] == 2 else ""
        raise ValueError(f"edges must have shape (2, edges), sources over targets, not {tuple(pairs.shape)}{hint}")
    if pairs.is_floating_point() or pairs.is_complex() or pairs.dtype == torch.bool:
        raise ValueError(f"edges must be integers of shape (2, edges), sources over targets, not {pairs.dtype}")
    return pairs.long()
