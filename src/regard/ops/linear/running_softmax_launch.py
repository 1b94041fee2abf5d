"""Launch the kernels of the running softmax: three forward, three backward, with tops and sums of segments kept between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token, dense_rows, like_by_token, row_strides
from regard.ops.kernel_launch import launch_kernel
from regard.ops.linear.running_softmax import RunningSoftmax, running_softmax_plain
from regard.ops.linear.running_softmax_kernels import (
    running_features,
    running_grad_scan,
    running_grad_sums,
    running_grads,
    running_scan,
    running_segments,
)
from regard.ops.triton_support import block_of
from regard.transforms import differentiable_grads

ROW = 256  # numbers of the heads of a program, of one token: what a warp reads at once
SEGMENTS = (32, 16)  # tokens of a segment: the second where the first would be too few programs for a card
FEWEST_PROGRAMS = 4096
SCAN_TILE = {"BF": 16, "SB": 128}  # features and segments in a step of a scan over segments


class _RunningSizes:
    """Grids, numbers and constants that all kernels share."""

    def __init__(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        self.b, self.g, self.n, self.f = k.shape
        self.h = q.shape[1]
        self.valid = None if valid is None else valid.contiguous().view(torch.uint8)
        width = block_of(self.f, k.device)
        heads = min(max(ROW // width, 1), 1 << (self.g - 1).bit_length())
        rows = self.b * -(-self.g // heads)
        size = SEGMENTS[rows * self.n < FEWEST_PROGRAMS * SEGMENTS[0]]
        self.segs = -(-self.n // size)
        self.grid = (rows * self.segs,)
        self.numbers = (self.n, self.segs, self.g)
        self.scan = {"f": self.f, **SCAN_TILE}
        self.scan_grid = (self.b * self.g * -(-self.f // SCAN_TILE["BF"]),)
        self.tiles = {"f": self.f, "BF": width, "HB": heads, "C": size, "num_warps": 1}
        self.constants = {**self.tiles, "HAS_VALID": valid is not None}

    def slots(self, like: Tensor, count: int) -> Tensor:
        return like.new_empty(self.b, self.g, count, self.f, dtype=torch.float32)


def _before_segments(
    run: _RunningSizes, k: Tensor, first: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return tops and sums before every segment and behind the last one (b g segs+1 f); fills `last` with those behind."""
    tops, sums = run.slots(k, run.segs), run.slots(k, run.segs)
    launch_kernel(running_segments, run.grid, (k, run.valid, tops, sums), (*row_strides(k), *run.numbers), run.constants)
    top, z = run.slots(k, run.segs + 1), run.slots(k, run.segs + 1)
    first_z, first_top = (x.float().contiguous() for x in first)
    tensors = (tops, sums, first_top, first_z, top, z, last[1], last[0])
    launch_kernel(running_scan, run.scan_grid, tensors, (run.segs,), run.scan)
    return top, z


def _grads_behind(
    run: _RunningSizes, given: tuple[Tensor | None, ...], grad: Tensor, d_last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sums of dz behind every segment (b g segs f), and the gradient of the sums before the first token.

    given: what kernels read of the forward pass; grad: of the mix.
    """
    k, _, top, *_ = given
    assert k is not None and top is not None
    sums, behind = run.slots(k, run.segs), run.slots(k, run.segs)
    numbers = (*row_strides(k, grad), *run.numbers, run.h // run.g)
    launch_kernel(running_grad_sums, run.grid, (*given, grad, sums), numbers, run.constants)
    last = torch.zeros(run.b, run.g, run.f, device=k.device) if d_last is None else d_last.float().contiguous()
    d_first = torch.empty_like(last)
    launch_kernel(running_grad_scan, run.scan_grid, (sums, top, last, behind, d_first), (run.segs,), run.scan)
    return behind, d_first


RunningInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # q, k, z and top before the first token, valid


def launch_running_softmax(inputs: RunningInputs) -> tuple[RunningSoftmax, tuple[Tensor, Tensor]]:
    """Return the features and sums, and tops and sums before every segment, which gradients need; rows of q, k are contiguous."""
    q, k, first_z, first_top, valid = inputs
    run, found = _RunningSizes(q, k, valid), empty_running_softmax(q, k)
    top, z = _before_segments(run, k, (first_z, first_top), (found.z, found.top))
    numbers = (*row_strides(q, k), *run.numbers, run.h // run.g)
    tensors = (q, k, run.valid, top, z, found.mix, found.keys, found.log_decay)
    launch_kernel(running_features, run.grid, tensors, numbers, run.constants)
    return found, (top, z)


def empty_running_softmax(q: Tensor, k: Tensor) -> RunningSoftmax:
    """Return empty tensors for the results of q (b h n f) and k (b g n f); sizes may be symbols."""
    (b, h, n, f), g = q.shape, k.shape[1]
    dtype = torch.bfloat16 if k.dtype == torch.bfloat16 else torch.float32
    mix, keys = by_token(q, b, n, h, f, dtype), by_token(k, b, n, g, f, dtype)
    last = (k.new_empty(b, g, f, dtype=torch.float32) for _ in range(2))
    return RunningSoftmax(mix, keys, by_token(k, b, n, g, f, torch.float32), *last)


def states_before_segments(inputs: RunningInputs) -> tuple[Tensor, Tensor]:
    """Compute once more what `launch_running_softmax` returns last."""
    q, k, first_z, first_top, valid = inputs
    run = _RunningSizes(q, k, valid)
    return _before_segments(run, k, (first_z, first_top), (run.slots(k, 1), run.slots(k, 1)))


def launch_running_gradients(
    inputs: RunningInputs,
    before: tuple[Tensor, Tensor],
    found: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and of the sums before the first token.

    before: tops and sums of segments. found: mix, keys and decays. grads: of the mix, of keys and of the last sums.
    """
    (q, k, first_z, _, valid), (mix, keys, decay), (d_mix, d_keys, d_last) = inputs, found, grads
    run = _RunningSizes(q, k, valid)
    grad, d_keys = (dense_rows(torch.zeros_like(x) if dx is None else dx) for x, dx in ((mix, d_mix), (keys, d_keys)))
    behind, d_first = _grads_behind(run, (k, run.valid, *before, mix), grad, d_last)
    d_q, d_k = like_by_token(q), like_by_token(k)
    numbers = (*row_strides(q, grad, d_keys), *run.numbers, run.h // run.g)
    launch_kernel(running_grads, run.grid, (q, mix, keys, decay, grad, d_keys, behind, d_q, d_k), numbers, run.tiles)
    return d_q, d_k, d_first.to(first_z.dtype)


class RunningSoftmaxFunction(torch.autograd.Function):
    """The kernels for autograd. Arguments: those of `running_softmax`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, first_z: Tensor, first_top: Tensor, valid: Tensor | None) -> tuple[Tensor, ...]:
        inputs = dense_rows(q), dense_rows(k), first_z, first_top, valid
        found, before = launch_running_softmax(inputs)
        ctx.save_for_backward(*inputs, *before, *found[:3])
        ctx.mark_non_differentiable(found.log_decay, found.top)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, first_z, first_top, valid, top, z, *found = ctx.saved_tensors
        d_mix, d_keys, _, d_last, _ = grads
        wanted = d_mix, d_keys, d_last
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return *_second_gradients((q, k, first_z), first_top, valid, wanted), None, None
        inputs = q, k, first_z, first_top, valid
        return *launch_running_gradients(inputs, (top, z), tuple(found), wanted), None, None


def _second_gradients(
    inputs: tuple[Tensor, ...], first_top: Tensor, valid: Tensor | None, grads: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """The gradients as functions of everything they depend on."""

    def f(q: Tensor, k: Tensor, first_z: Tensor) -> list[Tensor]:
        found = running_softmax_plain(q.float(), k.float(), first_z, first_top, valid, "torch")
        results = (found.mix, found.keys, found.z)
        return [y.to(g.dtype) for y, g in zip(results, grads, strict=True) if g is not None]

    return differentiable_grads(f, inputs, [g for g in grads if g is not None])
