"""The backend "reference": the definition of tile attention, with n x m scores and autograd. Slow, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.dense_limit import dense_refused
from regard.ops.dropout_hash import head_numbers, kept_pairs_composite, key_keys, query_keys
from regard.ops.tile.call import Gradients, HeadPlans, TileCall, accumulator
from regard.patterns.plan import Plan
from regard.patterns.tiles import MASKED_SCORE


class ReferenceTiles:
    """Tile attention as it is defined."""

    name = "reference"

    def refuses(self, call: TileCall, plans: HeadPlans) -> str | None:  # noqa: ARG002
        return dense_refused(call.q.shape[2], call.k.shape[2])

    def forward(self, call: TileCall, plans: HeadPlans) -> tuple[Tensor, Tensor]:
        acc = accumulator(call.q.dtype)
        share = call.q.shape[1] // call.k.shape[1]
        i, j = positions_of_pairs(plans[0].plan, call.q.device)
        q = call.q.to(acc)
        k = call.k.to(acc).repeat_interleave(share, 1)
        v = call.v.to(acc).repeat_interleave(share, 1)
        scores = call.scale * q @ k.mT
        if call.bias is not None:
            scores = call.bias.add(scores, (i - j)[None, None])
        scores = scores.masked_fill(~seen_pairs(call, plans), MASKED_SCORE)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        if call.seed is not None:
            heads = head_numbers(len(q), q.shape[1], slice(None), q.device)[..., None, None]
            kept = kept_pairs_composite(query_keys(call.seed, heads, i), key_keys(call.seed, j), call.dropout)
            weights = weights * kept / (1 - call.dropout)
        out = weights @ v
        if call.bias is not None and call.bias.mass:
            out = torch.cat([out, call.bias.masses(weights, (i - j)[None, None])], -1)
        empty = lse < MASKED_SCORE / 2
        return out.masked_fill(empty[..., None], 0), lse.clamp_min(MASKED_SCORE)

    def backward(
        self,
        call: TileCall,
        plans: HeadPlans,
        out: Tensor,  # noqa: ARG002 - computed again
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
    ) -> Gradients:
        if d_lse is None:
            d_lse = torch.zeros_like(lse)
        by_query = None if call.bias is None else call.bias.by_query
        inputs = [x.detach().requires_grad_() for x in (call.q, call.k, call.v, by_query) if x is not None]
        q, k, v, *more = inputs
        bias = call.bias._replace(by_query=more[0]) if more and call.bias is not None else call.bias
        with torch.enable_grad():
            results = self.forward(call._replace(q=q, k=k, v=v, bias=bias), plans)
            grads = torch.autograd.grad(results, inputs, (d_out.to(results[0].dtype), d_lse))
        return grads if more else (*grads, None)


def positions_of_pairs(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of queries (n 1) and keys (m)."""
    t, n, u, m = plan.span
    return torch.arange(t, t + n, device=device)[:, None], torch.arange(u, u + m, device=device)


def seen_pairs(call: TileCall, plans: HeadPlans) -> Tensor:
    """Return which pairs are in the softmax, (b or 1, h, n, m)."""
    seen = torch.empty(call.q.shape[1], call.q.shape[2], call.k.shape[2], dtype=torch.bool)
    for plan, heads in plans:
        seen[list(heads)] = pairs_of_plan(plan)
    seen = seen[None].to(call.q.device)
    if call.valid is None:
        return seen
    return seen & call.valid[:, None, None]


def pairs_of_plan(plan: Plan) -> Tensor:
    """Return which pairs the tiles of a plan hold, (n m)."""
    seen = torch.zeros(plan.span.n, plan.span.m, dtype=torch.bool)
    for part in plan.parts:
        i = part.queries.positions(0, plan.span.n)
        j = part.keys.positions(0, plan.span.m)
        for rows, cols in part.groups:
            mask = part.mask(rows, cols)  # (T, r, p * c)
            query = i[rows][:, :, None].expand(mask.shape)
            key = j[cols.clamp_min(0)].flatten(1)[:, None].expand(mask.shape)
            seen[query[mask], key[mask]] = True
    return seen
