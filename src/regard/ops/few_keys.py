"""Attention of many queries to the same few keys, such as the slots of linformer: kernels for CUDA devices.

PyTorch's fused backward pass has a program for every block of keys, here one for a head: most of a card waits. These kernels
divide queries into segments, and sum what the segments add to the gradients of keys and values in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import DTYPES, HALVES, block_of, dot_precision, has_triton, kernel_config
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

FEWEST_QUERIES = 512  # below, PyTorch's kernels are as good
MOST_KEY_ELEMENTS = {True: 8192, False: 4096}  # of all keys of a head, in half precision or not: what registers hold of several
MOST_SEGMENTS = 512  # of all queries together, in the backward pass


def takes_few_keys(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels compute attention of q (b h n d) to k (b g m d), v (b g m e)."""
    if not q.is_cuda or torch.compiler.is_compiling() or q.shape[2] < FEWEST_QUERIES or not has_triton() or needs_plain_ops():
        return False
    alike = q.dtype == k.dtype == v.dtype and q.dtype in DTYPES
    return alike and k.shape[2] > 0 and fits_few_keys(q, k.shape[2], max(q.shape[-1], v.shape[-1]))


def fits_few_keys(like: Tensor, keys: int, wide: int) -> bool:
    """Return whether one program can hold so many keys and values of this width, in the type and on the device of a tensor."""
    return block_of(keys, like.device) * block_of(wide, like.device) <= MOST_KEY_ELEMENTS[like.dtype in HALVES]


def few_keys_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, plain: Callable[..., Tensor]
) -> Tensor:
    """Return softmax(scale q k^T + bias) v (b h n e).

    bias (b h m), or (b 1 m): a number for each key, without a gradient; a query sees one key at least. plain: the same function
    of q, k and v in differentiable operations, for second derivatives.
    """
    return _FewKeys.apply(q, k, v, bias, scale, plain)


def _bias_strides(bias: Tensor | None) -> tuple[int, int]:
    if bias is None:
        return 0, 0
    return bias.stride(0), bias.stride(1) if bias.shape[1] > 1 else 0


def _constants(kernel: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> dict[str, Any]:
    (_, h, _, d), (_, g, m, _), dtype = q.shape, k.shape, q.dtype
    return _kept_constants((kernel, h // g, bias is not None, d, v.shape[-1], m, dtype, dot_precision(dtype), q.device))


@signature_cache
def _kept_constants(key: tuple) -> dict[str, Any]:
    """Return what a kernel is compiled for; the best sizes depend on the type, the widest head and the number of keys."""
    kernel, share, biased, d, e, m, dtype, precision, device = key
    bd, be, keys = (block_of(size, device) for size in (d, e, m))
    kind = "half" if dtype in HALVES else "single"
    sizes = {"SHARE": share, "BIASED": biased, "D": d, "E": e, "BD": bd, "BE": be, "BN": keys, "PRECISION": precision}
    return {**sizes, **kernel_config(kernel, f"{kind} {max(bd, be)}, {keys} keys", device)}


def queries_of_segment(rows: int, n: int, tile: int) -> int:
    """Return the queries of a segment of one of `rows` heads: whole tiles, as many as leave programs enough."""
    tiles = ceil_div(n, tile)
    each = max(1, rows * tiles // MOST_SEGMENTS)
    return min(each, tiles) * tile


def launch_few_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Return the outputs (b h n e); rows of q, k and v are contiguous."""
    from regard.ops.few_keys_kernels import few_keys_forward

    (b, h, n, _), m = q.shape, k.shape[2]
    out = by_token(v, b, n, h, v.shape[-1])
    constants = _constants("few_keys_forward", q, k, v, bias)
    tiles = ceil_div(n, constants["BM"])
    numbers = (*row_strides(q, k, v), *_bias_strides(bias), *row_strides(out), n, m, h, tiles, float(scale))
    launch_kernel(few_keys_forward, (b * h * tiles,), (q, k, v, bias, out), numbers, constants)
    return out


def launch_few_keys_gradients(
    saved: tuple[Any, ...], grad: Tensor, scale: float, dq: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, and of keys (b g parts m d) and values (b g parts m e) in float32, in parts.

    saved: q, k, v and the bias as in `launch_few_keys`. dq: where to write those of queries, if not into a new tensor.
    """
    from regard.ops.few_keys_kernels import few_keys_backward

    q, k, v, bias = saved
    grad = dense_rows(grad)
    (b, h, n, d), (g, m), e = q.shape, k.shape[1:3], v.shape[-1]
    constants = _constants("few_keys_backward", q, k, v, bias)
    size = queries_of_segment(b * h, n, constants["BM"])
    segments = ceil_div(n, size)
    if dq is None:
        dq = by_token(q, b, n, h, d)
    dk, dv = (q.new_empty(b, g, h // g * segments, m, width, dtype=torch.float32) for width in (d, e))
    strides = (*row_strides(q, k, v), *_bias_strides(bias), *row_strides(grad, dq))
    numbers = (*strides, n, m, h, segments, size, float(scale))
    launch_kernel(few_keys_backward, (b * h * segments,), (q, k, v, bias, grad, dq, dk, dv), numbers, constants)
    return dq, dk, dv


class _FewKeys(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, plain: Callable[..., Tensor]
    ) -> Tensor:
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        ctx.save_for_backward(q, k, v, bias)
        ctx.scale, ctx.plain = scale, plain
        return launch_few_keys(q, k, v, bias, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *differentiable_grads(lambda *x: (ctx.plain(*x),), saved[:3], (grad,)), None, None, None
        dq, dk, dv = launch_few_keys_gradients(saved, grad, ctx.scale)
        return dq, dk.sum(2).to(saved[1].dtype), dv.sum(2).to(saved[2].dtype), None, None, None
