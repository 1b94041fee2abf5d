"""Sums of `rate` consecutive keys, and of their values, with a weight for each of the `rate` places: one launch on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.kernel_launch import launch_kernel
from regard.ops.tile.call import accumulator
from regard.ops.triton_support import DTYPES, WIDEST_HEAD, block_of, has_triton
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

POOL_TILE = 32  # strides of a program


def takes_strides(k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels pool keys (b g n d) and values (b g n e)."""
    if not k.is_cuda or torch.compiler.is_compiling() or k.shape[2] == 0 or not has_triton() or needs_plain_ops():
        return False
    return k.dtype == v.dtype and k.dtype in DTYPES and max(k.shape[-1], v.shape[-1]) <= WIDEST_HEAD


def pool_strides(k: Tensor, v: Tensor, taps_k: Tensor, taps_v: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_u taps_gu x_(s rate + u) of keys and of values (b g ceil(n / rate) .), for taps (g rate).

    A last stride that is not full sums over its tokens, and is multiplied by rate / their number.
    """
    return _StridePool.apply(k, v, taps_k, taps_v, ceil_div(k.shape[2], taps_k.shape[1]))[2:]


def pool_shared_strides(
    k: Tensor, v: Tensor, taps_k: Tensor, taps_v: Tensor, strides: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return keys and values as they are, for further use, and the sums of their first `strides`, which are full.

    Gradients of both are summed where they are written.
    """
    return _StridePool.apply(k, v, taps_k, taps_v, strides)


def pool_strides_plain(
    k: Tensor, v: Tensor, taps_k: Tensor, taps_v: Tensor, strides: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute both by differentiable operations: the definition."""
    n, rate, acc = k.shape[2], taps_k.shape[1], accumulator(k.dtype)
    first = torch.arange(0, strides * rate, rate, device=k.device)
    fill = rate / (n - first).clamp_max(rate).to(acc)
    found = []
    for x, taps in ((k, taps_k), (v, taps_v)):
        filled = pad(x, (0, 0, 0, max(0, strides * rate - n)))[:, :, : strides * rate].unflatten(2, (strides, rate))
        sums = (filled.to(acc) * taps.to(acc)[:, None, :, None]).sum(3)
        found.append((sums * fill[:, None]).to(x.dtype))
    return k, v, found[0], found[1]


def _constants(k: Tensor, v: Tensor) -> dict[str, Any]:
    d, e = k.shape[-1], v.shape[-1]
    return {"D": d, "E": e, "BD": block_of(d, k.device), "BE": block_of(e, k.device), "BM": POOL_TILE}


class _StridePool(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, taps_k: Tensor, taps_v: Tensor, slots: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from regard.ops.stride_pool_kernels import stride_sums

        k, v, taps_k, taps_v = dense_rows(k), dense_rows(v), taps_k.contiguous(), taps_v.contiguous()
        (b, g, n, _), rate = k.shape, taps_k.shape[1]
        tiles = ceil_div(slots, POOL_TILE)
        out = k.new_empty(b, g, slots, k.shape[-1]), v.new_empty(b, g, slots, v.shape[-1])
        numbers = (*row_strides(k, v), n, rate, slots, tiles, g, b * g * tiles)
        launch_kernel(stride_sums, (2 * b * g * tiles,), (k, v, taps_k, taps_v, *out), numbers, _constants(k, v))
        ctx.save_for_backward(k, v, taps_k, taps_v)
        ctx.slots = slots
        ctx.set_materialize_grads(False)
        return k.view_as(k), v.view_as(v), *out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from regard.ops.stride_pool_kernels import stride_gradients

        k, v, taps_k, taps_v = saved = ctx.saved_tensors
        (b, g, n, d), e, rate, slots = k.shape, v.shape[-1], taps_k.shape[1], ctx.slots
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            shapes = k.shape, v.shape, (b, g, slots, d), (b, g, slots, e)
            up = [k.new_zeros(shape) if x is None else x for x, shape in zip(grads, shapes, strict=True)]
            return *differentiable_grads(lambda k, v, a, b: pool_strides_plain(k, v, a, b, slots), saved, up), None
        add = grads[0] is not None and grads[1] is not None
        other = [dense_rows(x) for x in grads[:2] if add and x is not None]
        sizes = zip(grads[2:], (d, e), strict=True)
        pooled = [k.new_zeros(b, g, slots, size) if x is None else dense_rows(x) for x, size in sizes]
        tiles = ceil_div(ceil_div(n, rate), POOL_TILE)
        dk, dv = by_token(k, b, n, g, d), by_token(v, b, n, g, e)
        parts = k.new_empty(2, b, g, tiles, rate, dtype=torch.float32)
        strides = (*row_strides(k, v, *pooled), *(row_strides(*other) if add else (0,) * 6), *row_strides(dk, dv))
        tensors = (k, v, taps_k, taps_v, *pooled, *(other or (None, None)), dk, dv, parts)
        numbers = (*strides, n, rate, slots, tiles, g, b * g * tiles)
        launch_kernel(stride_gradients, (2 * b * g * tiles,), tensors, numbers, {"ADD": add, **_constants(k, v)})
        if not add:
            dk, dv = (x if y is None else x + y for x, y in zip((dk, dv), grads[:2], strict=True))
        dtaps_k, dtaps_v = parts.sum((1, 3)).to(taps_k.dtype)
        return dk, dv, dtaps_k, dtaps_v, None
