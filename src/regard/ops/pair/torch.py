"""The backend "torch": a strip of queries at a time and once more in the backward pass, never n x m scores at once."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.budget import budget
from regard.ops.dropout_hash import kept_pairs_composite
from regard.ops.pair.pair_op import (
    BY_SUM,
    SOFTMAX,
    PairCall,
    key_positions,
    pair_dropout_keys,
    query_positions,
    table_rows,
)
from regard.ops.strip import in_strips
from regard.ops.tile.call import accumulator
from regard.patterns.tiles import MASKED_SCORE


class TorchPairs:
    """Plain differentiable operations on any device."""

    name = "torch"

    def refuses(self, call: PairCall) -> str | None:  # noqa: ARG002 - it takes every call
        return None

    def forward(self, call: PairCall) -> Tensor:
        acc, (b, h, _, d), m = accumulator(call.v.dtype), call.q.shape, call.v.shape[2]
        q, k, v = (x.to(acc) for x in call[:3])
        k, v = (x if x.shape[1] == h else x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
        if call.scale != 1 and call.w is None:
            q = q * call.scale
        w, bias, j = call.w, call.bias, key_positions(call)
        keyed = pair_dropout_keys(call)
        at = query_positions(call)
        # a strip of ordered queries sees no key behind its last one
        ordered = call.causal and call.at is None and call.key_at is None

        def strip(end: int, q: Tensor, k: Tensor, v: Tensor, i: Tensor, rows: Tensor | None, x: Tensor | None, y: Tensor | None,
                  by_query: Tensor | None, drawn: Tensor | None) -> tuple[Tensor]:  # fmt: skip
            """Of queries at positions i, the last of which sees none but the first `last` keys."""
            last = min(m, call.start + end) if ordered else m
            k, v = (z[:, :, :last] for z in (k, v))
            distance = i[:, None, :, None] - j[:, None, None, :last] if call.causal or bias else i
            seen = _seen_keys(call, distance, last)
            s = None
            if w is not None:
                made = torch.tanh(q[:, :, :, None] + k[:, :, None])  # (b h strip m hidden)
                s = torch.einsum("bhnma,ha->bhnm", made, w.to(acc))
            elif d:
                s = q @ k.mT
            if rows is not None:
                made = rows[..., :last].to(acc)
                s = _plus(s, made if call.share is None else made * call.share.to(acc)[:, None, None])
            if x is not None and y is not None:
                s = _plus(s, _products(x.to(acc), y.to(acc), last))
            assert s is not None
            own = bias and bias._replace(by_query=by_query)
            if own:
                s = own.add(s, distance)
            a, total = _weights(s, seen, call.norm)
            if drawn is not None and keyed is not None:
                kept = kept_pairs_composite(drawn[..., None], keyed[1][:last], call.dropout)
                a = a * (kept / (1 - call.dropout))
            out = a @ v
            if own and own.mass:
                out = torch.cat([out, own.masses(a, distance)], -1)
            return (out if total is None else out / total,)

        tensors = (q, k, v, at, _table_rows_of(call), call.x, call.y, bias and bias.by_query, keyed and keyed[0])
        each = b * h * m * (d if w is not None else 1)
        room = budget(v.device).softmax_strip
        out = in_strips(strip, tensors, 2, each, dims=(2, None, None, 1, 2, 2, 2, 2, 2), room=room, ends=True)[0]
        return out.to(call.v.dtype)


def _seen_keys(call: PairCall, distance: Tensor, last: int) -> Tensor | None:
    """Return which keys are seen, broadcasting to (b 1 n last); None: all."""
    seen = None if call.valid is None else call.valid[:, None, None, :last]
    if not call.causal:
        return seen
    past = distance >= 0
    return past if seen is None else seen & past


def _plus(s: Tensor | None, more: Tensor) -> Tensor:
    return more if s is None else s + more


def _table_rows_of(call: PairCall) -> Tensor | None:
    """Return the rows of the table for all queries, (b h n y) or (1 h n y)."""
    if call.table is None:
        return None
    n, start = call.q.shape[2], call.start
    if call.at is None and start + n <= call.table.shape[1]:
        return call.table[None, :, start : start + n]
    return table_rows(call.table, query_positions(call))


def _products(x: Tensor, y: Tensor, m: int) -> Tensor:
    """Return x_i[j // Y] y_i[j % Y] (b h n m)."""
    size = y.shape[-1]
    rows = m // size + 1 if torch.compiler.is_compiling() else -(-m // size)  # a graph that cuts nothing off is another one
    products = x[..., :rows, None] * y.unsqueeze(-2)
    return products.flatten(-2)[..., :m]


def _weights(s: Tensor, seen: Tensor | None, norm: str) -> tuple[Tensor, Tensor | int | None]:
    """Return weights (b h n m) and what their rows are still to be divided by: outputs are fewer than weights."""
    if norm == SOFTMAX:
        return softmax_of_seen(s, seen), None
    positive = s.relu()
    if seen is not None:
        positive = positive.masked_fill(~seen, 0)
    if norm == BY_SUM:
        found = positive.sum(-1, keepdim=True)
    elif seen is None:
        return positive, s.shape[-1]
    else:
        found = seen.sum(-1, keepdim=True).to(s.dtype)
    return positive, torch.where(found > 0, found, 1)


def softmax_of_seen(s: Tensor, seen: Tensor | None) -> Tensor:
    """Return the softmax of scores (b h n m) over the keys that are seen, None: all; 0 in a row that sees nothing."""
    if seen is None:
        return s.softmax(-1)
    return s.masked_fill(~seen, MASKED_SCORE).softmax(-1) * seen
