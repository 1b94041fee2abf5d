"""A feed-forward layer as one node for autograd, in half precision on CUDA devices.

A ReLU is part of the first product. The gradient of an activation overwrites that of its result, and the same pass over it sums
the gradient of the bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.ops.joined_linear import product_dtype, sum_columns, sum_program_parts
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import DTYPES, HALVES, has_triton
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

FEWEST_TOKENS = 512  # with fewer, the launches are all that counts
ROWS_SUMMED = 256  # of a program
GRADIENT_TILE = {"BR": 32, "BC": 128}
KERNEL_ACTIVATIONS = "relu", "gelu", "gelu_tanh", "silu"


def takes_feed_forward(x: Tensor, up: nn.Module, down: nn.Module, activation: str) -> bool:
    """Return whether `fused_feed_forward` takes tokens x and two linear maps with biases: in training, in half precision."""
    if not x.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled() or not has_triton() or needs_plain_ops():
        return False
    if activation not in KERNEL_ACTIVATIONS or x.numel() < FEWEST_TOKENS * x.shape[-1]:
        return False
    dtype = product_dtype(x)
    if dtype not in HALVES or x.dtype not in DTYPES:
        return False
    kinds = DTYPES if torch.is_autocast_enabled(x.device.type) else (dtype,)
    return all(one.bias is not None and one.weight.dtype in kinds for one in (up, down))


def fused_feed_forward(x: Tensor, up: Any, down: Any, activation: str) -> Tensor:
    """Return down(activation(up(x))) of tokens x (... w), in the type of products."""
    return _FeedForward.apply(x.to(product_dtype(x)), up.weight, up.bias, down.weight, down.bias, activation)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, activation: str) -> Tensor:
    """Compute the layer by differentiable operations: the definition."""
    hidden = _activated(F.linear(x, up.to(x.dtype), up_bias.to(x.dtype)), activation)
    return F.linear(hidden, down.to(x.dtype), down_bias.to(x.dtype))


def activation_gradient(grad: Tensor, kept: Tensor, activation: str) -> Tensor:
    """Overwrite the gradient (t f) of activation(z) by that of z, and return the sums of its columns (f), in float32.

    kept: z, or the result where the activation is a ReLU. Both are contiguous.
    """
    from regard.ops.activation_kernels import activation_gradients

    rows, columns = grad.shape
    programs = ceil_div(rows, ROWS_SUMMED)
    parts = grad.new_empty(programs, columns, dtype=torch.float32)
    grid = (ceil_div(columns, GRADIENT_TILE["BC"]), programs)
    constants = {"ACTIVATION": activation, **GRADIENT_TILE}
    launch_kernel(activation_gradients, grid, (grad, kept, parts), (rows, columns, ROWS_SUMMED), constants)
    return sum_program_parts(parts)


class _FeedForward(torch.autograd.Function):
    """The layer for autograd. Kept are the tokens, the result of the activation and, unless it is a ReLU, its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, activation: str) -> Tensor:
        flat, (w1, b1, w2, b2) = x.reshape(-1, x.shape[-1]), (y.to(x.dtype) for y in (up, up_bias, down, down_bias))
        if activation == "relu":
            kept = hidden = torch._addmm_activation(b1, flat, w1.mT)
        else:
            kept = torch.addmm(b1, flat, w1.mT)
            hidden = _activated(kept, activation)
        ctx.save_for_backward(x, up, up_bias, down, down_bias, w1, w2, kept, None if hidden is kept else hidden)
        ctx.activation = activation
        return torch.addmm(b2, hidden, w2.mT).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, w1, w2, kept, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            found = differentiable_grads(lambda x, a, b, c, d: (_plain(x, a, b, c, d, ctx.activation),), given, (grad,))
            return *found, None
        x, up, up_bias, down, down_bias = given
        flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1]).contiguous()
        d_down = (grad.mT @ (kept if hidden is None else hidden)).to(down.dtype)
        inner = grad @ w2
        d_up_bias = activation_gradient(inner, kept, ctx.activation).to(up_bias.dtype)
        d_up = (inner.mT @ flat).to(up.dtype)
        dx = (inner @ w1).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, d_up, d_up_bias, d_down, sum_columns(grad, down_bias.dtype), None
