"""Graph attention over the tiles of a pattern: fused kernels for scores that are sums of one number for each token.

    s_ij = LeakyReLU(a_q . q_i + a_k . k_j),   A = softmax over the pairs (i, j) of the pattern,   out = A v

The definition is `edge_attention`, which gathers keys and values for every pair. Windows, blocks and global tokens have so many
pairs that tiles are far cheaper, with products on matrix units; graphs of single edges stay with the list of edges.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.composite import edge_attention_composite
from regard.ops.dropout_hash import draw_seed, head_numbers, keep_threshold, kept_pairs_composite, key_keys, query_keys
from regard.ops.joined_linear import gradient_buffers
from regard.ops.kernel_launch import SharedConstants, launch_kernel
from regard.ops.triton_support import WIDEST_HEAD, block_of, dot_precision, triton_cannot_run
from regard.patterns import Causal, Edges, Pattern
from regard.patterns.edge_list import edge_list
from regard.patterns.plan import plan
from regard.patterns.tile_list import NO_BAND, TILE, KernelPlan, TileList, kernel_plan
from regard.patterns.tiles import Span, ceil_div
from regard.transforms import differentiable_grads

BASE_TWO_FACTOR = math.log2(math.e)
DOT_ROWS = 64  # tokens of a program that makes numbers of tokens
SINGLE_EDGES = "edges of a graph are walked one by one"
WIDE_ROW = 256  # bytes of values; kernels of wider ones have more warps
WIDE_LAUNCH = {"num_warps": 8, "num_stages": 1}
LAUNCHES = {  # of each kernel: warps and stages
    "forward": {"num_warps": 4, "num_stages": 2},
    "queries": {"num_warps": 4, "num_stages": 2},
    "keys": {"num_warps": 4, "num_stages": 1},
}


class GraphPairs(NamedTuple):
    """The pairs of one head: a pattern at the positions of a span, of the past alone if causal."""

    pattern: Pattern
    text: str
    span: Span
    causal: bool


class GraphCall(NamedTuple):
    """One call: q (b h n d), k (b g m d) and v (b g m e), whose head x serves h / g query heads, a_q and a_k (h d)."""

    q: Tensor
    k: Tensor
    v: Tensor
    a_q: Tensor
    a_k: Tensor
    seed: Tensor | None
    pairs: GraphPairs
    slope: float
    dropout: float


class _Tables(NamedTuple):
    """The plan of a call on its device: a band, and lists by query and by key if there are any."""

    band: tuple[int, int]
    lists: tuple[SharedConstants, SharedConstants] | None
    refused: str | None = None

    @property
    def size(self) -> int:
        """Count the numbers it holds."""
        return 0 if self.lists is None else sum(x.size for x in self.lists)


def graph_tiles_refuse(q: Tensor, k: Tensor, v: Tensor, pairs: GraphPairs) -> str | None:
    """Return a sentence about why kernels do not compute this call, or None."""
    return graph_tensors_refused(q, k, v) or _tables_of(pairs, q.device).refused


def graph_tensors_refused(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return a sentence about why kernels take no such tensors, whatever the pattern, or None."""
    if why := triton_cannot_run(q, k, v):
        return why
    if not q.dtype == k.dtype == v.dtype:
        return f"queries, keys and values are of one type, here {q.dtype}, {k.dtype} and {v.dtype}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST_HEAD // (2 if q.dtype == torch.float32 else 1):
        return f"a head has at most {WIDEST_HEAD} columns, or half as many in float32"
    return None


def _tables_of(pairs: GraphPairs, device: torch.device) -> _Tables:
    return _tables((pairs.text, pairs.span, pairs.causal, device), pairs, device)


@signature_cache
def _tables(key: tuple[Any, ...], pairs: GraphPairs, device: torch.device) -> _Tables:  # noqa: ARG001
    """Plan the pairs of a call."""
    seen = pairs.pattern.bound(pairs.span.n, pairs.span.m)
    if any(isinstance(atom, Edges) for alternative in seen.alternatives() for atom in alternative):
        return _Tables(NO_BAND, None, SINGLE_EDGES)
    made = kernel_plan(plan(seen & Causal() if pairs.causal else seen, pairs.span))
    if made.refused or made.strided:
        return _Tables(NO_BAND, None, made.refused or "tokens in steps are walked pair by pair")
    if made.by_query is None or made.by_key is None:
        return _Tables(made.band or NO_BAND, None)
    return _Tables(made.band or NO_BAND, (_moved(made.by_query, made, device), _moved(made.by_key, made, device)))


def _moved(tiles: TileList, made: KernelPlan, device: torch.device) -> SharedConstants:
    assert made.masks is not None
    spare = torch.zeros(1, 2, TILE, dtype=torch.int32)  # no tensor is empty
    tensors = (*tiles[:2], torch.cat([tiles.entries, tiles.entries.new_zeros(1, 2)]), torch.cat([made.masks, spare]))
    return SharedConstants(*(x.to(device, torch.int32) for x in tensors))


def graph_tile_attention(
    q: Tensor, k: Tensor, v: Tensor, a_q: Tensor, a_k: Tensor, pairs: GraphPairs, *, slope: float, dropout: float = 0.0
) -> Tensor:
    """Compute out (b h n e) by kernels, in the type of v, where `graph_tiles_refuse` has no reason against it."""
    seed = draw_seed(q.device) if dropout else None
    return _GraphTiles.apply(q, k, v, a_q, a_k, seed, pairs, slope, dropout)


def graph_attention_composite(call: GraphCall) -> Tensor:
    """Compute the same in differentiable operations, along a list of edges: the definition."""
    q, k, v, a_q, a_k, seed, pairs, slope, dropout = call
    (b, h), share = q.shape[:2], q.shape[1] // k.shape[1]
    sides = (q * a_q[:, None]).sum(-1), (k.repeat_interleave(share, 1) * a_k[:, None]).sum(-1)
    x, y = (side.permute(2, 0, 1).flatten(1)[..., None] for side in sides)
    values = v.repeat_interleave(share, 1).permute(2, 0, 1, 3).flatten(1, 2)
    listed = edge_list(pairs.pattern, pairs.span, pairs.causal, q.device)
    drop = None
    if seed is not None:
        drawn, keyed = _dropout_keys(call)
        kept = kept_pairs_composite(drawn.flatten(0, 1).mT[listed[0]], keyed[listed[1]][:, None], dropout)
        drop = lambda weights: weights * kept / (1 - dropout)  # noqa: E731
    out = edge_attention_composite(x, y, values, x.new_ones(b * h, 1), listed, slope, drop)
    return out.unflatten(1, (b, h)).permute(1, 2, 0, 3)


def _dropout_keys(call: GraphCall) -> tuple[Tensor, ...]:
    """Return the keys of queries (b h n) and of keys (m) for the hash of a pair; none without dropout."""
    if call.seed is None:
        return ()
    (b, h, n, _), device = call.q.shape, call.q.device
    heads = head_numbers(b, h, slice(None), device)[..., None]
    drawn = query_keys(call.seed, heads, torch.arange(n, device=device))
    return drawn.contiguous(), key_keys(call.seed, torch.arange(call.k.shape[2], device=device)).contiguous()


class GraphLaunches:
    """The launches of one call."""

    def __init__(self, call: GraphCall) -> None:
        self.call = call
        (self.b, self.h, self.n, self.d), self.device = call.q.shape, call.q.device
        self.g, self.m, self.e = call.v.shape[1:]
        self.tables = _tables_of(call.pairs, self.device)
        span, drop = call.pairs.span, call.dropout
        dropped = (keep_threshold(drop), 1 / (1 - drop)) if drop else (0, 1.0)
        self.numbers = (self.n, self.m, span.t - span.u, *self.tables.band, float(call.slope), *dropped, self.h)
        self.share = self.h // self.g
        self.drops = _dropout_keys(call) or (None, None)

    def lists(self, by_key: bool) -> tuple[Tensor | None, ...]:
        """Return the keys of dropout and the tables of tiles, None for those that there are not."""
        found = (None,) * 4 if self.tables.lists is None else self.tables.lists[by_key].read()
        return *self.drops, *found

    def constants(self, kernel: str) -> dict[str, Any]:
        """Return what a kernel is compiled for."""
        wide = block_of(self.e, self.device) * self.call.v.element_size() > WIDE_ROW
        return {
            "R": self.share,
            "E": self.e,
            "BE": block_of(self.e, self.device),
            "LISTED": self.tables.lists is not None,
            "DROP": self.call.dropout > 0,
            "PRECISION": dot_precision(self.call.v.dtype),
            **(WIDE_LAUNCH if wide else LAUNCHES[kernel]),
        }

    def token_numbers(self, x: Tensor, a: Tensor) -> Tensor:
        """Return log2(e) a_h . x_i, (b h n) in float32."""
        from regard.ops.graph_tile_kernels import token_dots

        b, g, n, d = x.shape
        out = torch.empty(b, self.h, n, dtype=torch.float32, device=self.device)
        sizes = {"R": self.h // g, "D": d, "BD": block_of(d, self.device), "BM": DOT_ROWS}
        numbers = (*row_strides(x), n, self.h, BASE_TWO_FACTOR)
        launch_kernel(token_dots, (ceil_div(n, DOT_ROWS), b * self.h), (x, a.float().contiguous(), out), numbers, sizes)
        return out

    def token_gradients(self, x: Tensor, a: Tensor, grad: Tensor, dx: Tensor) -> Tensor:
        """Write the gradient of tokens into dx and return that of a (h d), given that of their numbers (b h n)."""
        from regard.ops.graph_tile_kernels import token_dot_gradients

        b, g, n, d = x.shape
        tiles = ceil_div(n, DOT_ROWS)
        parts = torch.empty(b * tiles, self.h, d, dtype=torch.float32, device=self.device)
        sizes = {"R": self.h // g, "D": d, "BD": block_of(d, self.device), "BM": DOT_ROWS}
        tensors = (x, a.float().contiguous(), grad, dx, parts)
        launch_kernel(token_dot_gradients, (tiles, b * g), tensors, (*row_strides(x, dx), n, self.h), sizes)
        return parts.sum(0).to(a.dtype)

    def forward(self) -> tuple[Tensor, ...]:
        """Return out (b h n e), and for the backward pass its log-sum-exp and the numbers of tokens."""
        from regard.ops.graph_tile_kernels import graph_forward

        q, k, v, a_q, a_k, *_ = self.call
        x, y = self.token_numbers(q, a_q), self.token_numbers(k, a_k)
        out, lse = by_token(v, self.b, self.n, self.h, self.e), torch.empty_like(x)
        tensors = (x, y, v, out, lse, *self.lists(False))
        grid = (ceil_div(self.n, TILE), self.b * self.h)
        launch_kernel(graph_forward, grid, tensors, (*row_strides(v, out), *self.numbers), self.constants("forward"))
        return out, lse, x, y

    def backward(
        self, out: Tensor, lse: Tensor, x: Tensor, y: Tensor, grad: Tensor, buffers: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, a_q and a_k; the first three are written into `buffers` if given."""
        from regard.ops.graph_tile_kernels import graph_key_gradients, graph_query_gradients

        q, k, v, a_q, a_k, *_ = self.call
        dq, dk, dv = buffers or gradient_buffers(q, k, v)
        pull, dx, dy = torch.empty_like(lse), torch.empty_like(x), torch.empty_like(y)
        numbers = (*row_strides(v, out, grad), *self.numbers)
        grid = (ceil_div(self.n, TILE), self.b * self.h)
        tensors = (x, y, v, out, lse, grad, pull, dx, *self.lists(False))
        launch_kernel(graph_query_gradients, grid, tensors, numbers, self.constants("queries"))
        grid = (ceil_div(self.m, TILE), self.b * self.g)
        tensors = (x, y, v, lse, grad, pull, dy, dv, *self.lists(True))
        launch_kernel(graph_key_gradients, grid, tensors, (*row_strides(v, grad, dv), *self.numbers), self.constants("keys"))
        return dq, dk, dv, self.token_gradients(q, a_q, dx, dq), self.token_gradients(k, a_k, dy, dk)


class _GraphTiles(torch.autograd.Function):
    """The kernels for autograd. Arguments: the fields of a call."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> Tensor:
        q, k, v, *rest = fields
        call = GraphCall(dense_rows(q), dense_rows(k), dense_rows(v), *rest)
        out, *saved = GraphLaunches(call).forward()
        ctx.save_for_backward(*call[:6], out, *saved)
        ctx.rest = call[6:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse, x, y = ctx.saved_tensors
        call = GraphCall(*tensors, *ctx.rest)
        none = [None] * 4
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more

            def plain(q: Tensor, k: Tensor, v: Tensor, a_q: Tensor, a_k: Tensor) -> tuple[Tensor]:
                return (graph_attention_composite(GraphCall(q, k, v, a_q, a_k, *call[5:])),)

            return *differentiable_grads(plain, tensors[:5], (grad,)), *none
        return *GraphLaunches(call).backward(out, lse, x, y, dense_rows(grad)), *none
