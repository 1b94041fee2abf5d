"""Blocks of queries that see two blocks of keys each, with a number added to the scores of every key: one launch on CUDA devices.

Nothing is joined or copied: the kernels read both blocks where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.kernel_launch import launch_kernel, tensor_key
from regard.ops.mix_blocks import add_mixed, block_strides, key_and_value_products, mix_keys_and_values
from regard.ops.triton_support import DTYPES, HALVES, SMALLEST_DOT, block_of, dot_precision, has_triton, kernel_config
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

MOST_ELEMENTS = {True: 8192, False: 4096}  # of a block of tokens, in half precision or not: what shared memory holds of several

MOST_BLOCKS = 4096  # of a sequence whose blocks are mixed: a row of shares lies in the registers of a program
SHARE_ELEMENTS = 1024  # of the rows of shares of a program

BlockTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, k2, v2 (b h u p .) and the bias (b h u 2p)


def takes_two_blocks(blocks: BlockTensors) -> bool:
    """Return whether the kernels compute these blocks."""
    q, _, v = blocks[:3]
    if not q.is_cuda or not has_triton() or needs_plain_ops():
        return False
    widest = block_of(max(q.shape[-1], v.shape[-1]), q.device)
    size = block_of(q.shape[3], q.device)
    alike = len({x.dtype for x in blocks[:5]}) == 1 and q.dtype in DTYPES
    return alike and size * widest <= MOST_ELEMENTS[q.dtype in HALVES]


def two_blocks_attention(blocks: BlockTensors, causal: bool, plain: Callable[..., Tensor]) -> Tensor:
    """Return out (b h u p e). Causal: of its own block a query sees the keys up to its place, of the other one all.

    plain: the same function of the blocks in differentiable operations, for second derivatives.
    """
    if torch.compiler.is_compiling():
        from regard.ops.sinkhorn_compiled import two_blocks_operator

        return two_blocks_operator(*blocks, causal)[0]
    return _TwoBlocks.apply(causal, plain, *blocks)


def beside_heads(x: Tensor) -> Tensor:
    """Return an empty tensor of the shape of x (b h u p .) with the heads of a token side by side."""
    b, h, u, p, d = x.shape
    return x.new_empty(b, u, p, h, d).permute(0, 3, 1, 2, 4)


def dense_blocks(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def block_constants(kernel: str, q: Tensor, v: Tensor, causal: bool, mass: bool = False) -> dict[str, Any]:
    p, d = q.shape[3:]
    return _kept_constants((kernel, p, d, v.shape[-1], causal, mass, q.dtype, dot_precision(q.dtype), q.device))


@signature_cache
def _kept_constants(key: tuple) -> dict[str, Any]:
    """Return what a kernel is compiled for; the best number of warps depends on the type and the size of a block."""
    kernel, p, d, e, causal, mass, dtype, precision, device = key
    size, bd, be = (block_of(each, device) for each in (p, d, e))
    kind = "half" if dtype in HALVES else "single"
    sizes = {"CAUSAL": causal, "MASS": mass, "BP": size, "PRECISION": precision, "D": d, "E": e, "BD": bd, "BE": be}
    return {**sizes, **kernel_config(kernel, f"{kind} {size} x {max(bd, be)}", device)}


def dense_call(blocks: Sequence[Tensor]) -> BlockTensors:
    """Return the tensors of a call as the kernels read them, the bias in float32."""
    q, k, v, k2, v2 = (dense_blocks(x) for x in blocks[:5])
    return q, k, v, k2, v2, blocks[5].float().contiguous()


def launch_two_blocks(blocks: BlockTensors, causal: bool) -> tuple[Tensor, Tensor]:
    """Return out (b h u p e) and its log-sum-exp (b h u p)."""
    from regard.ops import two_blocks_kernels as kernels

    q, k, v, k2, v2, bias = blocks
    b, h, u, p, d = q.shape
    out, lse = beside_heads(v), bias.new_empty(b, h, u, p)
    numbers = (*block_strides(q, k, v, k2, v2, out), h, u, p, d**-0.5)
    constants = block_constants("two_blocks_forward", q, v, causal)
    launch_kernel(kernels.two_blocks_forward, (b * h * u,), (*blocks, out, lse), numbers, constants)
    return out, lse


def launch_two_blocks_gradients(
    blocks: BlockTensors, kept: tuple[Tensor, Tensor], grad: Tensor, causal: bool, found: Sequence[Tensor]
) -> Tensor:
    """Write the gradients of both blocks into `found`, and return that of the bias. kept: what `launch_two_blocks` returned."""
    from regard.ops import two_blocks_kernels as kernels

    q, k, v, k2, v2, bias = blocks
    b, h, u, p, d = q.shape
    grad, d_bias, (out, lse) = dense_blocks(grad), torch.empty_like(bias), kept
    numbers = (*block_strides(q, k, v, k2, v2, out, grad, *found), h, u, p, d**-0.5)
    tensors = (*blocks, out, grad, lse, *found, d_bias)
    constants = block_constants("two_blocks_backward", q, v, causal)
    launch_kernel(kernels.two_blocks_backward, (b * h * u,), tensors, numbers, constants)
    return d_bias


class _TwoBlocks(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, causal: bool, plain: Callable[..., Tensor], *blocks: Tensor) -> Tensor:
        call = dense_call(blocks)
        out, lse = launch_two_blocks(call, causal)
        ctx.save_for_backward(*call, out, lse)
        ctx.causal, ctx.plain, ctx.kind = causal, plain, blocks[5].dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *blocks, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return None, None, *differentiable_grads(lambda *x: (ctx.plain(*x),), blocks, (grad,))
        found = [torch.empty_like(x) for x in blocks[:5]]  # laid out as they are: what adds to them reads both in one order
        d_bias = launch_two_blocks_gradients(tuple(blocks), (out, lse), grad, ctx.causal, found)
        return None, None, *found, d_bias.to(ctx.kind)


def takes_sorted_blocks(q: Tensor, k: Tensor, shares: Tensor) -> bool:
    """Return whether `sorted_blocks_attention` computes blocks that `takes_two_blocks` allows."""
    return shares.dtype == torch.float32 and shares.shape[-1] <= MOST_BLOCKS and q.shape == k.shape


def sorted_blocks_attention(
    q: Tensor, k: Tensor, v: Tensor, shares: Tensor, causal: bool, unseen: float, plain: Callable[..., Tensor]
) -> Tensor:
    """Return out (b h c p e) of blocks q, k (b h c p d), v (b h c p e): a query sees its own block and one that is mixed from the
    others by shares (b h c c) of each, divided by their sum, with the log of the sum added to scores; `unseen` where it is none.

    plain: the same function of the four tensors in differentiable operations, for second derivatives.
    """
    return _SortedBlocks.apply(causal, unseen, plain, q, k, v, shares)


def share_row_sizes(shares: Tensor) -> tuple[tuple[int], tuple[int, int, float], dict[str, int]]:
    """Return the grid, the numbers and the constants of kernels over rows of shares."""
    c = shares.shape[-1]
    count = shares.numel() // c
    columns = max(SMALLEST_DOT, 1 << (c - 1).bit_length())
    rows = max(1, SHARE_ELEMENTS // columns)
    limits = torch.finfo(shares.dtype)
    return (ceil_div(count, rows),), (count, c, limits.tiny / limits.eps), {"BR": rows, "BC": columns}


def _mixing_key(k: Tensor, v: Tensor) -> tuple:
    return *tensor_key(k), *tensor_key(v), torch.get_float32_matmul_precision(), k.get_device()


class _SortedBlocks(torch.autograd.Function):
    """The kernels and the products that mix blocks, for autograd: gradients of blocks are summed where they are made."""

    @staticmethod
    def forward(ctx: Any, causal: bool, unseen: float, plain: Callable[..., Tensor], *given: Tensor) -> Tensor:
        from regard.ops import two_blocks_kernels as kernels

        q, k, v = (dense_blocks(x) for x in given[:3])
        shares = given[3].contiguous()
        b, h, c, p, d = q.shape
        weights, mass = k.new_empty(b * h, c, c), shares.new_empty(b, h, c)
        grid, (*sizes, least), constants = share_row_sizes(shares)
        launch_kernel(kernels.share_weights, grid, (shares, weights, mass), (*sizes, least, unseen), constants)
        k2, v2 = k.new_empty(k.shape), v.new_empty(v.shape)
        mix_keys_and_values(_mixing_key(k, v), weights, k, v, k2, v2)
        out = beside_heads(q.new_empty(1).expand(b, h, c, p, v.shape[-1]))
        lse = mass.new_empty(b, h, c, p)
        numbers = (*block_strides(q, k, v, k2, v2, out), h, c, p, d**-0.5)
        tensors = (q, k, v, k2, v2, mass, out, lse)
        constants = block_constants("two_blocks_forward", q, v, causal, True)
        launch_kernel(kernels.two_blocks_forward, (b * h * c,), tensors, numbers, constants)
        ctx.save_for_backward(q, k, v, shares, k2, v2, weights, mass, out, lse)
        ctx.causal, ctx.plain = causal, plain
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops import two_blocks_kernels as kernels

        q, k, v, shares, k2, v2, weights, mass, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return None, None, None, *differentiable_grads(lambda *x: (ctx.plain(*x),), (q, k, v, shares), (grad,))
        b, h, c, p, d = q.shape
        grad = dense_blocks(grad)
        dq, dk, dv, dk2, dv2 = (torch.empty_like(x) for x in (q, k, v, k2, v2))
        d_mass = torch.empty_like(mass)
        numbers = (*block_strides(q, k, v, k2, v2, out, grad, dq, dk, dv, dk2, dv2), h, c, p, d**-0.5)
        tensors = (q, k, v, k2, v2, mass, out, grad, lse, dq, dk, dv, dk2, dv2, d_mass)
        constants = block_constants("two_blocks_backward", q, v, ctx.causal, True)
        launch_kernel(kernels.two_blocks_backward, (b * h * c,), tensors, numbers, constants)
        key = _mixing_key(k, v)
        by_block = key_and_value_products(key, k, v, dk2, dv2)
        dk, dv = add_mixed(key, weights, (k, v), dk, dv, dk2, dv2)
        found = torch.empty_like(shares)
        grid, sizes, constants = share_row_sizes(shares)
        constants["PARTS"] = by_block[0].shape[0]
        launch_kernel(kernels.share_weights_grads, grid, (shares, *by_block, d_mass, found), sizes, constants)
        return None, None, None, dq, dk, dv, found


def block_sums(k: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums of blocks k (b h c p d), (b h c d) in a type."""
    if k.is_cuda and not torch.compiler.is_compiling() and not needs_plain_ops():
        return _BlockSums.apply(k, dtype)
    return k.sum(3, dtype=dtype)


class _BlockSums(torch.autograd.Function):
    """Sums whose gradient is a view: autograd would write it down for every token, in float32 and once more in the type of k."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.kind = k.shape, k.dtype
        return k.sum(3, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.kind).unsqueeze(3).expand(ctx.shape), None
