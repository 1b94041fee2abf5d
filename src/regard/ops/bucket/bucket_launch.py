"""Launch the Triton kernels around bucketed attention: labels of keys, and the sort. Shapes and strides of all its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.bucket.bucket_op import SHORTEST, BucketCall, LabelCall
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import block_of
from regard.patterns.tiles import ceil_div

MOST_COUNTED = 128  # labels up to which tokens are sorted by counting
COUNT_BLOCK = 512  # tokens of a program that counts
PLACE_STEP = 32  # tokens that a warp sorts at a time
PLACE_BLOCK = 1024  # tokens of a program that sorts
NORM_BLOCK = 128  # keys of a program that computes norms
LABEL_BLOCK, LABEL_FEATURES = 64, 16  # tokens and directions of one product: two warps, see `block_of`


def row_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and token of tensors (b h n .), one tensor after the other."""
    return tuple([stride for x in tensors for stride in x.stride()[:3]])


def dense_rows(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def by_token(x: Tensor, b: int, n: int, heads: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor (b heads n width) that is laid out as (b n heads width), so that joining heads copies nothing."""
    row = heads * width
    return x.new_empty_strided((b, heads, n, width), (n * row, width, row, 1), dtype=dtype)


def like_by_token(x: Tensor) -> Tensor:
    """Return an empty tensor of the shape and type of x (b heads n width), laid out as (b n heads width)."""
    b, heads, n, width = x.shape
    return by_token(x, b, n, heads, width)


def sorted_places(call: BucketCall) -> Tensor:
    """Sort tokens by label in every round: (3 or 6, b h r n) int32, see `token_places` in triton_kernels."""
    places = torch.empty(6 if call.labels.shape[2] > 1 else 3, *call.labels.shape, dtype=torch.int32, device=call.q.device)
    fill = counted_places if call.buckets < MOST_COUNTED else radix_places
    fill(call, places)
    return places


def counted_places(call: BucketCall, places: Tensor) -> None:
    """Fill in the places by counting: tokens of each label in blocks of tokens, then all tokens of a block at once."""
    from regard.ops.bucket import bucket_count_kernels as kernels

    b, h, r, n = call.labels.shape
    labels = max(32, 1 << call.buckets.bit_length())  # one more than buckets, for padding
    blocks = ceil_div(n, COUNT_BLOCK)
    counts = torch.empty(b * h * r, blocks, labels, dtype=torch.int32, device=places.device)
    grid = (b * h * r * blocks,)
    strides = call.labels.stride()
    sizes = {"SIZE": COUNT_BLOCK, "BB": labels, "num_warps": 1}
    launch_kernel(kernels.count_labels, grid, (call.labels, counts), (*strides, n, blocks, h, r), sizes)
    numbers = (*strides, n, blocks, call.labels.numel(), call.buckets, h, r)
    own = {"MARKS": r > 1, "STEP": PLACE_STEP, "BT": 16, **sizes}
    launch_kernel(kernels.place_tokens, grid, (call.labels, counts, places), numbers, own)


def radix_places(call: BucketCall, places: Tensor) -> None:
    """Fill in the places by PyTorch's sort of line, label and position in one integer."""
    from regard.ops.bucket import triton_kernels as kernels

    b, h, r, n = call.labels.shape
    total = call.labels.numel()
    bits = max(1, (n - 1).bit_length())
    groups = b * h * r * (call.buckets + 1)
    kind = torch.int32 if groups << bits < 2**31 else torch.int64
    codes = torch.empty(total, dtype=kind, device=call.q.device)
    tiles = ceil_div(n, PLACE_BLOCK)
    grid = (b * h * r * tiles,)
    size = {"SIZE": PLACE_BLOCK}
    numbers = (*call.labels.stride(), n, tiles, call.buckets, bits, h, r)
    launch_kernel(kernels.sort_codes, grid, (call.labels, codes), numbers, size)
    codes = codes.sort().values
    first, last = torch.empty(2, ceil_div(groups, 4) * 4, dtype=torch.int32, device=codes.device)  # both aligned
    launch_kernel(kernels.label_bounds, grid, (codes, first, last), (n, tiles, bits), size)
    numbers = (n, tiles, total, call.buckets, bits)
    launch_kernel(kernels.token_places, grid, (codes, first, last, places), numbers, {"MARKS": r > 1, **size})


def label_keys(call: LabelCall) -> Tensor:
    """Label keys in one launch: products are never stored."""
    from regard.ops.bucket import bucket_row_kernels as kernels

    k, directions = dense_rows(call.k), call.directions.contiguous()
    (b, g, n, d), (h, _, f) = k.shape, directions.shape
    labels = torch.empty(b, h, n, call.rounds, dtype=torch.int32, device=k.device)
    tiles = ceil_div(n, LABEL_BLOCK)
    alike = k.dtype == directions.dtype
    constants = {
        "SHARE": h // g, "ROUNDS": call.rounds, "F": f // call.rounds, "OPPOSITE": call.opposite, "ALIKE": alike,
        "D": d, "BD": block_of(d, k.device), "BF": LABEL_FEATURES, "BM": LABEL_BLOCK, "num_warps": 2,
    }  # fmt: skip
    numbers = (*row_strides(k), n, h, tiles)
    launch_kernel(kernels.largest_products, (b * h * tiles,), (k, directions, labels), numbers, constants)
    return labels


def key_factors(k: Tensor) -> Tensor:
    """Return 1 / |k| (b g n) of keys (b g n d), in float32; a vector shorter than SHORTEST counts as that long."""
    from regard.ops.bucket import bucket_row_kernels as kernels

    b, g, n, d = k.shape
    short = torch.empty(b, g, n, dtype=torch.float32, device=k.device)
    tiles = ceil_div(n, NORM_BLOCK)
    constants = {"D": d, "BD": block_of(d, k.device), "BM": NORM_BLOCK}
    launch_kernel(kernels.inverse_norms, (b * g * tiles,), (k, short), (*row_strides(k), n, g, tiles, SHORTEST), constants)
    return short
