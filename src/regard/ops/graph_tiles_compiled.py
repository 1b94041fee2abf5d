"""Graph attention over tiles as operators of torch.library, for torch.compile: one graph for any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token, dense_rows, like_by_token
from regard.ops.dropout_hash import draw_seed
from regard.ops.edge import _parsed_pattern
from regard.ops.graph_tiles import GraphCall, GraphLaunches, GraphPairs
from regard.patterns.tiles import Span

GRAPH_TENSORS, GRAPH_VARIABLES = 6, 5  # of a call: all, and those that have gradients


def compiled_graph_tiles(
    q: Tensor, k: Tensor, v: Tensor, a_q: Tensor, a_k: Tensor, pairs: GraphPairs, *, slope: float, dropout: float = 0.0
) -> Tensor:
    """Compute `graph_tile_attention` as one node of a graph. The pattern has no edges and no strides."""
    seed = draw_seed(q.device) if dropout else None
    return _graph_operator(q, k, v, a_q, a_k, seed, pairs.text, list(pairs.span), pairs.causal, slope, dropout)[0]


def _launches(tensors: tuple, text: str, span: list[int], causal: bool, slope: float, dropout: float) -> GraphLaunches:
    q, k, v, a_q, a_k, seed = tensors
    pairs = GraphPairs(_parsed_pattern(text), text, Span(*span), causal)
    return GraphLaunches(GraphCall(dense_rows(q), dense_rows(k), dense_rows(v), a_q, a_k, seed, pairs, slope, dropout))


@torch.library.custom_op("regard::graph_tiles", mutates_args=())
def _graph_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a_q: Tensor,
    a_k: Tensor,
    seed: Tensor | None,
    text: str,
    span: list[int],
    causal: bool,
    slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, x, y = _launches((q, k, v, a_q, a_k, seed), text, span, causal, slope, dropout).forward()
    return out, lse, x, y


@_graph_operator.register_fake
def fake_graph_tiles(q, k, v, *rest):  # noqa: ARG001
    (b, h, n, _), m = q.shape, k.shape[2]
    out = by_token(v, b, n, h, v.shape[-1])
    lse, x, y = (q.new_empty(b, h, tokens, dtype=torch.float32) for tokens in (n, n, m))
    return out, lse, x, y


@torch.library.custom_op("regard::graph_tiles_backward", mutates_args=())
def _graph_operator_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a_q: Tensor,
    a_k: Tensor,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    x: Tensor,
    y: Tensor,
    text: str,
    span: list[int],
    causal: bool,
    slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = _launches((q, k, v, a_q, a_k, seed), text, span, causal, slope, dropout)
    dq, dk, dv, da_q, da_k = run.backward(out, lse, x, y, dense_rows(grad), _apart(q, k, v))
    return dq, dk, dv, da_q, da_k


@_graph_operator_backward.register_fake
def fake_graph_tiles_backward(grad, q, k, v, a_q, a_k, *rest):  # noqa: ARG001
    return *_apart(q, k, v), torch.empty_like(a_q), torch.empty_like(a_k)


def _apart(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return empty tensors for gradients, each in a buffer of its own: results of an operator share no memory."""
    return tuple(like_by_token(x) for x in tensors)


def keep_graph_tensors(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:GRAPH_TENSORS], *output)
    ctx.rest = inputs[GRAPH_TENSORS:]


def graph_operator_grads(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple:  # noqa: ARG001 - only out has a gradient
    found = _graph_operator_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return *found, *[None] * (GRAPH_TENSORS - GRAPH_VARIABLES + len(ctx.rest))


_graph_operator.register_autograd(graph_operator_grads, setup_context=keep_graph_tensors)
