"""Solve many small systems with symmetric positive definite matrices, in float64: one launch on CUDA devices.

PyTorch's batched solvers are made for large matrices: they start many kernels and move pivots, which such matrices do not need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import SMALLEST_DOT, has_triton
from regard.patterns.tiles import ceil_div
from regard.transforms import needs_plain_ops

LARGEST_SYSTEM = 64  # rows: a matrix and its right sides fit into the registers of a program
RIGHT_SIDES = 64  # right sides of a program


def spd_solve(a: Tensor, b: Tensor) -> Tensor:
    """Return a^-1 b of symmetric positive definite matrices a (... n n) and right sides b (... n e), in float64."""
    if not takes_systems(a):
        return torch.linalg.solve_ex(a, b)[0]
    if torch.compiler.is_compiling():
        from regard.ops.landmark_compiled import solve_operator

        return solve_operator(a, b)
    return _SpdSolve.apply(a, b)


def takes_systems(a: Tensor) -> bool:
    """Return whether the kernel solves systems with matrices a (... n n)."""
    return a.is_cuda and a.shape[-1] <= LARGEST_SYSTEM and has_triton() and not needs_plain_ops()


def eliminate(a: Tensor, b: Tensor) -> Tensor:
    """Launch the kernel: Gauss-Jordan elimination without pivots."""
    from regard.ops.spd_solve_kernels import gauss_jordan

    n, e = b.shape[-2:]
    a, b = a.contiguous(), b.contiguous()
    x = torch.empty_like(b)
    parts = ceil_div(e, RIGHT_SIDES)
    block = max(SMALLEST_DOT, 1 << (n - 1).bit_length())
    constants = {"BN": block, "BE": RIGHT_SIDES, "num_warps": 8}
    launch_kernel(gauss_jordan, (b[..., 0, 0].numel() * parts,), (a, b, x), (n, e, parts), constants)
    return x


class _SpdSolve(torch.autograd.Function):
    """The kernel for autograd: the gradient is a solve with the same matrix."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        x = eliminate(a, b)
        ctx.save_for_backward(a, x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, x = ctx.saved_tensors
        db = spd_solve(a, grad)
        return -(db @ x.mT), db
