"""Attention along a list of edges: time and memory follow the list, however unevenly the edges are spread over the queries.

    s_ij = sum_d a_d LeakyReLU(q_id + k_jd),   A = softmax over the pairs (i, j) of query i,   out = A v

Nodes come first here: q (n B d), k (m B d), v (m B e), a (B d) with B heads of any batch. What is as large as pairs x d or
pairs x e exists for a strip of the list at a time, and once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.cache import outlives_tracing, register_cache
from regard.ops.budget import budget
from regard.ops.composite import edge_attention_composite
from regard.ops.dropout_hash import draw_seed, kept_pairs, kept_pairs_composite, key_keys, query_keys
from regard.patterns import Pattern
from regard.patterns.edge_list import edge_list
from regard.patterns.tiles import Span
from regard.transforms import differentiable_grads, needs_plain_ops


def edge_attention(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, pairs: Tensor, *, slope: float = 0.2, dropout: float = 0.0
) -> Tensor:
    """Compute out (n B e); pairs (2, pairs) are queries over keys, in order of the queries. A query without a pair gets 0."""
    seed = draw_seed(q.device) if dropout else None
    if needs_plain_ops():
        drop = None if seed is None else _dropout_composite(dropout, seed, pairs, v.shape[1])
        return edge_attention_composite(q, k, v, a, pairs, slope, drop)
    return _edge_forward(q, k, v, a, pairs, seed, "", [], False, slope, dropout)[0]


def edge_attention_by_text(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, text: str, span: Span, *, causal: bool, slope: float = 0.2, dropout: float = 0.0
) -> Tensor:
    """Compute the same under a tracer, which cannot read a list of pairs: they are those of a pattern of one head."""
    seed = draw_seed(q.device) if dropout else None
    return _edge_forward(q, k, v, a, None, seed, text, list(span), causal, slope, dropout)[0]


def softmax_by_query(s: Tensor, i: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Scores (pairs B), which become exp(s - top) in place; the sum of those (n B), and top (n B): -inf and 0 without pairs."""
    index = i[:, None].expand(s.shape)
    lowest = torch.full((n, s.shape[1]), -torch.inf, dtype=s.dtype, device=s.device)
    top = lowest.scatter_reduce_(0, index, s, "amax")
    s.sub_(top.index_select(0, i)).exp_()
    total = _add(torch.zeros_like(top), i, s)
    return total, top


def _add(total: Tensor, i: Tensor, x: Tensor) -> Tensor:
    """total[i] += x, in the same order every time: on a GPU index_add_ would not be, and two calls would differ."""
    if total.device.type == "cpu":
        return total.index_add_(0, i, x)
    return total.index_put_((i,), x, accumulate=True)


def _additive_scores(q: Tensor, k: Tensor, a: Tensor, i: Tensor, j: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """(pairs B) scores of some pairs, and the sums they come from (pairs B d)."""
    x = q.index_select(0, i).add_(k.index_select(0, j))
    bent = torch.nn.functional.leaky_relu(x, slope)
    if a.shape[1] == 1:
        return bent[..., 0] * a[:, 0], x
    return bent.mul_(a).sum(-1), x


def _edge_strips(pairs: Tensor, B: int, wide: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    each = max(1, B * wide)
    step = max(1, budget(pairs.device).edge_strip // each)
    for low in range(0, pairs.shape[1], step):
        here = slice(low, low + step)
        yield here, pairs[0, here], pairs[1, here]


class _EdgeDropout:
    """Dropout of the weights of a call: a function of the seed, the head and the two nodes of an edge."""

    def __init__(self, rate: float, seed: Tensor, n: int, m: int, B: int) -> None:
        self.rate = rate
        heads, i, j = (torch.arange(size, device=seed.device) for size in (B, n, m))
        self.query = query_keys(seed, heads, i[:, None])  # (n B)
        self.key = key_keys(seed, j[:, None])  # (m 1)

    def kept(self, i: Tensor, j: Tensor, like: Tensor) -> Tensor:
        """Return what dropout leaves of the weights (pairs B) of some edges: 0 or 1 / (1 - rate)."""
        out = torch.empty_like(like)
        query = self.query.index_select(0, i)
        key = self.key.index_select(0, j)
        kept_pairs(query, key, self.rate, out)
        return out.div_(1 - self.rate)


def _dropout_composite(rate: float, seed: Tensor, pairs: Tensor, B: int) -> Callable[[Tensor], Tensor]:
    """Return a function that drops the same weights (pairs B) in plain operations."""
    i, j = pairs
    heads = torch.arange(B, device=i.device)
    query = query_keys(seed, heads, i[:, None])
    key = key_keys(seed, j[:, None])
    kept = kept_pairs_composite(query, key, rate)
    return lambda weights: weights * kept / (1 - rate)


def _pairs_of(pairs: Tensor | None, text: str, span: list[int], causal: bool, device: torch.device) -> Tensor:
    if pairs is None:
        return edge_list(_parsed_pattern(text), Span(*span), causal, device)
    return pairs


@lru_cache(maxsize=64)
@outlives_tracing
def _parsed_pattern(text: str) -> Pattern:
    return Pattern.parse(text)


register_cache(_parsed_pattern.cache_clear)


@torch.library.custom_op("regard::walk", mutates_args=())
def _edge_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    pairs: Tensor | None,
    seed: Tensor | None,
    text: str,
    span: list[int],
    causal: bool,
    slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """out (n B e) and log-sum-exp (n B)."""
    pairs = _pairs_of(pairs, text, span, causal, q.device)
    n = len(q)
    B = v.shape[1]
    wide = max(q.shape[2], v.shape[2])
    s = q.new_empty(pairs.shape[1], B)
    for here, i, j in _edge_strips(pairs, B, wide):
        s[here] = _additive_scores(q, k, a, i, j, slope)[0]
    z, top = softmax_by_query(s, pairs[0], n)
    out = v.new_zeros(n, B, v.shape[2])
    drop = None if seed is None else _EdgeDropout(dropout, seed, n, len(k), B)
    for here, i, j in _edge_strips(pairs, B, wide):
        weights = s[here] if drop is None else drop.kept(i, j, s[here]).mul_(s[here])
        _add(out, i, v.index_select(0, j).mul_(weights.unsqueeze(-1)))
    alone = z == 0
    total = z.masked_fill(alone, 1)
    out.div_(total.unsqueeze(-1))
    lse = z.log_().add_(top)
    return out, lse.masked_fill_(alone, 0)


@torch.library.custom_op("regard::walk_backward", mutates_args=())
def _edge_grads(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    pairs: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    text: str,
    span: list[int],
    causal: bool,
    slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = _pairs_of(pairs, text, span, causal, q.device)
    dq, dk, dv, da = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, a))
    pull = (d_out * out).sum(-1)  # what every weight of a query loses
    drop = None if seed is None else _EdgeDropout(dropout, seed, len(q), len(k), v.shape[1])
    wide = max(q.shape[2], v.shape[2])
    for _, i, j in _edge_strips(pairs, v.shape[1], wide):
        s, x = _additive_scores(q, k, a, i, j, slope)
        weights = s.sub_(lse.index_select(0, i)).exp_()
        up = d_out.index_select(0, i)
        kept = None if drop is None else drop.kept(i, j, s)
        d = (up * v.index_select(0, j)).sum(-1)
        if kept is not None:
            d = d.mul_(kept)
        d.sub_(pull.index_select(0, i)).mul_(weights)
        if kept is not None:
            weights = weights.mul_(kept)
        _add(dv, j, up.mul_(weights.unsqueeze(-1)))
        steep = torch.full_like(x, slope).masked_fill_(x > 0, 1)
        steep.mul_(d.unsqueeze(-1))  # of the score, by x / a
        da += (steep * x).sum(0)
        steep.mul_(a)
        _add(dq, i, steep)
        _add(dk, j, steep)
    return dq, dk, dv, da


@_edge_forward.register_fake
def fake_edge_forward(q, k, v, *rest):  # noqa: ARG001
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[:2])


@_edge_grads.register_fake
def fake_edge_grads(d_out, q, k, v, a, *rest):  # noqa: ARG001
    return tuple(x.new_empty(x.shape) for x in (q, k, v, a))


def _save_edge(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.rest = inputs[6:]


def _edge_backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple:  # noqa: ARG001 - the log-sum-exp is no result
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: to be differentiated once more
        return *_differentiable_backward(ctx.saved_tensors[:6], ctx.rest, d_out), *[None] * 7
    return *_edge_grads(d_out, *ctx.saved_tensors, *ctx.rest), *[None] * 7


def _differentiable_backward(tensors: tuple, rest: tuple, d_out: Tensor) -> list[Tensor | None]:
    """The same gradients, as functions of everything they are made of."""
    *inputs, pairs, seed = tensors
    text, span, causal, slope, dropout = rest
    pairs = _pairs_of(pairs, text, span, causal, d_out.device)
    drop = None if seed is None else _dropout_composite(dropout, seed, pairs, inputs[2].shape[1])

    def f(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor]:
        return (edge_attention_composite(q, k, v, a, pairs, slope, drop),)

    return differentiable_grads(f, inputs, (d_out,))


_edge_forward.register_autograd(_edge_backward, setup_context=_save_edge)


@register_flop_formula(torch.ops.regard.walk)
def _flops(q, k, v, a, pairs, seed, text, span, causal, *rest, **more) -> int:  # noqa: ARG001
    """A multiplication and an addition for every number of every pair, as for a product of matrices."""
    if pairs is None:
        listed = edge_list(_parsed_pattern(text), Span(*span), causal, torch.device("cpu"))
        pairs = listed.shape
    each = q[1] * (q[2] + v[2])
    return 2 * pairs[1] * each
