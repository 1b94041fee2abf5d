"""Bucketed attention of few queries, such as a decoding step: all pairs are compared, nothing is sorted."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.bucket.bucket_op import BucketCall, scored
from regard.ops.bucket.torch import BucketOutLse, bucket_weights, kept_weights, with_lonely
from regard.ops.dropout_hash import key_keys
from regard.ops.strip import in_strips
from regard.ops.tile.call import accumulator


def few_bucket_queries(call: BucketCall) -> Tensor:
    """Return what the last n of m tokens get from the newest of their label, (b h n e): a causal call with q (b h n d).

    Time and memory n m; keys, values and labels are of all m tokens.
    """
    q, k, v = scored(call, accumulator(call.q.dtype))
    labels = call.labels.flatten(0, 1)
    n, m = q.shape[1], k.shape[1]
    old = m - n
    j = torch.arange(m, device=k.device)
    row = torch.arange(len(q), device=k.device)[:, None, None]

    def strip(q: Tensor, own_labels: Tensor, i: Tensor) -> BucketOutLse:
        same = labels[:, :, None] == own_labels.mT[..., None]
        same = same & (j <= i.mT)
        same = same & (labels < call.buckets)[:, :, None]
        newer = same.cumsum(-1, dtype=torch.int32)
        newer = newer[..., -1:] - newer
        seen = (same & (newer < call.reach)).any(1)
        if not call.own:
            seen = seen & (j != i.mT)
        hidden = (~seen).to(q.dtype)
        kept = None
        if call.seed is not None:
            kept = kept_weights(call.seed, row, i.mT, key_keys(call.seed, j), call.dropout, q.dtype)
        return bucket_weights(q, k, v, hidden, kept)

    each = len(q) * m * labels.shape[1]
    out, lse = in_strips(strip, (q, labels[:, :, old:].mT, j[None, old:]), 1, each)
    if not call.own:
        out = with_lonely(out, lse, v, labels[:, 0, old:] < call.buckets, call.seed, call.dropout)
    return out.unflatten(0, call.q.shape[:2]).to(call.v.dtype)
