"""Attention to slots, sums of keys and values with weights of every head: the core of linformer, on CUDA devices.

Each head reads its tokens where they lie. As products of PyTorch the rows of a batch would be columns, after a copy of all keys
and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import dense_rows, row_strides
from regard.ops.dense import sdpa_composite
from regard.ops.few_keys import (
    FEWEST_QUERIES,
    fits_few_keys,
    launch_few_keys,
    launch_few_keys_gradients,
    queries_of_segment,
)
from regard.ops.joined_linear import gradient_buffers
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import HALVES, block_of, dot_precision, has_triton
from regard.patterns.tiles import ceil_div
from regard.transforms import differentiable_grads, needs_plain_ops

SLOT_TILE = 64  # tokens of a tile


def takes_head_slots(q: Tensor, k: Tensor, v: Tensor, rank: int) -> bool:
    """Return whether `head_slot_attention` takes q (b h n d), k (b g m d) and v (b g m e)."""
    if not q.is_cuda or torch.compiler.is_compiling() or q.shape[2] < FEWEST_QUERIES or not has_triton() or needs_plain_ops():
        return False
    alike = q.dtype == k.dtype == v.dtype and q.dtype in HALVES
    return alike and k.shape[2] > 0 and fits_few_keys(q, rank, max(q.shape[-1], v.shape[-1]))


def head_slot_attention(q: Tensor, k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor, start: int, scale: float) -> Tensor:
    """Return softmax(q K'^T) V' (b h n e), K' = to_k^T k and V' = to_v^T v: weights (g positions r), from `start` on.

    A slot without any weight but 0 is not seen.
    """
    return _HeadSlots.apply(q, k, v, to_k, to_v, start, scale)


def head_slot_attention_plain(q: Tensor, k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor, start: int, scale: float) -> Tensor:
    """Compute `head_slot_attention` by differentiable operations: the definition."""
    weights = [w[:, start : start + k.shape[2]].to(k.dtype) for w in (to_k, to_v)]
    slots_k, slots_v = weights[0].mT @ k, weights[1].mT @ v
    tops = torch.stack([w.detach().abs().amax(1) for w in weights])
    bias, seen = _hidden(tops.amax(0), q.shape[1])
    return sdpa_composite(q, slots_k, slots_v * seen[:, None, None].to(v.dtype), bias[None, :, None].to(q.dtype), scale, False)


def _hidden(tops: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return what is added to the scores of slots (h r), and which heads see one, as numbers (g); others are shown all.

    tops (g r): the largest weight of every slot.
    """
    seen = tops.amax(-1, keepdim=True) > 0
    bias = torch.zeros_like(tops).masked_fill_((tops == 0) & seen, -torch.inf)
    if heads != len(tops):
        bias = bias.repeat_interleave(heads // len(tops), 0)
    return bias, seen.squeeze(-1).to(tops.dtype)


def _constants(k: Tensor, v: Tensor, rank: int) -> dict[str, Any]:
    d, e, device = k.shape[-1], v.shape[-1], k.device
    sizes = {"R": block_of(rank, device), "D": d, "E": e, "BD": block_of(d, device), "BE": block_of(e, device)}
    return {**sizes, "BN": SLOT_TILE, "PRECISION": dot_precision(k.dtype), "num_warps": 4, "num_stages": 2}


def _slots(k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of keys and values (b g r .), and the largest weights (g r)."""
    from regard.ops.head_slots_kernels import slot_sums

    (b, g, n, d), e, r = k.shape, v.shape[-1], to_k.shape[2]
    size = queries_of_segment(b * g, n, SLOT_TILE)
    segments = ceil_div(n, size)
    parts = [k.new_empty(b, g, segments, r, width, dtype=torch.float32) for width in (d, e)]
    tops = k.new_empty(2, b, g, segments, r, dtype=torch.float32)
    programs = b * g * segments
    numbers = (*row_strides(k, v), to_k.stride(0), n, r, g, segments, size, programs)
    launch_kernel(slot_sums, (2 * programs,), (k, v, to_k, to_v, *parts, tops), numbers, _constants(k, v, r))
    slots_k, slots_v = (x.sum(2).to(k.dtype) for x in parts)
    return slots_k, slots_v, tops[:, 0].amax((0, 2))


class _HeadSlots(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor, start: int, scale: float) -> Tensor:
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        to_k, to_v = to_k.contiguous(), to_v.contiguous()
        slots_k, slots_v, tops = _slots(k, v, to_k[:, start:], to_v[:, start:])
        bias, seen = _hidden(tops, q.shape[1])
        bias = bias.expand(len(q), -1, -1)
        ctx.save_for_backward(q, k, v, to_k, to_v, slots_k, slots_v, bias, seen)
        ctx.start, ctx.scale = start, scale
        return launch_few_keys(q, slots_k, slots_v, bias, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops.head_slots_kernels import slot_sum_gradients

        q, k, v, to_k, to_v, slots_k, slots_v, bias, seen = ctx.saved_tensors
        start, scale = ctx.start, ctx.scale
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more

            def plain(q: Tensor, k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor) -> tuple[Tensor]:
                return (head_slot_attention_plain(q, k, v, to_k, to_v, start, scale),)

            return *differentiable_grads(plain, (q, k, v, to_k, to_v), (grad,)), None, None
        dq, dk, dv = gradient_buffers(q, k, v)
        dq, parts_k, parts_v = launch_few_keys_gradients((q, slots_k, slots_v, bias), grad, scale, dq)
        grads = parts_k.sum(2), parts_v.sum(2).mul_(seen[:, None, None])
        (b, g, n, _), r = k.shape, to_k.shape[2]
        make = torch.empty_like if n == to_k.shape[1] else torch.zeros_like
        dto_k, dto_v = make(to_k), make(to_v)
        used = [x[:, start:] for x in (to_k, to_v)]
        tiles = ceil_div(n, SLOT_TILE)
        numbers = (*row_strides(k, v), to_k.stride(0), *row_strides(dk, dv), n, r, g, b, tiles, g * tiles)
        tensors = (k, v, *used, *grads, dk, dv, dto_k[:, start:], dto_v[:, start:])
        launch_kernel(slot_sum_gradients, (2 * g * tiles,), tensors, numbers, _constants(k, v, r))
        return dq, dk, dv, dto_k, dto_v, None, None
