"""Attention on a graph: tokens are its nodes, and queries attend along its edges."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import reduce
from operator import or_
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from regard.mixers.attention import Attention
from regard.mixers.base import Core, Dims, Places
from regard.mixers.kv_cache import KVCache
from regard.mixers.pattern_attention import expand_heads
from regard.mixers.softmax import SOFTMAX_CLAIMS
from regard.mixers.sparse import Sparse
from regard.ops.backend import warn_refused
from regard.ops.budget import budget
from regard.ops.composite import edge_attention_composite
from regard.ops.edge import edge_attention, edge_attention_by_text
from regard.ops.graph_tiles import SINGLE_EDGES, GraphPairs, graph_tensors_refused, graph_tile_attention, graph_tiles_refuse
from regard.ops.ragged import ragged_edge_attention
from regard.ops.strip import in_strips
from regard.ops.tile.tile_op import accumulator
from regard.ops.triton_support import compiled_on_card, on_card
from regard.patterns import Band, Blocks, Columns, Edges, Pattern, Rows
from regard.patterns.edge_list import edge_list, pairs_by_row
from regard.patterns.tiles import Span
from regard.transforms import exporting, needs_lengths, needs_plain_ops

Module = TypeVar("Module", bound=nn.Module)


class HeadGroup(NamedTuple):
    """Heads with the same pairs."""

    pattern: Pattern
    text: str
    heads: list[int]


class GAT(Sparse):
    """Graph attention: a query scores its neighbours by what it is plus what they are.

    s_ij = LeakyReLU(a_q . q_i + a_k . k_j), A = softmax over the pairs (i, j) of the pattern, out = A v, a_q and a_k by head.
    v2: s_ij = a . LeakyReLU(q_i + k_j), so that another query may rank the same neighbours in another order.
    A node without neighbours gets 0. The paper's W h are the layer's projections; there queries, keys and values share one map,
    here each has its own (shared_qk=True: queries and keys share one), and the layer's output map follows. `GraphAttention` is
    the paper's layer exactly, with other widths going in and out.
    Cost: d + e for every edge (v2) or e for every edge and d for every node, in time; one number for every edge in memory.
    Velickovic et al. 2018, arXiv:1710.10903; v2: Brody et al. 2021, arXiv:2105.14491.
    """

    can = SOFTMAX_CLAIMS
    operations = ()  # edge attention has one implementation

    def __init__(self, dims: Dims, *, pattern: Pattern | str, slope: float = 0.2, v2: bool = False) -> None:
        number = isinstance(slope, int | float) and not isinstance(slope, bool)
        if not number or not 0 <= slope <= 1:
            raise ValueError(f"slope must be a number from 0 to 1, that of LeakyReLU below zero, not {slope!r}")
        if not isinstance(v2, bool):
            raise ValueError(f"v2 must be True or False, not {v2!r}")
        super().__init__(dims, pattern=pattern)
        self.slope = float(slope)
        count = 1 if v2 else 2
        maps = [nn.Parameter(torch.randn(dims.heads, dims.d) * dims.d**-0.5) for _ in range(count)]
        self.a, self.a_q, self.a_k = (maps[0], None, None) if v2 else (None, *maps)

    def place(self, pattern: Pattern | str) -> None:
        super().place(pattern)
        heads: dict[Pattern, list[int]] = {}
        for h, own in enumerate(self.reach.each):
            heads.setdefault(own, []).append(h)
        self.shares = [HeadGroup(own, str(own), several) for own, several in heads.items()]
        atoms = [atom for own in heads for alternative in own.alternatives() for atom in alternative]
        self.has_edges = any(isinstance(atom, Edges) for atom in atoms)  # single pairs have a path of their own
        self.in_tiles = all(_fills_tiles(atom) for atom in atoms)

    def sides(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What meets in LeakyReLU: of a query (b h n f), of a key (b h m f), and what weighs it (h f) after."""
        if self.a_q is None or self.a_k is None:
            assert self.a is not None
            return q, k, self.a.to(q.dtype)
        ones = torch.ones(q.shape[1], 1, dtype=q.dtype, device=q.device)
        of_query = q @ self.a_q.to(q.dtype).unsqueeze(-1)
        of_key = k @ self.a_k.to(q.dtype).unsqueeze(-1)
        return of_query, of_key, ones

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        if q.numel() == 0 or log.size == 0:
            return q.new_zeros(*q.shape[:3], log.v.shape[-1])
        if (out := self._by_tiles(log, q, places, causal)) is not None:
            return out
        acc, dtype = accumulator(q.dtype), log.v.dtype
        k, v = expand_heads(log.keys.to(acc), log.values.to(acc), q.shape[1])
        asked = (*self.sides(q.to(acc), k), v)
        if len(self.shares) == 1:
            return self._share(self.shares[0], asked, log, places, causal).to(dtype)
        found = []
        for share in self.shares:
            q, k, a, v = asked
            some = q[:, share.heads], k[:, share.heads], a[share.heads], v[:, share.heads]
            found.append(self._share(share, some, log, places, causal))
        order = [h for share in self.shares for h in share.heads]
        back = [order.index(h) for h in range(len(order))]
        return torch.cat(found, 1)[:, back].to(dtype)

    def _by_tiles(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor | None:
        """Compute v1 over the tiles of a pattern by kernels, on CUDA devices; None where those do not take the call."""
        k, v, n = log.keys, log.values, q.shape[2]
        if compiled_on_card(q):
            return self._by_compiled_tiles(log, q, places, causal)
        if not on_card(q) or n <= budget(q.device).few_queries:
            return None
        why = self._not_in_tiles(log, places)
        if why is None:
            span = Span(places.start, n, log.start, log.size)  # type: ignore[arg-type]
            pairs = GraphPairs(self.shares[0].pattern, self.shares[0].text, span, causal)
            why = graph_tiles_refuse(q, k, v, pairs)
            if why is None:
                return graph_tile_attention(q, k, v, self.a_q, self.a_k, pairs, slope=self.slope, dropout=self.drop)  # type: ignore[arg-type]
        if not self.has_edges and why != SINGLE_EDGES:
            warn_refused("graph", "triton", q, why)
        return None

    def _by_compiled_tiles(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor | None:
        """Compute the same as a node of a graph, of whole sequences with patterns that have tiles at every length."""
        k, v = log.keys, log.values
        whole = places.start == 0 and log.start == 0 and self.in_tiles
        if not whole or self._not_in_tiles(log, places) is not None or graph_tensors_refused(q, k, v) is not None:
            return None
        from regard.ops.graph_tiles_compiled import compiled_graph_tiles

        pairs = GraphPairs(self.shares[0].pattern, self.shares[0].text, Span(0, q.shape[2], 0, log.size), causal)
        return compiled_graph_tiles(q, k, v, self.a_q, self.a_k, pairs, slope=self.slope, dropout=self.drop)  # type: ignore[arg-type]

    def _not_in_tiles(self, log: KVCache, places: Places) -> str | None:
        """Return what tiles have no kernels for, or None."""
        if self.a_q is None or self.a_k is None:
            return "scores of v2 are computed pair by pair"
        if len(self.shares) > 1:
            return "heads have patterns of their own"
        if self.reach.bends:
            return f"{self.shares[0].text} is drawn for one length"
        known = places.start is not None and log.start is not None and log.plain and places.valid is None
        return None if known else "there is padding, or no known beginning"

    def _share(self, share: HeadGroup, asked: tuple[Tensor, ...], log: KVCache, places: Places, causal: bool) -> Tensor:
        """The answers (b h n e) of heads with one pattern."""
        q, k, a, v = asked
        b, h, n, _ = q.shape
        drop = self.drop
        if self.reach.bends and (log.start != 0 or places.start != 0):
            raise ValueError(f"{share.text} is drawn for one length: it cannot continue from a memory")
        known = places.start is not None and log.start is not None
        known = known and (places.start == 0 or n > budget(q.device).few_queries)
        if known and log.plain and places.valid is None:  # the pairs of one row serve all
            assert places.start is not None and log.start is not None
            span = Span(places.start, n, log.start, log.size)
            a = a.repeat(b, 1)
            by_token = [x.permute(2, 0, 1, 3).flatten(1, 2) for x in (q, k, v)]
            q, k, v = (x.contiguous() for x in by_token)
            if torch.compiler.is_compiling() and not exporting():
                out = edge_attention_by_text(q, k, v, a, share.text, span, causal=causal, slope=self.slope, dropout=drop)
            else:
                out = edge_attention(q, k, v, a, edge_list(share.pattern, span, causal, q.device), slope=self.slope, dropout=drop)
            return out.unflatten(1, (b, h)).permute(1, 2, 0, 3)
        fresh = places.start == 0 and log.start == 0
        if needs_plain_ops() and fresh and not self.reach.bends:
            return _masked(share.pattern, asked, log, places, causal, self.slope, drop)
        needs_lengths(share.text, places.valid if needs_plain_ops() else None)
        by_row = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # all rows as one graph
        q, k, v = (x.contiguous() for x in by_row)
        if fresh:
            asking = torch.ones_like(places.at, dtype=torch.bool) if places.valid is None else places.valid
            real = asking, log.valid[:, : log.size]
            if torch.compiler.is_compiling():
                out = ragged_edge_attention(q, k, v, a, *real, share.text, causal=causal, slope=self.slope, dropout=drop)
            else:
                out = edge_attention(q, k, v, a, pairs_by_row(share.pattern, *real, causal), slope=self.slope, dropout=drop)
        else:
            out = edge_attention(q, k, v, a, _one_by_one(share.pattern, log, places, causal), slope=self.slope, dropout=drop)
        return out.unflatten(0, (b, n)).transpose(1, 2)


def _fills_tiles(atom: Pattern) -> bool:
    """Return whether the pairs of an atom lie side by side, so that tiles of them are never too many."""
    return isinstance(atom, Columns | Rows | Blocks) or (isinstance(atom, Band) and atom.step == 1)


def _masked(
    pattern: Pattern, asked: tuple[Tensor, ...], log: KVCache, places: Places, causal: bool, slope: float, drop: float
) -> Tensor:
    """The same without reading which tokens are real: those come to the front, and a mask selects the pairs there are."""
    q, k, a, v = asked
    b, h, n, _ = q.shape
    real = torch.ones_like(places.at, dtype=torch.bool) if places.valid is None else places.valid, log.valid[:, : log.size]
    there = [(~x).long().argsort(dim=1, stable=True) for x in real]
    pairs_of = ((q, there[0]), (k, there[1]), (v, there[1]))
    sorted_by_row = [x.gather(2, order[:, None, :, None].expand_as(x)) for x, order in pairs_of]
    q, k, v = (x.permute(2, 0, 1, 3).flatten(1, 2) for x in sorted_by_row)
    pairs = edge_list(pattern, Span(0, n, 0, log.size), causal, q.device)
    counts = [x.sum(1) for x in real]
    seen = (pairs[0][:, None] < counts[0]) & (pairs[1][:, None] < counts[1])  # (pairs b)
    dropped = (lambda x: dropout(x, drop)) if drop else None
    visible = seen.repeat_interleave(h, 1)
    out = edge_attention_composite(q, k, v, a.repeat(b, 1), pairs, slope, dropped, visible)
    back = there[0].argsort(dim=1)[:, None, :, None]
    out = out.unflatten(1, (b, h)).permute(1, 2, 0, 3)
    return out.gather(2, back.expand_as(out))


def _one_by_one(pattern: Pattern, log: KVCache, places: Places, causal: bool) -> Tensor:
    """List the pairs of tokens anywhere behind a memory, which is short where the pattern lets it forget."""
    (b, n), m = places.shape, log.size
    j, found = log.at[:, None, :m], []
    room = budget(places.device).pair_strip
    step = max(1, room // max(1, b * m))
    for low in range(0, n, step):
        i = places.at[:, low : low + step, None]
        seen = pattern(0, i, j) & log.valid[:, None, :m]
        if causal:
            seen = seen & (i >= j)
        row, x, y = seen.nonzero(as_tuple=True)
        query = row * n + x + low
        found.append(torch.stack([query, row * m + y]))
    return torch.cat(found, 1)


def on_graph(module: Module, pattern: Pattern | str) -> Module:
    """The same layer, or model of layers, on another pattern: weights belong to the layer, a graph belongs to the data.

    Nothing is copied but the outer shells, so that all parameters are those of the module itself, and it is cheap enough to be
    made anew for every batch: `on_graph(layer, Edges(edge_index, nodes=len(x)))(x[None])`. Whether it trains or evaluates is
    taken from the module as it is now.

    `module` is a layer or a model, `pattern` the new pattern or its text.

    >>> import torch
    >>> from regard import Edges, layer, on_graph
    >>> x = torch.randn(1, 3, 8)
    >>> mixer = layer("gat(pattern=Local(1))", width=8, heads=2)
    >>> y = on_graph(mixer, Edges([[0, 1], [1, 2]], nodes=3, loops=True))(x)
    >>> torch.allclose(y[:, 0], mixer(x)[:, 0])  # node 0 has no edge but its loop
    True
    """
    found = _over(module, Pattern.of(pattern))
    if found is module:
        raise ValueError(f"nothing in this {type(module).__name__} takes a pattern: only `sparse` and `gat` do")
    return found


def _over(module: Module, pattern: Pattern) -> Module:
    if isinstance(module, Core):
        if type(module) not in (Sparse, GAT):
            return module  # a mechanism that owns its pattern
        core = copy(module)
        core.place(pattern)  # type: ignore[operator]
        return core
    parts = {name: part and _over(part, pattern) for name, part in module._modules.items()}
    if all(part is module._modules[name] for name, part in parts.items()):
        return module
    shell = copy(module)
    shell._modules = parts
    if isinstance(shell, Attention):
        shell.can = shell.core.can
    return shell


class DisjointGraphs(NamedTuple):
    """Several graphs as one that falls apart into them."""

    edges: Edges
    sizes: tuple[int, ...]

    def pack(self, nodes: Sequence[Tensor]) -> Tensor:
        """The nodes (n_i w) of each graph as one sequence (1 n w)."""
        if [len(x) for x in nodes] != list(self.sizes):
            raise ValueError(f"these graphs have {list(self.sizes)} nodes, not {[len(x) for x in nodes]}")
        return torch.cat(list(nodes))[None]

    def unpack(self, x: Tensor) -> list[Tensor]:
        """And back: (1 n w) to (n_i w) of each graph."""
        if x.dim() != 3 or x.shape[:2] != (1, sum(self.sizes)):
            raise ValueError(f"x has shape {tuple(x.shape)}, but (1, {sum(self.sizes)}, width) is needed")
        return list(x[0].split(list(self.sizes)))


def disjoint(graphs: Sequence[Edges]) -> DisjointGraphs:
    """A batch of graphs as one graph without edges between them: `on_graph(layer, batch.edges)(batch.pack(nodes))`.

    `graphs` are Edges, each with its number of nodes.

    >>> import torch
    >>> from regard import Edges, disjoint, layer, on_graph
    >>> batch = disjoint([Edges([[0], [1]], nodes=2), Edges([[0, 1], [1, 2]], nodes=3)])
    >>> mixer = layer("gat(pattern=Local(1))", width=8, heads=2)
    >>> tuple(on_graph(mixer, batch.edges)(batch.pack([torch.randn(2, 8), torch.randn(3, 8)])).shape)
    (1, 5, 8)
    """
    if not graphs or not all(isinstance(graph, Edges) for graph in graphs):
        raise ValueError("disjoint needs a list of graphs: [Edges(...), Edges(...)], each with its number of nodes")
    sizes = [graph.nodes for graph in graphs]
    total = sum(sizes)
    many = torch.tensor([len(graph.codes) for graph in graphs])
    size = torch.tensor(sizes)
    begin = size.cumsum(0) - size
    first, size = (x.repeat_interleave(many) for x in (begin, size))
    codes = torch.cat([graph.codes for graph in graphs])
    i = codes // size.clamp_min(1)
    coded = (i + first) * total + codes - i * size + first
    return DisjointGraphs(Edges.coded(coded, total), tuple(sizes))


def edge_weights(mixer: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of attention and their weights: edges (2, edges), sources over targets, and their weights (edges, heads).

    For a `sparse` or `gat` layer and the nodes x (1 n w) of one graph. With another pattern in each head the edges are those of
    any of them. Gradients flow.

    `mixer` is the layer, `x` its nodes.

    >>> import torch
    >>> from regard import Edges, edge_weights, layer
    >>> graph = Edges([[0, 1], [2, 2]], nodes=3)  # 0 and 1 -> 2
    >>> edges, weights = edge_weights(layer(f"gat(pattern={graph})", width=8, heads=2), torch.randn(1, 3, 8))
    >>> edges
    tensor([[0, 1],
            [2, 2]])
    >>> torch.allclose(weights.sum(0), torch.ones(2))
    True
    """
    core = mixer.core
    if not isinstance(core, Sparse) or type(core) not in (Sparse, GAT) or core.positions is not None or mixer.dims.cross:
        raise ValueError("edge_weights is for self-attention by `sparse` or `gat`, without positions that add to scores")
    if x.dim() != 3 or len(x) != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}, but the nodes of one graph, (1, nodes, {mixer.dims.width}), are needed")
    n, acc = x.shape[1], accumulator(x.dtype)
    each = [own.bound(n, n) for own in core.reach.each]
    anywhere = reduce(or_, dict.fromkeys(each))
    i, j = edge_list(anywhere, Span(0, n, 0, n), mixer.dims.causal, x.device)
    q, k, v = mixer.heads(x, Places.of(x))
    keys, _ = expand_heads(k, v, q.shape[1])
    s = _edge_scores(core, q.to(acc), keys.to(acc), i, j)
    if len(set(each)) > 1:
        own_pairs = torch.stack([own(0, i, j) for own in each], 1)
        s = s.masked_fill(~own_pairs, -torch.inf)
    top = torch.full((n, s.shape[1]), -1e30, dtype=acc, device=x.device)
    top = top.scatter_reduce(0, i[:, None].expand(s.shape), s.detach(), "amax")
    weights = (s - top[i]).exp()
    total = torch.zeros_like(top).index_add(0, i, weights)
    norm = total.masked_fill(total == 0, 1)
    weights = weights / norm[i]
    return torch.stack([j, i]), weights.to(x.dtype)


def _edge_scores(core: Sparse, q: Tensor, k: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """(pairs, heads) of a batch of one."""
    q, k, a = core.sides(q, k) if isinstance(core, GAT) else (q, k, q.new_tensor(core.scale))
    left, right = (x[0].transpose(0, 1) for x in (q, k))

    def some(i: Tensor, j: Tensor) -> tuple[Tensor]:
        x, y = left[i], right[j]
        products = nn.functional.leaky_relu(x + y, core.slope) if isinstance(core, GAT) else x * y
        return ((a * products).sum(-1),)

    return in_strips(some, (i, j), 0, left.shape[1] * left.shape[2])[0]
