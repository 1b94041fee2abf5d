"""Queries and keys of the delta rule: vectors of length 1, of silu(x) or of x itself, in one pass over memory on CUDA devices.

    y = s / max(|s|, eps),   s = silu(x) or x

Norms are float32 or better; y has the type of x. Elsewhere, and under transforms and compilers, plain operations do the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import block_of, kernel_config, triton_cannot_run
from regard.transforms import differentiable_grads, needs_plain_ops

SHORTEST_NORM = 1e-6  # vectors below this length are divided by it
WIDEST_VECTOR = 1024


def unit_features(x: Tensor, *, silu: bool, fused: bool) -> Tensor:
    """Return x (b h n d), after silu or not, scaled to length 1; fused: by a kernel where that is possible."""
    plain = not fused or torch.compiler.is_compiling() or needs_plain_ops() or x.numel() == 0
    if plain or x.shape[-1] > WIDEST_VECTOR or triton_cannot_run(x) is not None:
        return plain_unit_features(x, silu)
    return _UnitFunction.apply(x, silu)


def plain_unit_features(x: Tensor, silu: bool) -> Tensor:
    """Compute the same in differentiable operations."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if silu:
        wide = F.silu(wide)
    return F.normalize(wide, dim=-1, eps=SHORTEST_NORM).to(x.dtype)


class _UnitFunction(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, silu: bool) -> Tensor:
        from regard.ops.delta.unit_kernels import unit_forward

        x = x if x.stride(-1) == 1 else x.contiguous()
        ctx.save_for_backward(x)
        ctx.silu = silu
        y = torch.empty_like(x)
        _launch(unit_forward, x, (x, y), silu)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        from regard.ops.delta.unit_kernels import unit_backward

        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient will be differentiated once more
            return differentiable_grads(lambda x: (plain_unit_features(x, ctx.silu),), (x,), (grad,))[0], None
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        dx = torch.empty_like(x)
        _launch(unit_backward, x, (x, grad, dx), ctx.silu)
        return dx, None


def _launch(kernel: Any, x: Tensor, tensors: tuple[Tensor, ...], silu: bool) -> None:
    """Launch a kernel over blocks of tokens of every head."""
    b, h, n, d = x.shape
    config = dict(kernel_config("unit_features", "any", x.device))
    strides = [stride for y in tensors for stride in y.stride()[:3]]
    grid = (-(-n // config["BN"]), b * h)
    constants = {"D": d, "BD": block_of(d, x.device), "SILU": silu, **config}
    launch_kernel(kernel, grid, tensors, (*strides, n, h, SHORTEST_NORM), constants)
