"""Linear maps of the same tokens as one product, with one node for autograd, on CUDA devices, under autocast too.

The gradients of the maps are one matrix: where a kernel wrote them side by side into one buffer (`gradient_buffers`) it is taken
as it lies. Gradients of biases are sums of its columns, in two launches that read it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.ops.bucket.bucket_launch import like_by_token
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import DTYPES, FURTHEST, HALVES, has_triton
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

SUMMED_ROWS = 512  # of a program
SUM_TILE = {"BR": 32, "BC": 128}
PART_TILE = {"BR": 64, "BC": 16}  # of few rows: more programs


def takes_joined(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether `joined_linear` takes tokens x (b n w) and weights: in half precision, and in training."""
    if not x.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled() or not has_triton() or needs_plain_ops():
        return False
    cast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if cast else x.dtype
    if dtype not in HALVES:
        return False
    kinds = DTYPES if cast else (dtype,)
    return x.dtype in kinds and all([y.dtype in kinds for y in weights])


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type of a product of tokens x and weights: their own, or that of autocast, which leaves float64 as it is."""
    kind = "cuda" if x.is_cuda else x.device.type
    if x.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def joined_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], head: int) -> tuple[Tensor, ...]:
    """Return what maps (heads_i * head, w) make of tokens x (b n w), by heads: (b n heads_i head) each.

    biases: as many as weights, or none. Under autocast the product is of its type, whatever that of x and of the weights.
    """
    return _JoinedLinear.apply(x.to(product_dtype(x)), head, len(weights), *weights, *biases)


def token_linear(one: nn.Module, x: Tensor) -> Tensor:
    """Return what a linear map makes of tokens x (b n w), (b n v)."""
    if type(one) is not nn.Linear or one._forward_hooks or one._forward_pre_hooks or one._backward_hooks:
        return one(x)
    return linear_tokens(x, one.weight, one.bias)


def linear_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear map of tokens x (b n w), (b n v), as one node for autograd where `takes_joined`."""
    if x.dim() != 3 or not takes_joined(x, (weight,)):
        return linear(x, weight, bias)
    return joined_linear(x, (weight,), () if bias is None else (bias,), len(weight))[0].squeeze(2)


def gradient_buffers(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for the gradients of q (b h n d), k (b g m d) and v (b g m e), laid out as (b n heads d).

    In one buffer, side by side, where q, k and v can be projections of the same tokens by `joined_linear`, and kernels reach all
    of a sequence there.
    """
    tensors = q, k, v
    heads = [x.shape[1] for x in tensors]
    far = q.shape[2] * sum(heads) * q.shape[3] >= FURTHEST
    if far or q.shape[2] != k.shape[2] or q.shape[3] != v.shape[3]:
        dq, dk, dv = (like_by_token(x) for x in tensors)
        return dq, dk, dv
    buffer = q.new_empty(q.shape[0], q.shape[2], sum(heads), q.shape[3])
    dq, dk, dv = buffer.transpose(1, 2).split_with_sizes(heads, 1)
    return dq, dk, dv


def _plain(x: Tensor, maps: Sequence[Tensor], count: int, head: int) -> tuple[Tensor, ...]:
    """Compute `joined_linear` by differentiable operations: the definition."""
    biases: Sequence[Tensor | None] = maps[count:] or [None] * count
    pairs = zip(maps[:count], biases, strict=True)
    alike = [(weight.to(x.dtype), None if bias is None else bias.to(x.dtype)) for weight, bias in pairs]
    return tuple(linear(x, weight, bias).unflatten(-1, (-1, head)) for weight, bias in alike)


def _joined(grads: Sequence[Tensor]) -> Tensor:
    """Return tensors (b n heads_i d) as one (b n heads d): without a copy where they are side by side already."""
    first = grads[0]
    b, n, _, d = first.shape
    heads = sum(x.shape[2] for x in grads)
    strides = (n * heads * d, heads * d, d, 1)
    storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
    if len(grads) == 1:
        return first.contiguous()
    for x in grads:
        if x.stride() != strides or x.storage_offset() != at or x.untyped_storage().data_ptr() != storage:
            return torch.cat(list(grads), 2)
        at += x.shape[2] * d
    return first.as_strided((b, n, heads, d), strides)


def sum_columns(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sums of the columns of a contiguous matrix (rows columns), in its type or another.

    They are added in float32, in a fixed order.
    """
    from regard.ops.column_sums_kernels import column_sums

    rows, columns = x.shape
    programs = ceil_div(rows, SUMMED_ROWS)
    blocks = ceil_div(columns, SUM_TILE["BC"])
    found = x.new_empty(columns, dtype=dtype)
    if programs <= 1:
        launch_kernel(column_sums, (blocks, 1), (x, found), (rows, columns, rows), SUM_TILE)
        return found
    parts = x.new_empty(programs, columns, dtype=torch.float32)
    launch_kernel(column_sums, (blocks, programs), (x, parts), (rows, columns, SUMMED_ROWS), SUM_TILE)
    launch_kernel(column_sums, (blocks, 1), (parts, found), (programs, columns, programs), SUM_TILE)
    return found


def sum_program_parts(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sums of the columns of what programs wrote, (programs columns), in one launch."""
    from regard.ops.column_sums_kernels import column_sums

    rows, columns = parts.shape
    found = parts.new_empty(columns, dtype=dtype)
    launch_kernel(column_sums, (ceil_div(columns, PART_TILE["BC"]), 1), (parts, found), (rows, columns, rows), PART_TILE)
    return found


class _JoinedLinear(torch.autograd.Function):
    """The product for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: int, count: int, *maps: Tensor) -> tuple[Tensor, ...]:
        weight = (torch.cat(maps[:count]) if count > 1 else maps[0]).to(x.dtype)
        bias = None
        if len(maps) > count:
            bias = (torch.cat(maps[count:]) if count > 1 else maps[1]).to(x.dtype)
        ctx.save_for_backward(x, weight, *maps)
        ctx.head, ctx.count = head, count
        y = linear(x, weight, bias).unflatten(-1, (-1, head))
        return y.split_with_sizes([one.shape[0] // head for one in maps[:count]], 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *maps = ctx.saved_tensors
        count, head = ctx.count, ctx.head
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            dx, *found = differentiable_grads(lambda x, *maps: _plain(x, maps, count, head), (x, *maps), grads)
            return dx, None, None, *found
        flat = _joined(grads).reshape(-1, len(weight))
        sizes = [len(one) for one in maps[:count]]
        dx = (flat @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        found = [*(flat.mT @ x.reshape(-1, x.shape[-1])).to(maps[0].dtype).split(sizes)]
        if len(maps) > count:
            found += sum_columns(flat, maps[count].dtype).split(sizes)
        return dx, None, None, *found
