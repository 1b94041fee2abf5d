"""Rows of the tokens that clusters took: gathered for attention inside of clusters, and averaged back to the tokens.

A token may be in several clusters or in none. Gathering and summing are each other's gradients. Sums run over the clusters of a
token in the order of clusters, so that results are equal in every call.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.backend import _BACKENDS, AUTO, choose_backend
from regard.ops.bucket.bucket_launch import by_token, dense_rows
from regard.ops.bucket.bucket_op import LabelCall
from regard.ops.kernel_launch import launch_kernel
from regard.ops.tile.call import accumulator
from regard.ops.triton_support import block_of, interpreting
from regard.patterns.tiles import ceil_div
from regard.transforms import needs_plain_ops

MEMBER_BLOCK = 32  # rows of a program
SUMMED_TOKENS, SUMMED_CLUSTERS = 64, 16  # tokens of a program that sums, and clusters whose places it loads at a time


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
    def marked(self) -> Tensor | None:
        """Which members are real as bytes without gaps, or None."""
        return None if self.real is None else self.real.contiguous().view(torch.uint8)

    @cached_property
    def taken(self) -> Tensor:
        """The index in int32, without gaps."""
        return self.index.int().contiguous()


def gather_members(x: Tensor, members: Members, backend: str = AUTO) -> Tensor:
    """Return the rows of x (b h n d) that clusters took, (b*h c w d); any rows for members that are not real."""
    if by_kernels(x, backend):
        return _GatherMembers.apply(x, members, False)
    if by_operators(x, backend):
        from regard.ops.bucket.members_compiled import gather_operator

        return gather_operator(x, members.index, members.real, members.n, False)
    rows = x.flatten(0, 2).index_select(0, members.flat)
    return rows.unflatten(0, members.index.shape)


def gather_three(q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members, backend: str = AUTO) -> tuple[Tensor, ...]:
    """Return `gather_members` of q by queries, and of k and v (b h n .) by keys; in one launch where shapes agree."""
    alike = q.shape == k.shape and queries.index.shape == keys.index.shape and (queries.real is None) == (keys.real is None)
    if alike and q.dtype == k.dtype == v.dtype and by_kernels(q, backend):
        return _GatherThree.apply(q, k, v, queries, keys)
    return tuple(gather_members(x, own, backend) for x, own in ((q, queries), (k, keys), (v, keys)))


def mean_of_members(x: Tensor, members: Members, heads: int, backend: str = AUTO) -> Tensor:
    """Return the mean over the clusters that took a token, of x (b*h c w e): (b h n e); 0 where none did."""
    if by_kernels(x, backend):
        return _SumMembers.apply(x, members, heads, True)
    if by_operators(x, backend):
        from regard.ops.bucket.members_compiled import sum_operator

        return sum_operator(x, members.index, members.real, members.n, heads, True)
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
    runs = x.is_cuda or interpreting()
    return _kept_choice((x.dtype, x.shape[-1], x.get_device(), runs, backend, tuple(_BACKENDS["bucket"].values())), x) == "triton"


def by_operators(x: Tensor, backend: str) -> bool:
    """Return whether operators of the kernels do so: while torch.compile traces."""
    if needs_plain_ops() or not torch.compiler.is_compiling():
        return False
    return choose_backend("bucket", backend, LabelCall(x, x, 1, False)).name == "triton"


@signature_cache
def _kept_choice(key: tuple[Any, ...], x: Tensor) -> str:
    return choose_backend("bucket", key[4], LabelCall(x, x, 1, False)).name


class _GatherMembers(torch.autograd.Function):
    """Gather rows of x (b h n d); mean: divided by the number of clusters that took the token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Members, mean: bool) -> Tensor:
        ctx.rest = members, x.shape[1], mean
        return gathered_rows(x, members, mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        summed: Any = _SumMembers.apply if torch.is_grad_enabled() else sum_members
        return summed(grad, *ctx.rest), None, None


class _SumMembers(torch.autograd.Function):
    """Sum, or mean, over the clusters of a token, of x (b*h c w e)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Members, heads: int, mean: bool) -> Tensor:
        ctx.rest = members, mean
        return sum_members(x, members, heads, mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gathered: Any = _GatherMembers.apply if torch.is_grad_enabled() else gathered_rows
        return gathered(grad, *ctx.rest), None, None, None


class _GatherThree(torch.autograd.Function):
    """Gather rows of q, k and v (b h n .) at once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members) -> tuple[Tensor, ...]:
        ctx.rest = queries, keys, q.shape[1]
        return _three_gathered(q, k, v, queries, keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        summed: Any = _SumThree.apply if torch.is_grad_enabled() else sum_three
        return *summed(*grads, *ctx.rest), None, None


class _SumThree(torch.autograd.Function):
    """Sum rows of q, k and v (b*h c w .) over the clusters of a token, at once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members, heads: int) -> tuple[Tensor, ...]:
        ctx.rest = queries, keys
        return sum_three(q, k, v, queries, keys, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered: Any = _GatherThree.apply if torch.is_grad_enabled() else _three_gathered
        return *gathered(*grads, *ctx.rest), None, None, None


def _three_gathered(q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members) -> tuple[Tensor, ...]:
    from regard.ops.bucket import bucket_row_kernels as kernels

    given = [dense_rows(x) for x in (q, k, v)]
    rows, c, w = queries.index.shape
    found = tuple([x.new_empty(rows, c, w, x.shape[-1]) for x in given])
    tiles = ceil_div(c * w, MEMBER_BLOCK)
    tensors = (*given, queries.taken, keys.taken, queries.marked, keys.marked, *found)
    numbers = (*_strides(*given), queries.n, c * w, w, q.shape[1], tiles)
    constants = {"MASKED": queries.real is not None, "BM": MEMBER_BLOCK, **_widths(q, v)}
    launch_kernel(kernels.gather_triples, (rows * tiles, 3), tensors, numbers, constants)
    return found


def sum_three(q: Tensor, k: Tensor, v: Tensor, queries: Members, keys: Members, heads: int) -> tuple[Tensor, ...]:
    from regard.ops.bucket import bucket_row_kernels as kernels

    given = [x.contiguous() for x in (q, k, v)]
    rows, c, w, _ = q.shape
    found = tuple([by_token(x, rows // heads, queries.n, heads, x.shape[-1]) for x in given])
    tiles = ceil_div(queries.n, SUMMED_TOKENS)
    tensors = (*given, queries.where, keys.where, *found)
    numbers = (*_strides(*found), queries.n, w, c, heads, tiles)
    constants = {"BM": SUMMED_TOKENS, "BC": SUMMED_CLUSTERS, **_widths(q, v)}
    launch_kernel(kernels.sum_triples, (rows * tiles, 3), tensors, numbers, constants)
    return found


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple([x.stride()[:3] for x in tensors])


def _widths(q: Tensor, v: Tensor) -> dict[str, int]:
    d, e = q.shape[-1], v.shape[-1]
    return {"D": d, "E": e, "BD": block_of(d, q.device), "BE": block_of(e, q.device)}


def gathered_rows(x: Tensor, members: Members, mean: bool) -> Tensor:
    """Launch the kernel of `gather_members`; mean: divided by the number of clusters that took the token."""
    from regard.ops.bucket import bucket_row_kernels as kernels

    x = dense_rows(x)
    h, d, (rows, c, w) = x.shape[1], x.shape[-1], members.index.shape
    y = x.new_empty(rows, c, w, d)
    tiles = ceil_div(c * w, MEMBER_BLOCK)
    numbers = (x.stride()[:3], members.n, c * w, w, h, tiles)
    constants = {"MASKED": members.real is not None, "MEAN": mean, "BM": MEMBER_BLOCK, "E": d, "BE": block_of(d, x.device)}
    tensors = (x, members.taken, members.marked, members.times if mean else None, y)
    launch_kernel(kernels.gather_rows, (rows * tiles,), tensors, numbers, constants)
    return y


def sum_members(x: Tensor, members: Members, heads: int, mean: bool) -> Tensor:
    from regard.ops.bucket import bucket_row_kernels as kernels

    x, (rows, c, w, e) = x.contiguous(), x.shape
    out = by_token(x, rows // heads, members.n, heads, e)
    times = torch.empty(rows, members.n, dtype=torch.int32, device=x.device) if mean else None
    tiles = ceil_div(members.n, SUMMED_TOKENS)
    numbers = (out.stride()[:3], members.n, w, c, heads, tiles)
    constants = {"MEAN": mean, "BM": SUMMED_TOKENS, "BC": SUMMED_CLUSTERS, "E": e, "BE": block_of(e, x.device)}
    launch_kernel(kernels.sum_rows, (rows * tiles,), (x, members.where, times, out), numbers, constants)
    if times is not None:
        members.times = times  # what the gradient of the mean divides by
    return out
