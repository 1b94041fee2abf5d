"""The merge of two outputs by one gate of each head, with its gradients: one launch forward, one backward.

out = (1 - w) near + w far,   w = sigmoid(gate of the head)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import DTYPES, block_of, has_triton
from regard.transforms import differentiable_grads, needs_plain_ops

MERGE_TOKENS = 32  # of a program


def gated_merge(near: Tensor, far: Tensor, gate: Tensor) -> Tensor:
    """Return the mean of near and far (b h n e), weighed by the gates (h) of heads; kernels compute it on CUDA devices."""
    if not near.is_cuda or torch.compiler.is_compiling() or needs_plain_ops() or not has_triton():
        return gated_merge_plain(near, far, gate)
    fits = near.dtype in DTYPES and far.dtype == near.dtype and near.numel() > 0 and near.shape[-1] <= 1024
    return GatedMerge.apply(near, far, gate) if fits else gated_merge_plain(near, far, gate)


def gated_merge_plain(near: Tensor, far: Tensor, gate: Tensor) -> Tensor:
    """Compute `gated_merge` by differentiable operations: the definition."""
    dtype = torch.promote_types(near.dtype, torch.float32)
    weight = gate.to(dtype).sigmoid()[:, None, None]
    return torch.lerp(near.to(dtype), far.to(dtype), weight).to(near.dtype)


def _launch_merge(kernel: Any, tensors: tuple[Tensor, ...], gate: Tensor, *more: Tensor) -> None:
    """Launch a kernel for all tiles of tensors (b h n e); `more` are tensors without strides behind the gates."""
    b, h, n, e = tensors[0].shape
    tiles = -(-n // MERGE_TOKENS)
    constants = {"E": e, "BE": block_of(e, gate.device), "BM": MERGE_TOKENS}
    launch_kernel(kernel, (b * h * tiles,), (*tensors, gate, *more), (*row_strides(*tensors), n, h, tiles), constants)


class GatedMerge(torch.autograd.Function):
    """The kernels for autograd. Arguments: those of `gated_merge`."""

    @staticmethod
    def forward(ctx: Any, near: Tensor, far: Tensor, gate: Tensor) -> Tensor:
        from regard.ops.gated_merge_kernels import gated_merge_forward

        near, far = dense_rows(near), dense_rows(far)
        b, h, n, e = near.shape
        out = by_token(near, b, n, h, e)
        _launch_merge(gated_merge_forward, (near, far, out), gate.contiguous())
        ctx.save_for_backward(near, far, gate)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops.gated_merge_kernels import gated_merge_backward

        near, far, gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return tuple(differentiable_grads(lambda *x: (gated_merge_plain(*x),), (near, far, gate), (grad,)))
        b, h, n, e = near.shape
        grad, d_near, d_far = dense_rows(grad), by_token(near, b, n, h, e), by_token(far, b, n, h, e)
        slopes = torch.empty(b * -(-n // MERGE_TOKENS), h, device=near.device)
        _launch_merge(gated_merge_backward, (near, far, grad, d_near, d_far), gate.contiguous(), slopes)
        return d_near, d_far, slopes.sum(0).to(gate.dtype)
