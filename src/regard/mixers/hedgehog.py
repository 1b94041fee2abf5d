"""Kernelized attention with learned features: Hedgehog, whose feature maps can imitate the weights of a softmax layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import WIDEST, need
from regard.mixers.base import Dims, Places
from regard.mixers.feature_math import upcast
from regard.mixers.linear_attention import Linear


class Hedgehog(Linear):
    """Learn the features of linear attention: the weight of j for i is phi(q_i) . phi(k_j), divided by the sum of its row.

    phi(x) = softmax([x W, -x W]), one W (d features) for each head of the queries and one for each head of the keys, at first
    the identity. Time n f e, memory f (e + 1) at any length, with f = 2 features. Zhang et al. 2024, arXiv:2402.04347.
    """

    feature = "identity"
    map = None

    def __init__(self, dims: Dims, *, features: int | None = None) -> None:
        super().__init__(dims)
        size = dims.d if features is None else need("features", features, 1, WIDEST)
        self.f = 2 * size
        begin = torch.eye(dims.d, size)
        self.query_map = nn.Parameter(begin.repeat(dims.heads, 1, 1))
        self.key_map = nn.Parameter(begin.repeat(dims.g, 1, 1))

    def _queries(self, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - the same at every position
        return _signed_softmax(q, self.query_map)

    def _keys(self, k: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - the same at every position
        return _signed_softmax(k, self.key_map)


def _signed_softmax(x: Tensor, weight: Tensor) -> Tensor:
    """Map x (b h n d) by one matrix for each head (h d r) to softmax([x W, -x W]) (b h n 2r), computed in float32 or better."""
    mapped = upcast(x) @ upcast(weight)
    return torch.softmax(torch.cat([mapped, -mapped], -1), -1).to(x.dtype)
