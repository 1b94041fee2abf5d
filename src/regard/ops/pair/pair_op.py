"""Attention over all pairs with scores of other forms than softmax(q.k): `pair_attention` chooses a backend for it.

The score of query i and key j is a sum of the terms that a call has:

    additive   sum_a w_a tanh(q_ia + k_ja)
    dot        scale q_i . k_j, where queries have columns
    table      T[position of i, j] of every head, times its share
    factors    x_i[j // Y] y_i[j % Y], with Y the columns of y

and weights are their softmax, or relu(score) divided by the sum of these in a row ("sum") or by the number of keys that the query
sees ("count"). A key is seen if it is real and, causal, not behind the query. Rows that see nothing are 0.

Letters: b batch, h query heads, g key-value heads, n queries, m keys, d columns of queries and keys, e of values.

A backend is an object with the methods of `PairBackend`. Where its `forward` is made of differentiable operations, autograd
finds the gradients; a fused kernel calls a torch.autograd.Function or a custom operator.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.ops.backend import AUTO, choose_backend
from regard.ops.budget import budget
from regard.ops.dropout_hash import head_numbers, key_keys, query_keys
from regard.ops.score_bias import ScoreBias

SOFTMAX, BY_SUM, BY_COUNT = "softmax", "sum", "count"


class PairCall(NamedTuple):
    """One call. Query heads x * h / g .. (x + 1) * h / g - 1 share key and value head x."""

    q: Tensor  # (b h n d); no columns: scores have no term of queries and keys
    k: Tensor  # (b g m d)
    v: Tensor  # (b g m e)
    w: Tensor | None = None  # (h d): scores are additive, not a dot product
    table: Tensor | None = None  # (h x y), y >= m: a row for every position of queries, a column for every key
    share: Tensor | None = None  # (h) factors of the table
    x: Tensor | None = None  # (b h n X)
    y: Tensor | None = None  # (b h n Y), X Y >= m
    at: Tensor | None = None  # (b n) positions of queries; None: start, start + 1, ...
    key_at: Tensor | None = None  # (b m) positions of keys; None: 0, 1, ...
    valid: Tensor | None = None  # (b m) True: a real key
    seed: Tensor | None = None  # () int64, of dropout: see `regard.ops.dropout_hash`
    start: int = 0
    norm: str = SOFTMAX
    causal: bool = False
    scale: float = 1.0  # of the dot product
    dropout: float = 0.0
    bias: ScoreBias | None = None  # by distance; with its mass, outputs have its columns behind those of the values


PAIR_TENSORS = 12  # the first fields of a call
PAIR_VARIABLES = 8  # those of them that have gradients


class PairBackend(Protocol):
    """An implementation of attention over all pairs."""

    name: str

    def refuses(self, call: PairCall) -> str | None:
        """Return a sentence about what this backend cannot compute in a call, or None."""
        ...

    def forward(self, call: PairCall) -> Tensor:
        """Return out (b h n e) in the type of v."""
        ...


def pair_attention(call: PairCall, backend: str = AUTO) -> Tensor:
    """Return the weights of all pairs times v: out (b h n e) in the type of v, n >= 1 and m >= 1.

    Few queries, as in a decoding step, are computed by plain operations, which work on all keys in parallel.
    """
    if backend in (AUTO, "triton") and call.q.shape[2] <= budget(call.q.device).few_queries:
        backend = "torch"
    return choose_backend("pair", backend, call).forward(call)


def query_positions(call: PairCall) -> Tensor:
    """Return the positions of queries, (b n) or (1 n)."""
    if call.at is not None:
        return call.at
    n = call.q.shape[2]
    return torch.arange(call.start, call.start + n, device=call.q.device)[None]


def key_positions(call: PairCall) -> Tensor:
    """Return the positions of keys, (b m) or (1 m)."""
    if call.key_at is not None:
        return call.key_at
    return torch.arange(call.v.shape[2], device=call.v.device)[None]


def pair_dropout_keys(call: PairCall) -> tuple[Tensor, Tensor] | None:
    """Return the keys of dropout, of queries (b h n) and of keys (m), by their places in the call; None without dropout."""
    if call.seed is None:
        return None
    b, h, n, _ = call.q.shape
    device = call.q.device
    heads = head_numbers(b, h, slice(None), device).unsqueeze(-1)
    there = torch.arange(call.v.shape[2], device=device)
    return query_keys(call.seed, heads, torch.arange(n, device=device)), key_keys(call.seed, there)


def table_rows(table: Tensor, at: Tensor) -> Tensor:
    """Return the rows (b h n y) of a table (h x y) at positions (b n); only padding has a position behind the last row."""
    return table[:, at.clamp_max(table.shape[1] - 1)].transpose(0, 1)
