"""A filter that slides over tokens, with weights of its own for each channel: kernels that take tokens as they lie, (b n w).

PyTorch's convolution takes (b w n): tokens would be copied into that order and back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.ops.joined_linear import sum_program_parts
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import DTYPES, has_triton
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

MOST_TAPS = 32
SLIDE_TILE = {"BT": 16, "BC": 128, "num_warps": 4}
SUM_TILE_COLUMNS, SUM_TILE_ROWS, SUM_WARPS = 64, 128, 8  # rows: pairs of a token and a tap
TOKENS_SUMMED = 256  # of a program


def takes_depthwise(x: Tensor, taps: int) -> bool:
    """Return whether the kernels take tokens x (b m w) and a filter of so many taps."""
    if not x.is_cuda or not has_triton() or needs_plain_ops():
        return False
    return x.dtype in DTYPES and taps <= MOST_TAPS and (torch.compiler.is_compiling() or x.numel() > 0)  # sizes may be symbols


def slide_depthwise(x: Tensor, weights: Tensor, n: int, before: int, step: int) -> Tensor:
    """Return y_i = sum_t weights_ct x_(i - before + t step) for i < n, (b n w), of tokens x (b m w) that are zero outside of it.

    weights: (w taps).
    """
    if torch.compiler.is_compiling():
        from regard.ops.depthwise_compiled import slide_operator

        return slide_operator(x, weights, n, before, step)
    return _Depthwise.apply(x.contiguous(), weights.contiguous(), n, before, step)


def slide_depthwise_plain(x: Tensor, weights: Tensor, n: int, before: int, step: int) -> Tensor:
    """Compute `slide_depthwise` by differentiable operations: the definition."""
    behind = n + step * (weights.shape[1] - 1) - before - x.shape[1]
    line = F.pad(x, (0, 0, before, behind))
    return F.conv1d(line.mT, weights[:, None].to(x.dtype), dilation=step, groups=x.shape[2]).mT


def slide(x: Tensor, weights: Tensor, n: int, before: int, step: int, mirrored: bool = False) -> Tensor:
    """Launch the kernel of `slide_depthwise` on adjacent numbers; mirrored: with the last tap first."""
    from regard.ops.depthwise_kernels import slide_filter

    b, m, w = x.shape
    out = x.new_empty(b, n, w)
    grid = (ceil_div(n, SLIDE_TILE["BT"]), ceil_div(w, SLIDE_TILE["BC"]), b)
    constants = {"TAPS": weights.shape[1], "MIRRORED": mirrored, **SLIDE_TILE}
    launch_kernel(slide_filter, grid, (x, weights, out), (m, n, w, before, step), constants)
    return out


def filter_gradient(x: Tensor, grad: Tensor, weights: Tensor, before: int, step: int) -> Tensor:
    """Return the gradient (w taps) of the filter: sums over chunks of tokens, and sums of those."""
    from regard.ops.depthwise_kernels import filter_sums

    (b, m, w), n, taps = x.shape, grad.shape[1], weights.shape[1]
    chunks = ceil_div(n, TOKENS_SUMMED)
    parts = x.new_empty(b * chunks, w * taps, dtype=torch.float32)
    padded = 1 << (taps - 1).bit_length()
    constants = {"TAPS": taps, "BK": padded, "BT": SUM_TILE_ROWS // padded, "BC": SUM_TILE_COLUMNS, "num_warps": SUM_WARPS}
    grid = (b * chunks, ceil_div(w, SUM_TILE_COLUMNS))
    launch_kernel(filter_sums, grid, (x, grad, parts), (m, n, w, before, step, TOKENS_SUMMED, chunks), constants)
    return sum_program_parts(parts, weights.dtype).view(w, taps)


class _Depthwise(torch.autograd.Function):
    """The filter for autograd. The gradient of tokens slides back over those of the outputs, with the last tap first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, n: int, before: int, step: int) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.sizes = n, before, step
        return slide(x, weights, n, before, step)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        _, before, step = ctx.sizes
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            found = differentiable_grads(lambda *y: (slide_depthwise_plain(*y, *ctx.sizes),), (x, weights), (grad,))
            return *found, None, None, None
        grad = grad.contiguous()
        need_x, need_weights = ctx.needs_input_grad[:2]
        ahead = step * (weights.shape[1] - 1) - before
        dx = slide(grad, weights, x.shape[1], ahead, step, mirrored=True) if need_x else None
        dw = filter_gradient(x, grad, weights, before, step) if need_weights else None
        return dx, dw, None, None, None
