"""Blocks of queries that see two blocks of keys each, with a number added to the scores of every key: one launch on CUDA devices.

Nothing is joined or copied: the kernels read both blocks where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import DTYPES, HALVES, block_of, dot_precision, has_triton
from regard.transforms import differentiable_grads, needs_plain_ops

MOST_ELEMENTS = {True: 8192, False: 4096}  # of a block of tokens, in half precision or not: what shared memory holds of several

BlockTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, k2, v2 (b h u p .) and the bias (b h u 2p)


def takes_two_blocks(blocks: BlockTensors) -> bool:
    """Return whether the kernels compute these blocks."""
    q, _, v = blocks[:3]
    if not q.is_cuda or not has_triton() or torch.compiler.is_compiling() or needs_plain_ops():
        return False
    widest = block_of(max(q.shape[-1], v.shape[-1]), q.device)
    size = block_of(q.shape[3], q.device)
    alike = len({x.dtype for x in blocks[:5]}) == 1 and q.dtype in DTYPES
    return alike and size * widest <= MOST_ELEMENTS[q.dtype in HALVES]


def two_blocks_attention(blocks: BlockTensors, causal: bool, plain: Callable[..., Tensor]) -> Tensor:
    """Return out (b h u p e). Causal: of its own block a query sees the keys up to its place, of the other one all.

    plain: the same function of the blocks in differentiable operations, for second derivatives.
    """
    return _TwoBlocks.apply(causal, plain, *blocks)


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(x.stride()[:4] for x in tensors)


def _beside(x: Tensor) -> Tensor:
    """Return an empty tensor of the shape of x (b h u p .) with the heads of a token side by side."""
    b, h, u, p, d = x.shape
    return x.new_empty(b, u, p, h, d).permute(0, 3, 1, 2, 4)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _constants(q: Tensor, v: Tensor, causal: bool) -> dict[str, Any]:
    d, e, size = q.shape[-1], v.shape[-1], block_of(q.shape[3], q.device)
    precision = dot_precision(q.dtype)
    wide = {"D": d, "E": e, "BD": block_of(d, q.device), "BE": block_of(e, q.device)}
    small = q.dtype in HALVES and size * max(wide["BD"], wide["BE"]) <= MOST_ELEMENTS[False]
    return {"CAUSAL": causal, "BP": size, "PRECISION": precision, "num_warps": 4 if small else 8, **wide}


class _TwoBlocks(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, causal: bool, plain: Callable[..., Tensor], *blocks: Tensor) -> Tensor:
        from regard.ops import two_blocks_kernels as kernels

        q, k, v, k2, v2 = (_dense(x) for x in blocks[:5])
        bias = blocks[5].float().contiguous()
        b, h, u, p, d = q.shape
        out = _beside(q.new_empty(1).expand(b, h, u, p, v.shape[-1]))
        lse = bias.new_empty(b, h, u, p)
        numbers = (*_strides(q, k, v, k2, v2, out), h, u, p, d**-0.5)
        tensors = (q, k, v, k2, v2, bias, out, lse)
        launch_kernel(kernels.two_blocks_forward, (b * h * u,), tensors, numbers, _constants(q, v, causal))
        ctx.save_for_backward(q, k, v, k2, v2, bias, out, lse)
        ctx.causal, ctx.plain, ctx.kind = causal, plain, blocks[5].dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops import two_blocks_kernels as kernels

        *blocks, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return None, None, *differentiable_grads(lambda *x: (ctx.plain(*x),), blocks, (grad,))
        q, k, v, k2, v2, bias = blocks
        b, h, u, p, d = q.shape
        grad = _dense(grad)
        found = [torch.empty_like(x) for x in blocks[:5]]  # laid out as they are: what adds to them reads both in one order
        d_bias = torch.empty_like(bias)
        numbers = (*_strides(q, k, v, k2, v2, out, grad, *found), h, u, p, d**-0.5)
        tensors = (*blocks, out, grad, lse, *found, d_bias)
        launch_kernel(kernels.two_blocks_backward, (b * h * u,), tensors, numbers, _constants(q, v, ctx.causal))
        return None, None, *found, d_bias.to(ctx.kind)
