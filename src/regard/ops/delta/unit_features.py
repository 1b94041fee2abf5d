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
    if not fused or _needs_plain(x, x.shape[-1]):
        return plain_unit_features(x, silu)
    return _UnitFunction.apply(x, silu)


def unit_keys(x: Tensor, width: int, *, silu: bool, fused: bool) -> tuple[Tensor, Tensor]:
    """Return the first columns of x (b g n d) as unit features, and the others, gates, as they are; gradients are one tensor."""
    if not fused or _needs_plain(x, width):
        return plain_unit_features(x[..., :width], silu), x[..., width:]
    return _UnitKeys.apply(x, width, silu)


def _needs_plain(x: Tensor, width: int) -> bool:
    """Return whether the kernels cannot take vectors of this width, or must not be used now."""
    if torch.compiler.is_compiling() or needs_plain_ops() or x.numel() == 0:
        return True
    return width > WIDEST_VECTOR or triton_cannot_run(x) is not None


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


class _UnitKeys(torch.autograd.Function):
    """The same for keys with gates behind them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, silu: bool) -> tuple[Tensor, Tensor]:
        from regard.ops.delta.unit_kernels import unit_forward

        x = x if x.stride(-1) == 1 else x.contiguous()
        ctx.save_for_backward(x)
        ctx.width, ctx.silu = width, silu
        keys = x[..., :width]
        y = torch.empty_like(keys)
        _launch(unit_forward, keys, (keys, y), silu)
        return y, x[..., width:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, d_gates: Tensor) -> tuple[Tensor | None, None, None]:
        from regard.ops.delta.unit_kernels import unit_backward

        (x,) = ctx.saved_tensors
        width = ctx.width
        if torch.is_grad_enabled():  # create_graph=True: the gradient will be differentiated once more

            def plain(x: Tensor) -> tuple[Tensor, Tensor]:
                return plain_unit_features(x[..., :width], ctx.silu), x[..., width:]

            return differentiable_grads(plain, (x,), (grad, d_gates))[0], None, None
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        dx = torch.empty_like(x)
        keys = x[..., :width]
        _launch(unit_backward, keys, (keys, grad, dx[..., :width]), ctx.silu)
        dx[..., width:] = d_gates
        return dx, None, None


def _launch(kernel: Any, x: Tensor, tensors: tuple[Tensor, ...], silu: bool) -> None:
    """Launch a kernel over blocks of tokens of every head."""
    b, h, n, d = x.shape
    config = dict(kernel_config("unit_features", "any", x.device))
    strides = [stride for y in tensors for stride in y.stride()[:3]]
    grid = (-(-n // config["BN"]), b * h)
    constants = {"D": d, "BD": block_of(d, x.device), "SILU": silu, **config}
    launch_kernel(kernel, grid, tensors, (*strides, n, h, SHORTEST_NORM), constants)
