"""The backend "reference": the definition of attention over all pairs, with n x m scores and autograd. Slow, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.dense_limit import dense_refused
from regard.ops.dropout_hash import kept_pairs_composite
from regard.ops.pair.pair_op import BY_COUNT, SOFTMAX, PairCall, key_positions, pair_dropout_keys, query_positions, table_rows
from regard.ops.tile.call import accumulator


class ReferencePairs:
    """All scores at once, as they are defined."""

    name = "reference"

    def refuses(self, call: PairCall) -> str | None:
        return dense_refused(call.q.shape[2], call.v.shape[2])

    def forward(self, call: PairCall) -> Tensor:
        acc = accumulator(call.v.dtype)
        h, n, m = call.q.shape[1], call.q.shape[2], call.v.shape[2]
        k, v = (x.to(acc).repeat_interleave(h // x.shape[1], 1) for x in (call.k, call.v))
        i, j = query_positions(call)[:, None, :, None], key_positions(call)[:, None, None]
        s = torch.zeros(len(call.v), h, n, m, dtype=acc, device=v.device)
        if call.w is not None:
            made = torch.tanh(call.q.to(acc)[:, :, :, None] + k[:, :, None])
            s = s + (made * call.w.to(acc)[:, None, None]).sum(-1)
        elif call.q.shape[-1]:
            s = s + call.scale * call.q.to(acc) @ k.mT
        if call.table is not None:
            rows = table_rows(call.table.to(acc), i[:, 0, :, 0])
            s = s + rows[..., :m] * (1 if call.share is None else call.share.to(acc)[:, None, None])
        if call.x is not None and call.y is not None:
            number = torch.arange(m, device=v.device)
            size = call.y.shape[-1]
            s = s + call.x.to(acc)[..., number // size] * call.y.to(acc)[..., number % size]
        if call.bias is not None:
            s = call.bias.add(s, i - j)
        seen = torch.ones_like(s, dtype=torch.bool)
        if call.causal:
            seen = seen & (j <= i)
        if call.valid is not None:
            seen = seen & call.valid[:, None, None]
        a = self._weights(s, seen, call.norm)
        keyed = pair_dropout_keys(call)
        if keyed is not None:
            kept = kept_pairs_composite(keyed[0][..., None], keyed[1], call.dropout)
            a = a * kept / (1 - call.dropout)
        out = a @ v
        if call.bias is not None and call.bias.mass:
            out = torch.cat([out, call.bias.masses(a, i - j)], -1)
        return out.to(call.v.dtype)

    def _weights(self, s: Tensor, seen: Tensor, norm: str) -> Tensor:
        if norm == SOFTMAX:
            return s.masked_fill(~seen, -1e30).softmax(-1) * seen
        positive = s.relu() * seen
        total = (seen if norm == BY_COUNT else positive).sum(-1, keepdim=True)
        return positive / torch.where(total > 0, total, 1)
