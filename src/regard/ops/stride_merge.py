"""Queries of compressed attention by strides, and the merge of what they get from near tokens and far strides: one launch each.

The queries of a stride see the same far strides, so a place in the stride is a head of its own there: `rate` times as many heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import block_of
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads

MERGE_TILE = 64  # queries of a program


class StrideSplit(NamedTuple):
    """Which queries see far strides: those from `first` on, as `slots` strides of `rate`, the last perhaps not full."""

    first: int
    slots: int
    rate: int


def divide_strides(q: Tensor, split: StrideSplit) -> tuple[Tensor, Tensor]:
    """Return queries (b h n d) as they are, and those from `first` on as (b h*rate slots d), zeros behind the last."""
    return _DivideStrides.apply(q, split)


def divide_strides_plain(q: Tensor, split: StrideSplit) -> tuple[Tensor, Tensor]:
    """Compute `divide_strides` by differentiable operations: the definition."""
    first, slots, rate = split
    filled = pad(q[:, :, first:], (0, 0, 0, slots * rate + first - q.shape[2]))
    asked = filled.unflatten(2, (slots, rate)).transpose(2, 3)
    return q, asked.flatten(1, 2)


def merge_stride_answers(near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor], split: StrideSplit) -> Tensor:
    """Return attention over near tokens and far strides together, (b h n e).

    near: out (b h n e) and log-sum-exp (b h n) of all queries. far: those of queries by strides, (b h*rate slots e) and
    (b h*rate slots).
    """
    return _MergeStrides.apply(*near, *far, split)


def merge_strides_plain(near: Tensor, near_lse: Tensor, far: Tensor, far_lse: Tensor, split: StrideSplit) -> Tensor:
    """Compute `merge_stride_answers` by differentiable operations: the definition."""
    (h, n), first, rate = near.shape[1:3], split.first, split.rate
    there = slice(0, n - first)
    y, y_lse = (x.unflatten(1, (h, rate)).transpose(2, 3).flatten(2, 3)[:, :, there] for x in (far, far_lse))
    share = torch.sigmoid(y_lse - near_lse[:, :, first:]).unsqueeze(-1)
    both = near[:, :, first:] * (1 - share) + y * share
    return torch.cat([near[:, :, :first], both.to(near.dtype)], 2)


def _tile_numbers(split: StrideSplit, n: int, heads: int, queries: int) -> tuple[int, ...]:
    return n, split.first, split.slots, split.rate, heads, ceil_div(queries, MERGE_TILE)


class _DivideStrides(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, split: StrideSplit) -> tuple[Tensor, Tensor]:
        from regard.ops.stride_merge_kernels import divide_queries

        q = dense_rows(q)
        b, h, n, d = q.shape
        asked = q.new_empty(b, h * split.rate, split.slots, d)
        numbers = _tile_numbers(split, n, h, split.slots * split.rate)
        constants = {"D": d, "BD": block_of(d, q.device), "BM": MERGE_TILE}
        launch_kernel(divide_queries, (b * h * numbers[-1],), (q, asked), (*row_strides(q), *numbers), constants)
        ctx.save_for_backward(q)
        ctx.split = split
        return q.view_as(q), asked

    @staticmethod
    def backward(ctx: Any, near: Tensor, far: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops.stride_merge_kernels import join_query_gradients

        (q,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *differentiable_grads(lambda q: divide_strides_plain(q, ctx.split), (q,), (near, far)), None
        b, h, n, d = q.shape
        near, far, dq = dense_rows(near), far.contiguous(), by_token(q, b, n, h, d)
        numbers = _tile_numbers(ctx.split, n, h, n)
        constants = {"D": d, "BD": block_of(d, q.device), "BM": MERGE_TILE}
        numbers = (*row_strides(near, dq), *numbers)
        launch_kernel(join_query_gradients, (b * h * numbers[-1],), (near, far, dq), numbers, constants)
        return dq, None


class _MergeStrides(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, near: Tensor, near_lse: Tensor, far: Tensor, far_lse: Tensor, split: StrideSplit) -> Tensor:
        from regard.ops.stride_merge_kernels import merge_strides

        near, near_lse, far, far_lse = dense_rows(near), near_lse.contiguous(), far.contiguous(), far_lse.contiguous()
        b, h, n, e = near.shape
        out = by_token(near, b, n, h, e)
        numbers = (*row_strides(near, out), *_tile_numbers(split, n, h, n))
        constants = {"E": e, "BE": block_of(e, near.device), "BM": MERGE_TILE}
        launch_kernel(merge_strides, (b * h * numbers[-1],), (near, far, near_lse, far_lse, out), numbers, constants)
        ctx.save_for_backward(near, near_lse, far, far_lse)
        ctx.split = split
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops.stride_merge_kernels import merge_gradients

        near, near_lse, far, far_lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *differentiable_grads(
                lambda a, b, c, d: (merge_strides_plain(a, b, c, d, ctx.split),), ctx.saved_tensors, (grad,)
            ), None
        b, h, n, e = near.shape
        split: StrideSplit = ctx.split
        grad, dnear = dense_rows(grad), by_token(near, b, n, h, e)
        dfar, dnear_lse, dfar_lse = torch.empty_like(far), torch.empty_like(near_lse), torch.empty_like(far_lse)
        tensors = (near, far, near_lse, far_lse, grad, dnear, dfar, dnear_lse, dfar_lse)
        numbers = (*row_strides(near, grad, dnear), *_tile_numbers(split, n, h, split.first + split.slots * split.rate))
        constants = {"E": e, "BE": block_of(e, near.device), "BM": MERGE_TILE}
        launch_kernel(merge_gradients, (b * h * numbers[-1],), tensors, numbers, constants)
        return dnear, dnear_lse, dfar, dfar_lse, None
