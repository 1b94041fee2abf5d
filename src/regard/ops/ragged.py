"""Attention whose plan depends on the number of real tokens in each row, as opaque operators: under torch.compile only.

A compiler has no data, but a plan depends on the lengths of the rows. So lengths are counted inside of operators, which take
tensors and the text of a pattern. Real tokens come first in their row; rows are computed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops import edge
from regard.ops.backend import AUTO, choose_backend
from regard.ops.dropout_hash import draw_seed, row_seed
from regard.ops.fourier import fourier_mix_by_row
from regard.ops.score_bias import ScoreBias
from regard.ops.tile import tile_op
from regard.ops.tile.call import HeadPlans, TileBackend, TileCall, accumulator
from regard.patterns.edge_list import pairs_by_row
from regard.patterns.tiles import MASKED_SCORE, Span


class _Row(NamedTuple):
    """One row without its padding."""

    b: slice
    n: int
    m: int
    call: TileCall
    plans: HeadPlans


def ragged_tile_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    patterns: tile_op.HeadPatterns,
    *,
    scale: float,
    causal: bool,
    dropout: float = 0.0,
    bias: ScoreBias | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Compute `tile_attention` of a pattern that is drawn for the length of each row: counts (b 2) are real queries and keys."""
    call = TileCall(q, k, v, counts, bias, draw_seed(q.device) if dropout else None, scale, dropout)
    return _ragged_tiles(*tile_op.flatten_call(call), patterns.text, causal, backend)


def _ragged_rows(call: TileCall, pattern: str, causal: bool) -> Iterator[_Row]:
    """Cut a call into rows; counts (b 2) are in the place of `valid`."""
    counts = call.valid
    assert counts is not None
    for row, (n, m) in enumerate(counts.tolist()):
        if n and m:
            b = slice(row, row + 1)
            bias = call.bias
            if bias is not None and bias.by_query is not None:
                bias = bias._replace(by_query=bias.by_query[b, :, :n])
            seed = None if call.seed is None else row_seed(call.seed, row)
            own = call._replace(q=call.q[b, :, :n], k=call.k[b, :, :m], v=call.v[b, :, :m], valid=None, bias=bias, seed=seed)
            plans = tile_op.heads_by_plan_of_text(pattern, call.q.shape[1], Span(0, n, 0, m), causal)
            yield _Row(b, n, m, own, plans)


def _forward_by_name(call: TileCall, plans: HeadPlans, backend: str) -> tuple[Tensor, Tensor]:
    """Compute a call by the backend of a name or, for "auto", by the first that does not refuse."""
    chosen: TileBackend = choose_backend("tile", backend, call, plans)
    return chosen.forward(call, plans)


def _backward_by_name(call: TileCall, plans: HeadPlans, backend: str, *results: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of a call by the same backend; results: out, log-sum-exp and the gradients of both."""
    chosen: TileBackend = choose_backend("tile", backend, call, plans)
    return chosen.backward(call, plans, *results)


@torch.library.custom_op("regard::ragged_tile_attention", mutates_args=())
def _ragged_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_query: Tensor | None,
    slopes: Tensor | None,
    counts: Tensor,
    seed: Tensor | None,
    clip: int,
    mass: bool,
    scale: float,
    dropout: float,
    pattern: str,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    call = tile_op.unflatten_call(q, k, v, by_query, slopes, counts, seed, clip, mass, scale, dropout)
    out = q.new_zeros(*q.shape[:3], call.width, dtype=v.dtype)
    lse = torch.full(q.shape[:3], MASKED_SCORE, dtype=accumulator(q.dtype), device=q.device)
    for row in _ragged_rows(call, pattern, causal):
        out[row.b, :, : row.n], lse[row.b, :, : row.n] = _forward_by_name(row.call, row.plans, backend)
    return out, lse


@torch.library.custom_op("regard::ragged_tile_attention_backward", mutates_args=())
def _ragged_tiles_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_query: Tensor | None,
    slopes: Tensor | None,
    counts: Tensor,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    clip: int,
    mass: bool,
    scale: float,
    dropout: float,
    pattern: str,
    causal: bool,
    backend: str,
) -> list[Tensor]:
    call = tile_op.unflatten_call(q, k, v, by_query, slopes, counts, seed, clip, mass, scale, dropout)
    grads = [None if x is None else x.new_zeros(x.shape) for x in (q, k, v, by_query)]
    for row in _ragged_rows(call, pattern, causal):
        results = [x[row.b, :, : row.n] for x in (out.to(lse.dtype), lse, d_out, d_lse)]
        found = _backward_by_name(row.call, row.plans, backend, *results)
        for total, part, size in zip(grads, found, (row.n, row.m, row.m, row.n), strict=True):
            if total is not None and part is not None:
                total[row.b, :, :size] = part
    return [x for x in grads if x is not None]


_ragged_tiles.register_fake(tile_op.fake_tile_attention)  # the same shapes and order of arguments
_ragged_tiles_backward.register_fake(tile_op.fake_tile_attention_backward)


_ragged_tiles.register_autograd(tile_op.operator_grads(_ragged_tiles_backward), setup_context=tile_op.keep_tensors)


def ragged_edge_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    asking: Tensor,
    there: Tensor,
    text: str,
    *,
    causal: bool,
    slope: float = 0.2,
    dropout: float = 0.0,
) -> Tensor:
    """Compute `edge_attention` for the rows of a batch laid end to end; asking (b n) and there (b m): real queries and keys."""
    seed = draw_seed(q.device) if dropout else None
    return _ragged_edge(q, k, v, a, asking, there, seed, text, causal, slope, dropout)[0]


@torch.library.custom_op("regard::ragged_edge_attention", mutates_args=())
def _ragged_edge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    asking: Tensor,
    there: Tensor,
    seed: Tensor | None,
    text: str,
    causal: bool,
    slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    pairs = pairs_by_row(edge._parsed_pattern(text), asking, there, causal)
    return edge._edge_forward(q, k, v, a, pairs, seed, "", [], False, slope, dropout)


@torch.library.custom_op("regard::ragged_edge_attention_backward", mutates_args=())
def _ragged_edge_grads(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    asking: Tensor,
    there: Tensor,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    text: str,
    causal: bool,
    slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = pairs_by_row(edge._parsed_pattern(text), asking, there, causal)
    return edge._edge_grads(d_out, q, k, v, a, pairs, seed, out, lse, "", [], False, slope, dropout)


_ragged_edge.register_fake(edge.fake_edge_forward)
_ragged_edge_grads.register_fake(edge.fake_edge_grads)


def _ragged_edge_backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple:  # noqa: ARG001 - the log-sum-exp is not given out
    return *_ragged_edge_grads(d_out, *ctx.saved_tensors, *ctx.rest), *[None] * 7


_ragged_edge.register_autograd(_ragged_edge_backward, setup_context=tile_op.keep_tensors)


@torch.library.custom_op("regard::ragged_fourier", mutates_args=())
def opaque_fourier(x: Tensor, count: Tensor, norm: str) -> Tensor:
    """As `fourier_mix_by_row`: the Fourier transform of the first count (b) tokens of x (b n w)."""
    return fourier_mix_by_row(x, count, norm)


@opaque_fourier.register_fake
def _(x, count, norm):  # noqa: ARG001
    return x.new_empty(x.shape)


def _save_fourier(ctx: Any, inputs: tuple, output: Tensor) -> None:  # noqa: ARG001 - torch names them
    ctx.save_for_backward(inputs[1])
    ctx.norm = inputs[2]


def _fourier_backward(ctx: Any, grad: Tensor) -> tuple:
    return opaque_fourier(grad, *ctx.saved_tensors, ctx.norm), None, None  # the matrices of the transform are symmetric


opaque_fourier.register_autograd(_fourier_backward, setup_context=_save_fourier)
