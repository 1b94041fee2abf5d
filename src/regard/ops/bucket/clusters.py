"""Clusters of tokens by Triton kernels: which tokens a cluster takes, and how its centroid moves. For routing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import dense_rows, row_strides
from regard.ops.bucket.bucket_op import SHORTEST
from regard.ops.bucket.members import Members
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import HALVES, block_of
from regard.patterns.tiles import ceil_div

CLUSTER_TOKENS, CLUSTER_BLOCK = 64, 16  # tokens and centroids of one product: two warps, see `block_of`
MOST_CHOSEN_FROM = 16384  # tokens that lie in the registers of a program
CHOSEN_OF_WARP = 512  # tokens of a warp that chooses
SEGMENT_TOKENS = 256  # tokens that a program sums
MOVED_PARTS = 32  # sums that a program adds at a time
FINE = 1 << 30  # similarities closer than one part in so many are equal: the earlier token wins
SHORTEST_CENTROID = 1e-12  # of a centroid, as in torch.nn.functional.normalize

ClusterTokens = tuple[Tensor, Tensor | None, Tensor]  # x (b g n d), which of them are real (b n), the nearest centroid (b h n)


def _real(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.contiguous().view(torch.uint8)


def _parts(x: Tensor) -> int:
    """Return how many parts of the type of x are as precise as float32; the interpreter multiplies bfloat16 as integers."""
    return 3 if x.dtype == torch.float16 or (x.is_cuda and x.dtype in HALVES) else 1


def _codes(x: Tensor, centroids: Tensor, valid: Tensor | None, codes: Tensor) -> Tensor:
    """Fill in codes (b*h c n), how similar tokens and centroids are; return the centroid nearest to each token (b h n)."""
    from regard.ops.bucket import cluster_kernels as kernels

    x = dense_rows(x)
    (b, h, n, d), c = x.shape, centroids.shape[1]
    nearest = torch.empty(b, h, n, dtype=torch.int32, device=x.device)
    tiles = ceil_div(n, CLUSTER_TOKENS)
    numbers = (*row_strides(x), n, h, tiles, c, SHORTEST, float(FINE), SHORTEST_CENTROID)
    sizes = {"D": d, "BD": block_of(d, x.device), "BC": CLUSTER_BLOCK, "BM": CLUSTER_TOKENS, "PARTS": _parts(x), "num_warps": 2}
    tensors = (x, centroids, _real(valid), codes, nearest)
    launch_kernel(kernels.similar_clusters, (b * h * tiles,), tensors, numbers, {"MASKED": valid is not None, **sizes})
    return nearest


def choose_members(given: Sequence[tuple[Tensor, Tensor | None]], centroids: Tensor, w: int) -> list[Members]:
    """Return the w tokens of each x (b h n d) most similar to each of the centroids (h c d), and the one nearest to each token.

    given: tensors x of one shape, and which of their tokens are real (b n), or None: all.
    """
    from regard.ops.bucket import cluster_kernels as kernels

    centroids = centroids.contiguous()
    x = given[0][0]
    (b, h, n, _), c = x.shape, centroids.shape[1]
    codes = torch.empty(len(given), b * h, c, n, dtype=torch.int32, device=x.device)
    where = torch.empty_like(codes)
    index = torch.empty(len(given), b * h, c, w, dtype=torch.int32, device=x.device)
    nearest = [_codes(one, centroids, valid, each) for (one, valid), each in zip(given, codes.unbind(), strict=True)]
    block = max(64, 1 << (n - 1).bit_length())
    own = {"BLOCK": block, "num_warps": min(16, max(4, block // CHOSEN_OF_WARP))}
    launch_kernel(kernels.best_members, (len(given) * b * h * c,), (codes, index, where), (n, w), own)
    found = zip(given, index.unbind(), where.unbind(), nearest, strict=True)
    return [Members(i, _first_places(valid, w, h), n, places, near) for (_, valid), i, places, near in found]


def _first_places(valid: Tensor | None, w: int, h: int) -> Tensor | None:
    """Return which of w places of a cluster hold real tokens, (b*h w): those come first."""
    if valid is None:
        return None
    real = torch.arange(w, device=valid.device) < valid.sum(1, keepdim=True)
    return real.repeat_interleave(h, 0)


def learn_clusters(centroids: Tensor, tokens: Sequence[ClusterTokens], decay: float) -> None:
    """Move each of the centroids (h c d) towards the mean direction of the tokens nearest to it, by 1 - decay; in place."""
    from regard.ops.bucket import cluster_kernels as kernels

    h, c, d = centroids.shape
    wide = {"D": d, "BD": block_of(d, centroids.device)}
    segments = [ceil_div(x.shape[2], SEGMENT_TOKENS) for x, _, _ in tokens]
    sizes = [len(x) * each for (x, _, _), each in zip(tokens, segments, strict=True)]
    parts, skipped = sum(sizes), 0
    sums = torch.empty(h, c, parts, d, dtype=torch.float32, device=centroids.device)
    counts = torch.empty(h, c, parts, dtype=torch.float32, device=centroids.device)
    for (x, valid, nearest), each, size in zip(tokens, segments, sizes, strict=True):
        x, (b, g, n, _) = dense_rows(x), x.shape
        numbers = (*row_strides(x), *nearest.stride(), n, h, each, SEGMENT_TOKENS, c, parts, skipped, SHORTEST)
        own = {"SHARE": h // g, "MASKED": valid is not None, "BC": CLUSTER_BLOCK, "BM": CLUSTER_TOKENS, "PARTS": _parts(x)}
        tensors = (x, nearest, _real(valid), sums, counts)
        grid = (b * h * each, ceil_div(c, CLUSTER_BLOCK))
        launch_kernel(kernels.sum_clusters, grid, tensors, numbers, {**own, **wide, "num_warps": 2})
        skipped += size
    numbers = (parts, float(decay), SHORTEST_CENTROID)
    launch_kernel(kernels.move_clusters, (h * c,), (centroids, sums, counts), numbers, {"BP": MOVED_PARTS, **wide})
