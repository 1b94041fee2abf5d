"""Pseudo-inverses of small matrices of weights by a third-order iteration, in float64: one launch on CUDA devices.

Z <- Z (13 - S Z (15 - S Z (7 - S Z))) / 4, from Z = S^T / (largest sum of a column of S). Xiong et al. 2021, arXiv:2102.03902.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import SMALLEST_DOT, has_triton
from regard.transforms import differentiable_grads, needs_plain_ops

LARGEST_INVERSE = 64  # rows: several matrices in float64 lie in the registers of a program


def newton_schulz(s: Tensor, iterations: int) -> Tensor:
    """About the pseudo-inverse of matrices s (... n m) of weights whose rows sum to 1, by a third-order iteration."""
    few = s.is_cuda and s.dtype == torch.float64 and s.shape[-1] == s.shape[-2] <= LARGEST_INVERSE and has_triton()
    if few and not torch.compiler.is_compiling() and not needs_plain_ops():
        return PseudoInverse.apply(s, iterations)
    return plain_newton_schulz(s, iterations)


def plain_newton_schulz(s: Tensor, iterations: int) -> Tensor:
    """Compute the same in differentiable operations."""
    largest = s.sum(-2).amax(-1)
    z = s.mT / largest[..., None, None]
    one = torch.eye(s.shape[-2], dtype=s.dtype, device=s.device)
    for _ in range(iterations):
        near = s @ z
        inner = 15 * one - near @ (7 * one - near)
        z = z @ (13 * one - near @ inner) / 4
    return z


class PseudoInverse(torch.autograd.Function):
    """The kernels for autograd, for square matrices in float64."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, iterations: int) -> Tensor:
        from regard.ops.pseudo_inverse_kernels import iterate_inverse

        s, n = s.contiguous(), s.shape[-1]
        kept = s.new_empty(*s.shape[:-2], iterations + 1, n, n)
        launch_kernel(iterate_inverse, (s[..., 0, 0].numel(),), (s, kept), (n, iterations), _constants(n))
        ctx.save_for_backward(s, kept)
        return kept[..., -1, :, :]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        from regard.ops.pseudo_inverse_kernels import iterate_inverse_grads

        s, kept = ctx.saved_tensors
        n, iterations = s.shape[-1], kept.shape[-3] - 1
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return differentiable_grads(lambda s: (plain_newton_schulz(s, iterations),), (s,), (grad,))[0], None
        found = torch.empty_like(s)
        tensors = (s, kept, grad.contiguous(), found)
        launch_kernel(iterate_inverse_grads, (s[..., 0, 0].numel(),), tensors, (n, iterations), _constants(n))
        return found, None


def _constants(n: int) -> dict[str, int]:
    return {"BN": max(SMALLEST_DOT, 1 << (n - 1).bit_length()), "num_warps": 8}
