"""Rows of the tokens that clusters took: gathered for attention inside of clusters, and averaged back to the tokens.

A token may be in several clusters or in none. Gathering and summing are each other's gradients. Sums run over the clusters of a
token in the order of clusters, so that results are equal in every call.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.ops.backend import AUTO, choose_backend
from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.bucket.bucket_op import LabelCall
from regard.ops.kernel_launch import launch_kernel
from regard.ops.tile.call import accumulator
from regard.ops.triton_support import block_of
from regard.patterns.tiles import ceil_div
from regard.transforms import needs_plain_ops

MEMBER_BLOCK = 32  # rows of a program
CLUSTER_STEP = 8  # clusters whose rows are loaded at the same time


class Members:
    """Which tokens clusters took: index (x c w) of n tokens in each of x rows, and which of them are real, (x w) or None: all.

    where (x c n): the place of each token among those of a cluster, -1 for tokens that are not taken or not real;
    nearest (b h n): the centroid nearest to each token. Both int32, and None where they are not known yet.
    """

    def __init__(
        self, index: Tensor, real: Tensor | None, n: int, where: Tensor | None = None, nearest: Tensor | None = None
    ) -> None:
        self.index, self.real, self.n, self.nearest = index, real, n, nearest
        self._where = where
        self._flat: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.index) * self.n

    @property
    def flat(self) -> Tensor:
        """Tokens of all rows, one row behind the other, (x*c*w)."""
        if self._flat is None:  # not a cached property: torch.compile cannot trace those
            row = torch.arange(len(self.index), device=self.index.device)
            self._flat = (self.index + self.n * row[:, None, None]).flatten()
        return self._flat

    @cached_property
    def where(self) -> Tensor:
        if self._where is not None:
            return self._where
        x, c, w = self.index.shape
        place = torch.arange(w, device=self.index.device, dtype=torch.int32).expand(x, c, w)
        if self.real is not None:
            place = place.masked_fill(~self.real[:, None], -1)
        found = torch.full((x, c, self.n), -1, dtype=torch.int32, device=self.index.device)
        return found.scatter_(2, self.index.long(), place)

    @cached_property
    def times(self) -> Tensor:
        """How many clusters took each token, (x n) int32."""
        return (self.where >= 0).sum(1, dtype=torch.int32)

    @cached_property
    def taken(self) -> Tensor:
        """The index in int32, without gaps."""
        return self.index.int().contiguous()


def gather_members(x: Tensor, members: Members, backend: str = AUTO) -> Tensor:
    """Return the rows of x (b h n d) that clusters took, (b*h c w d); any rows for members that are not real."""
    if by_kernels(x, backend):
        return _GatherMembers.apply(x, members, False)
    rows = x.flatten(0, 2).index_select(0, members.flat)
    return rows.unflatten(0, members.index.shape)


def mean_of_members(x: Tensor, members: Members, heads: int, backend: str = AUTO) -> Tensor:
    """Return the mean over the clusters that took a token, of x (b*h c w e): (b h n e); 0 where none did."""
    if by_kernels(x, backend):
        return _SumMembers.apply(x, members, heads, True)
    y = x.to(accumulator(x.dtype))
    times = torch.ones_like(y[..., :1])
    if members.real is not None:
        y, times = (each.masked_fill(~members.real[:, None, :, None], 0) for each in (y, times))
    total, count = (_sum_by_row(each.flatten(0, 2), members.flat, members.rows) for each in (y, times))
    mean = total / count.clamp_min(1)
    return mean.view(-1, heads, members.n, x.shape[-1]).to(x.dtype)


def _sum_by_row(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """The sum of what goes to each row."""
    total = x.new_zeros(rows, x.shape[1])
    if x.is_cuda:  # where index_add takes the terms as they come: another order, another last digit
        return total.index_put((index,), x, accumulate=True)
    return total.index_add(0, index, x)


def by_kernels(x: Tensor, backend: str) -> bool:
    """Return whether kernels choose, gather and sum: not where operations are traced."""
    if needs_plain_ops() or torch.compiler.is_compiling():
        return False
    return choose_backend("bucket", backend, LabelCall(x, x, 1, False)).name == "triton"


class _GatherMembers(torch.autograd.Function):
    """Gather rows of x (b h n d); mean: divided by the number of clusters that took the token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Members, mean: bool) -> Tensor:
        ctx.rest = members, x.shape[1], mean
        return _gathered(x, members, mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _SumMembers.apply(grad, *ctx.rest), None, None


class _SumMembers(torch.autograd.Function):
    """Sum, or mean, over the clusters of a token, of x (b*h c w e)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Members, heads: int, mean: bool) -> Tensor:
        ctx.rest = members, mean
        return _summed(x, members, heads, mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _GatherMembers.apply(grad, *ctx.rest), None, None, None


def _gathered(x: Tensor, members: Members, mean: bool) -> Tensor:
    from regard.ops.bucket import bucket_row_kernels as kernels

    x = dense_rows(x)
    h, d, (rows, c, w) = x.shape[1], x.shape[-1], members.index.shape
    y = x.new_empty(rows, c, w, d)
    tiles = ceil_div(c * w, MEMBER_BLOCK)
    real = None if members.real is None else members.real.contiguous().view(torch.uint8)
    numbers = (*row_strides(x), members.n, c * w, w, h, tiles)
    constants = {"MASKED": real is not None, "MEAN": mean, **_row_constants(x)}
    tensors = (x, members.taken, real, members.times if mean else None, y)
    launch_kernel(kernels.gather_rows, (rows * tiles,), tensors, numbers, constants)
    return y


def _summed(x: Tensor, members: Members, heads: int, mean: bool) -> Tensor:
    from regard.ops.bucket import bucket_row_kernels as kernels

    x, (rows, c, w, e) = x.contiguous(), x.shape
    out = by_token(x, rows // heads, members.n, heads, e)
    tiles = ceil_div(members.n, MEMBER_BLOCK)
    numbers = (*row_strides(out), members.n, w, c, heads, tiles)
    constants = {"MEAN": mean, "STEP": CLUSTER_STEP, **_row_constants(x)}
    launch_kernel(kernels.sum_rows, (rows * tiles,), (x, members.where, out), numbers, constants)
    return out


def _row_constants(x: Tensor) -> dict[str, Any]:
    e = x.shape[-1]
    return {"E": e, "BE": block_of(e, x.device), "BM": MEMBER_BLOCK, "num_warps": 4}
