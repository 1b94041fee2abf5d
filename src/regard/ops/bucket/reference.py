"""The backend "reference": the definition of bucketed attention, with n x n scores and autograd. Slow, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.bucket.bucket_op import BucketCall, LabelCall, scored
from regard.ops.dense_limit import dense_refused
from regard.ops.dropout_hash import head_numbers, kept_pairs_composite, key_keys, query_keys
from regard.ops.tile.call import accumulator
from regard.patterns.tiles import MASKED_SCORE


class ReferenceBuckets:
    """Bucketed attention as it is defined."""

    name = "reference"

    def refuses(self, call: BucketCall | LabelCall) -> str | None:
        if isinstance(call, LabelCall):  # labels are no pairs
            return None
        return dense_refused(call.q.shape[2], call.q.shape[2])

    def forward(self, call: BucketCall) -> Tensor:
        q, k, v = scored(call, accumulator(call.q.dtype))
        seen = _seen_pairs(call)
        scores = (q @ k.mT).unflatten(0, call.q.shape[:2])
        weights = scores.masked_fill(~seen, MASKED_SCORE).softmax(-1) * seen
        if call.seed is not None:
            weights = weights * _kept(call) / (1 - call.dropout)
        out = weights.flatten(0, 1) @ v
        return out.view(*call.q.shape[:3], -1).to(call.v.dtype)

    def labels(self, call: LabelCall) -> Tensor:
        k = call.k.to(accumulator(call.k.dtype))
        k = k.repeat_interleave(call.directions.shape[0] // k.shape[1], 1)
        products = (k @ call.directions.to(k.dtype)).unflatten(-1, (call.rounds, -1))
        if call.opposite:
            products = torch.cat([products, -products], -1)
        return products.argmax(-1).int()


def _seen_pairs(call: BucketCall) -> Tensor:
    """Return which pairs are in the softmax, (b h n n)."""
    labels, n = call.labels, call.labels.shape[-1]
    time = torch.arange(n, device=labels.device)
    real = labels < call.buckets
    same = (labels[..., :, None] == labels[..., None, :]) & real[..., None]
    if call.causal:
        past = same & (time <= time[:, None])
        behind = past.flip(-1).cumsum(-1).flip(-1)  # tokens of the label from the key to the query, both included
        rounds = past & (behind <= call.reach)
    else:
        chunk = _places(labels) // call.reach
        apart = chunk[..., :, None] - chunk[..., None, :]
        rounds = same & (apart >= 0) & (apart <= 1)
    seen = rounds.any(2)
    if call.own:
        return seen
    itself = torch.eye(n, dtype=torch.bool, device=labels.device)
    others = seen & ~itself
    alone = ~others.any(-1, keepdim=True) & real[:, :, 0, :, None]
    return others | (itself & alone)


def _places(labels: Tensor) -> Tensor:
    """Return the place of each token in the order by label and time: the number of tokens before it."""
    time = torch.arange(labels.shape[-1], device=labels.device)
    less = labels[..., None, :] < labels[..., :, None]
    equal = labels[..., None, :] == labels[..., :, None]
    before = less | (equal & (time < time[:, None]))
    return before.sum(-1)


def _kept(call: BucketCall) -> Tensor:
    """Return which weights dropout keeps, (b h n n)."""
    assert call.seed is not None
    b, h, n, _ = call.q.shape
    heads = head_numbers(b, h, slice(None), call.q.device)[..., None, None]
    time = torch.arange(n, device=call.q.device)
    return kept_pairs_composite(query_keys(call.seed, heads, time[:, None]), key_keys(call.seed, time), call.dropout)
