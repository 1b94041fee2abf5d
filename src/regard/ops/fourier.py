"""The Fourier transform of tokens over the sequence and the channels, its real part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import DTYPES, has_triton
from regard.patterns.tiles import ceil_div
from regard.transforms import needs_plain_ops, transformed

WAVE_TILE = {"BK": 16, "BL": 128}


def fourier_mix(x: Tensor, norm: str) -> Tensor:
    """Return Re(F_n x F_w) of x (b n w), in the type of x."""
    if x.shape[1] == 0:
        return x
    if torch.compiler.is_compiling() or transformed():
        return _half_spectrum(x, norm)
    return FourierMix.apply(x, norm)


class FourierMix(torch.autograd.Function):
    """The transform with itself as its gradient: F_n and F_w are symmetric. Nothing is kept."""

    @staticmethod
    def forward(x: Tensor, norm: str) -> Tensor:
        return _half_spectrum(x, norm)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:  # noqa: ARG004 - torch names them
        ctx.norm = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return fourier_mix(grad, ctx.norm), None


def _half_spectrum(x: Tensor, norm: str) -> Tensor:
    """Transform x (b n w). Waves of real numbers come in pairs, (k, l) and (-k, -l), with one real part: half of them is all."""
    if takes_spectrum(x):
        half = torch.fft.rfft2(x.float(), dim=(1, 2))
        scale = (x.shape[1] * x.shape[2]) ** -0.5 if norm == "ortho" else 1.0
        return real_part(half, x.shape[2], scale, x.dtype)
    half = torch.fft.rfft2(x.to(torch.promote_types(x.dtype, torch.float32)), dim=(1, 2), norm=norm).real
    w = x.shape[2]
    rest = half[:, :, 1 : w - w // 2].flip(1, 2).roll(1, 1)
    return torch.cat([half, rest], 2).to(x.dtype)


def takes_spectrum(x: Tensor) -> bool:
    """Return whether a kernel writes the whole spectrum of tokens x (b n w)."""
    return x.is_cuda and x.dtype in DTYPES and has_triton() and not torch.compiler.is_compiling() and not needs_plain_ops()


def real_part(half: Tensor, width: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scale times the real part of all waves (b n width), in a type, from the first width // 2 + 1 over the channels."""
    from regard.ops.fourier_kernels import real_spectrum

    numbers = torch.view_as_real(half)
    b, n, *_ = half.shape
    out = numbers.new_empty(b, n, width, dtype=dtype)
    grid = (ceil_div(n, WAVE_TILE["BK"]), ceil_div(width, WAVE_TILE["BL"]), b)
    launch_kernel(real_spectrum, grid, (numbers, out), (n, width, scale, *numbers.stride()[:3]), WAVE_TILE)
    return out


def fourier_mix_by_row(x: Tensor, count: Tensor, norm: str) -> Tensor:
    """Transform the first count (b) tokens of each row, zeros behind them. Rows of one length are transformed together."""
    order = count.argsort()
    sizes, rows = count[order].unique_consecutive(return_counts=True)
    parts = x[order].split(rows.tolist())
    n = x.shape[1]
    done = [pad(fourier_mix(part[:, :m], norm), (0, 0, 0, n - m)) for part, m in zip(parts, sizes.tolist(), strict=True)]
    return torch.cat(done)[order.argsort()]
