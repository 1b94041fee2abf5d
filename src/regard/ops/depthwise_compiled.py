"""The kernels of a filter that slides over tokens as operators of torch.library: one graph of torch.compile for any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.depthwise import filter_gradient, slide


@torch.library.custom_op("regard::slide_depthwise", mutates_args=())
def slide_operator(x: Tensor, weights: Tensor, n: int, before: int, step: int) -> Tensor:
    """Compute `slide_depthwise`: (b n w) of tokens x (b m w) and a filter (w taps)."""
    if x.numel() == 0 or n == 0:
        return x.new_zeros(x.shape[0], n, x.shape[2])
    return slide(x.contiguous(), weights.contiguous(), n, before, step)


@slide_operator.register_fake
def fake_slide_depthwise(x, weights, n, before, step):  # noqa: ARG001
    return x.new_empty(x.shape[0], n, x.shape[2])


@torch.library.custom_op("regard::slide_depthwise_backward", mutates_args=())
def slide_operator_backward(grad: Tensor, x: Tensor, weights: Tensor, before: int, step: int) -> tuple[Tensor, Tensor]:
    """Compute the gradients of tokens and of the filter, given that of the outputs."""
    if x.numel() == 0 or grad.numel() == 0:
        return torch.zeros_like(x), torch.zeros_like(weights)
    grad, x, weights = (y.contiguous() for y in (grad, x, weights))
    ahead = step * (weights.shape[1] - 1) - before
    return slide(grad, weights, x.shape[1], ahead, step, mirrored=True), filter_gradient(x, grad, weights, before, step)


@slide_operator_backward.register_fake
def fake_slide_depthwise_backward(grad, x, weights, before, step):  # noqa: ARG001
    return grad.new_empty(x.shape), weights.new_empty(weights.shape)


def _keep_inputs(ctx: Any, inputs: tuple, output: Tensor) -> None:  # noqa: ARG001
    x, weights, _, *ctx.places = inputs
    ctx.save_for_backward(x, weights)


def _operator_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = slide_operator_backward(grad, *ctx.saved_tensors, *ctx.places)
    return dx, dw, None, None, None


slide_operator.register_autograd(_operator_gradients, setup_context=_keep_inputs)
