"""Gathering the rows of cluster members, and summing them back, as operators of torch.library, for torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token
from regard.ops.bucket.members import Members, gathered_rows, sum_members


@torch.library.custom_op("regard::gather_members", mutates_args=())
def gather_operator(x: Tensor, index: Tensor, real: Tensor | None, n: int, mean: bool) -> Tensor:
    """Gather rows (x c w d) of x (b h n d); mean: divided by the number of clusters that took the token."""
    return gathered_rows(x, Members(index, real, n), mean)


@gather_operator.register_fake
def fake_gather_members(x, index, real, n, mean):  # noqa: ARG001
    return x.new_empty(*index.shape, x.shape[-1])


@torch.library.custom_op("regard::sum_members", mutates_args=())
def sum_operator(x: Tensor, index: Tensor, real: Tensor | None, n: int, heads: int, mean: bool) -> Tensor:
    """Sum, or mean, over the clusters of a token, of x (b*h c w e): (b h n e)."""
    return sum_members(x, Members(index, real, n), heads, mean)


@sum_operator.register_fake
def fake_sum_members(x, index, real, n, heads, mean):  # noqa: ARG001
    return by_token(x, x.shape[0] // heads, n, heads, x.shape[-1])


def _keep_gathered(ctx: Any, inputs: tuple, output: Tensor) -> None:  # noqa: ARG001
    x, index, real, *rest = inputs
    ctx.save_for_backward(index, real)
    ctx.rest, ctx.heads = rest, x.shape[1]


def _gathered_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    n, mean = ctx.rest
    return sum_operator(grad, *ctx.saved_tensors, n, ctx.heads, mean), None, None, None, None


def _keep_summed(ctx: Any, inputs: tuple, output: Tensor) -> None:  # noqa: ARG001
    _, index, real, *rest = inputs
    ctx.save_for_backward(index, real)
    ctx.rest = rest


def _summed_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    n, _, mean = ctx.rest
    return gather_operator(grad, *ctx.saved_tensors, n, mean), None, None, None, None, None


gather_operator.register_autograd(_gathered_gradients, setup_context=_keep_gathered)
sum_operator.register_autograd(_summed_gradients, setup_context=_keep_summed)
