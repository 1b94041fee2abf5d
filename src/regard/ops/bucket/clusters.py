"""Clusters of tokens by Triton kernels: which tokens a cluster takes, and how its centroid moves. For routing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import dense_rows, row_strides
from regard.ops.bucket.bucket_op import SHORTEST
from regard.ops.bucket.members import Members
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import block_of
from regard.patterns.tiles import ceil_div

CLUSTER_TOKENS, CLUSTER_BLOCK = 64, 16  # tokens and centroids of one product: two warps, see `block_of`
MOST_CHOSEN_FROM = 16384  # tokens that lie in the registers of a program
SEGMENT_TOKENS = 512  # tokens that a program sums
FINE = 1 << 30  # similarities closer than one part in so many are equal: the earlier token wins
SHORTEST_CENTROID = 1e-12  # of a centroid, as in torch.nn.functional.normalize

ClusterTokens = tuple[Tensor, Tensor | None, Tensor]  # x (b g n d), which of them are real (b n), the nearest centroid (b h n)


def _real(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.contiguous().view(torch.uint8)


def choose_members(x: Tensor, centroids: Tensor, valid: Tensor | None, w: int) -> Members:
    """Return the w tokens of x (b h n d) that are most similar to each of the centroids (h c d), and the one nearest to each."""
    from regard.ops.bucket import cluster_kernels as kernels

    x, centroids = dense_rows(x), centroids.contiguous()
    (b, h, n, d), c = x.shape, centroids.shape[1]
    codes = torch.empty(b * h, c, n, dtype=torch.int32, device=x.device)
    nearest = torch.empty(b, h, n, dtype=torch.int32, device=x.device)
    tiles = ceil_div(n, CLUSTER_TOKENS)
    numbers = (*row_strides(x), n, h, tiles, c, SHORTEST, float(FINE), SHORTEST_CENTROID)
    sizes = {"D": d, "BD": block_of(d, x.device), "BC": CLUSTER_BLOCK, "BM": CLUSTER_TOKENS, "num_warps": 2}
    tensors = (x, centroids, _real(valid), codes, nearest)
    launch_kernel(kernels.similar_clusters, (b * h * tiles,), tensors, numbers, {"MASKED": valid is not None, **sizes})
    index = torch.empty(b * h, c, w, dtype=torch.int32, device=x.device)
    block = max(64, 1 << (n - 1).bit_length())
    own = {"BLOCK": block, "num_warps": min(16, max(4, block // 512))}
    where = torch.empty_like(codes)
    launch_kernel(kernels.best_members, (b * h * c,), (codes, index, where), (n, w), own)
    real = None
    if valid is not None:
        real = torch.arange(w, device=x.device) < valid.sum(1, keepdim=True)
        real = real.repeat_interleave(h, 0)
    return Members(index, real, n, where, nearest)


def learn_clusters(centroids: Tensor, tokens: Sequence[ClusterTokens], decay: float) -> None:
    """Move each of the centroids (h c d) towards the mean direction of the tokens nearest to it, by 1 - decay; in place."""
    from regard.ops.bucket import cluster_kernels as kernels

    h, c, d = centroids.shape
    blocks = ceil_div(c, CLUSTER_BLOCK)
    sizes = {"D": d, "BD": block_of(d, centroids.device), "BC": CLUSTER_BLOCK}
    found = []
    for x, valid, nearest in tokens:
        x, (b, g, n, _) = dense_rows(x), x.shape
        segments = ceil_div(n, SEGMENT_TOKENS)
        sums = torch.empty(b, h, segments, c, d + 1, dtype=torch.float32, device=x.device)
        numbers = (*row_strides(x), *nearest.stride(), n, h, segments, SEGMENT_TOKENS, c, SHORTEST)
        own = {"SHARE": h // g, "MASKED": valid is not None, **sizes, "BM": CLUSTER_TOKENS, "num_warps": 2}
        launch_kernel(kernels.sum_clusters, (b * h * segments, blocks), (x, nearest, _real(valid), sums), numbers, own)
        found.append(sums.sum((0, 2)))
    total = found[0] if len(found) == 1 else found[0] + found[1]
    launch_kernel(kernels.move_clusters, (h, blocks), (centroids, total), (c, float(decay), SHORTEST_CENTROID), sizes)
