"""Softmax among tokens with the same label: `bucket_attention` chooses a backend (`regard.ops.backend`) for it.

A token may have several labels, one a round. All rounds together are one softmax over the union of their pairs.
Causal: a token attends to the `reach` newest tokens of its label up to itself, whatever comes later. Otherwise tokens sorted
by (label, position) are cut into chunks of `reach`; a token attends to those of its label in its own chunk and the one before.

Letters: b batch, h query heads, g key-value heads, n tokens, r rounds, d key dim, e value dim.

A backend is an object with the methods of `BucketBackend`. Where its `forward` is made of differentiable operations, autograd
finds the gradients; a fused kernel calls a torch.autograd.Function or a custom operator.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.ops.backend import AUTO, choose_backend

SHORTEST = 1e-6  # a vector shorter than this has no direction


class BucketCall(NamedTuple):
    """One call of bucketed attention. Query heads x * h / g .. (x + 1) * h / g - 1 share key and value head x."""

    q: Tensor  # (b h n d)
    k: Tensor  # (b g n d)
    v: Tensor  # (b g n e)
    labels: Tensor  # (b h r n) integers 0 .. buckets - 1; padding has `buckets`, attends to nothing and is not attended to
    seed: Tensor | None  # () int64, of dropout: see `regard.ops.dropout_hash`
    buckets: int  # the number of labels
    reach: int  # newest tokens of a label, or tokens of a chunk
    causal: bool
    own: bool  # a token attends to itself; otherwise only where there is no other
    unit_keys: bool  # scores are scale * q . k / |k|, not scale * q . k
    scale: float
    dropout: float


class LabelCall(NamedTuple):
    """Label keys by the direction that they point to most: the largest product in every round."""

    k: Tensor  # (b g n d)
    directions: Tensor  # (h d r*f): f directions of each round, of every query head
    rounds: int
    opposite: bool  # directions x are followed by -x: 2 f labels, not f


BUCKET_TENSORS = 5  # the first fields of a call; three of them have gradients


class BucketBackend(Protocol):
    """An implementation of bucketed attention."""

    name: str

    def refuses(self, call: BucketCall | LabelCall) -> str | None:
        """Return a sentence about what this backend cannot compute in a call, or None."""
        ...

    def forward(self, call: BucketCall) -> Tensor:
        """Return out (b h n e) in the type of v; 0 for padding."""
        ...

    def labels(self, call: LabelCall) -> Tensor:
        """Return the labels (b h n r) of keys, int32; of equal products the first."""
        ...


def bucket_attention(call: BucketCall, backend: str = AUTO) -> Tensor:
    """Return the softmax of scores over the pairs of all rounds, times v: out (b h n e) in the type of v, n >= 1."""
    return choose_backend("bucket", backend, call).forward(call)


@torch.no_grad()
def product_labels(k: Tensor, directions: Tensor, rounds: int = 1, *, opposite: bool = False, backend: str = AUTO) -> Tensor:
    """Return the labels (b h n rounds) of keys, int32: see `LabelCall`."""
    call = LabelCall(k, directions, rounds, opposite)
    return choose_backend("bucket", backend, call).labels(call)


def scored(call: BucketCall, acc: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys whose products are the scores, and values, each (b*h n .) in a type."""
    share = call.q.shape[1] // call.k.shape[1]
    q, k, v = (x.to(acc) for x in call[:3])
    if call.scale != 1:
        q = q * call.scale
    if call.unit_keys:
        k = torch.nn.functional.normalize(k, dim=-1, eps=SHORTEST)
    if share > 1:
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
