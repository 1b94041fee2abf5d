"""The sum of tokens and of what a part of a block adds to them, and the norm of that sum: one launch each way on a GPU.

Under autocast the norm is written in the type of the products that read it, and the gradient of the sum in the types of both of
its terms, so that nothing is converted apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from regard.ops.joined_linear import sum_program_parts
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import DTYPES, HALVES, has_triton
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

WIDEST_ROW = 8192  # elements that a program holds
FEWEST_ROWS = 512  # with fewer, the launches are all that counts
NORM_TILE = 4096  # elements of a tile of whole rows
WARPS = 8
GRADIENT_PROGRAMS = 264  # two for each multiprocessor of a Hopper card; fixed, so that sums are the same on every card


def add_norm(x: Tensor, added: Tensor | None, norm: nn.Module, half: bool = False) -> tuple[Tensor, Tensor]:
    """Return total = x + added and norm(total), all (b n w); x itself without `added`.

    half: what reads the norm is a linear map, so under autocast the norm may be of the type of its products.
    """
    if takes_add_norm(x, added, norm):
        return fused_add_norm(x, added, norm, norm_dtype(x, half))
    total = x if added is None else x + added
    return total, norm(total)


def takes_add_norm(x: Tensor, added: Tensor | None, norm: Any) -> bool:
    """Return whether the kernels take a sum and its norm, a LayerNorm or an RMSNorm with weights."""
    if not x.is_cuda or torch.compiler.is_compiling() or not has_triton() or needs_plain_ops():
        return False
    if type(norm) not in (nn.LayerNorm, nn.RMSNorm) or norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks:
        return False
    if norm.weight is None or norm.eps is None or norm.normalized_shape != x.shape[-1:] or x.shape[-1] > WIDEST_ROW:
        return False
    if added is not None and (added.shape != x.shape or torch.promote_types(x.dtype, added.dtype) != x.dtype):
        return False
    return x.dtype in DTYPES and norm.weight.dtype in DTYPES and x.numel() >= FEWEST_ROWS * x.shape[-1]


def norm_dtype(x: Tensor, half: bool) -> torch.dtype:
    """Return the type of a norm of x: with autocast float32, as in PyTorch, or if `half`, that of products."""
    kind = "cuda" if x.is_cuda else x.device.type
    if not torch.is_autocast_enabled(kind):
        return x.dtype
    dtype = torch.get_autocast_dtype(kind)
    return dtype if half and dtype in HALVES else torch.float32


def fused_add_norm(x: Tensor, added: Tensor | None, norm: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute `add_norm` by the kernels, the norm in a type."""
    given = x.contiguous(), None if added is None else added.contiguous(), norm.weight, getattr(norm, "bias", None)
    return _AddNorm.apply(*given, norm.eps, type(norm) is nn.LayerNorm, dtype)


def _plain_norm(total: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype) -> Tensor:
    """Compute the norm by differentiable operations: the definition."""
    weight = weight.to(total.dtype)
    if not centred:
        return rms_norm(total, weight.shape, weight, eps).to(dtype)
    return layer_norm(total, weight.shape, weight, None if bias is None else bias.to(total.dtype), eps).to(dtype)


def _tile(width: int) -> dict[str, int]:
    """Return the constants of a kernel: whole rows, as many as make up a tile."""
    columns = 1 << (width - 1).bit_length()
    return {"BR": max(1, NORM_TILE // columns), "BW": columns, "num_warps": WARPS}


class _AddNorm(torch.autograd.Function):
    """The sum and its norm for autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, *kinds: Any
    ) -> tuple[Tensor, Tensor]:
        from regard.ops.add_norm_kernels import norm_forward

        eps, centred, dtype = ctx.kinds = kinds
        ctx.set_materialize_grads(False)
        width, tile = x.shape[-1], _tile(x.shape[-1])
        rows = x.numel() // width
        total = x.view_as(x) if added is None else torch.empty_like(x)
        out = torch.empty_like(x, dtype=dtype)
        mean, scale = x.new_empty(2, rows, dtype=torch.float32).unbind()
        flags = {"ADD": added is not None, "CENTRED": centred, "BIASED": bias is not None}
        tensors = x, added, weight, bias, total, out, mean, scale
        launch_kernel(norm_forward, (ceil_div(rows, tile["BR"]),), tensors, (rows, width, eps), flags | tile)
        ctx.save_for_backward(x if added is None else total, weight, bias, mean, scale)
        ctx.added_type = None if added is None else added.dtype
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, bias, *_ = ctx.saved_tensors
        found: tuple[Tensor | None, ...] = grad_total, None, None, None
        if grad is not None and torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            given = total, weight, bias
            dx, *others = differentiable_grads(lambda *x: (_plain_norm(*x, *ctx.kinds),), given, (grad,))
            found = dx if grad_total is None or dx is None else dx + grad_total, None, *others
        elif grad is not None:
            found = _norm_gradients(ctx, grad, grad_total)
        dx, dadded, *others = found
        if ctx.added_type is not None and dx is not None and dadded is None:
            dadded = dx.to(ctx.added_type)
        return dx, dadded, *others, None, None, None


def _norm_gradients(ctx: Any, grad: Tensor, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, of what is added in a type of its own, of the weight and of the bias, by the kernel."""
    from regard.ops.add_norm_kernels import norm_backward

    total, weight, bias, mean, scale = ctx.saved_tensors
    width, tile = total.shape[-1], _tile(total.shape[-1])
    rows = total.numel() // width
    tiles = ceil_div(rows, tile["BR"])
    programs = min(tiles, GRADIENT_PROGRAMS)
    dx = torch.empty_like(total)
    apart = ctx.added_type not in (None, total.dtype)
    dadded = torch.empty_like(total, dtype=ctx.added_type) if apart else None
    parts = total.new_empty(programs, 2 * width, dtype=torch.float32)
    passed = None if grad_total is None else grad_total.contiguous()
    tensors = total, grad.contiguous(), passed, weight, mean, scale, dx, dadded, parts
    flags = {"PASSED": passed is not None, "APART": apart, "CENTRED": ctx.kinds[1]}
    launch_kernel(norm_backward, (programs,), tensors, (rows, width, tiles), flags | tile)
    by_weight, by_bias = sum_program_parts(parts).view(2, width)
    return dx, dadded, by_weight.to(weight.dtype), None if bias is None else by_bias.to(bias.dtype)
