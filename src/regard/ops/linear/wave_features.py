"""Random waves of unit vectors, and the ratio of their sums with a floor, by kernels: see `wave_feature_kernels.py`.

phi(x) = [sin(W x'), cos(W x')] / sqrt(m),   x' = x / |x|,   W (m d)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.kernel_launch import launch_kernel
from regard.ops.linear.feature_maps import safe_ratio
from regard.ops.triton_support import block_of, dot_precision, kernel_config, triton_cannot_run
from regard.transforms import differentiable_grads, needs_plain_ops

WIDEST_WAVE = 256  # coordinates of a token
SHORTEST_TOKEN = 1e-6  # norm of a token that is still made 1
RATIO_TILE = 32  # tokens of a program


def wave_kernels_fit(x: Tensor) -> bool:
    """Return whether kernels can compute the waves of tokens x (b h n d)."""
    plain = torch.compiler.is_compiling() or needs_plain_ops() or x.dim() != 4 or x.numel() == 0
    return not plain and x.shape[-1] <= WIDEST_WAVE and triton_cannot_run(x) is None


def wave_features(x: Tensor, directions: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the waves (b h n 2m) of tokens x (b h n d) that `wave_kernels_fit`, zeros where valid (b n) is not."""
    return WaveFeatures.apply(x, directions, valid)


def wave_features_plain(x: Tensor, directions: Tensor, valid: Tensor | None = None) -> Tensor:
    """Compute `wave_features` by differentiable operations, in the type of x: the definition."""
    unit = F.normalize(x, dim=-1, eps=SHORTEST_TOKEN)
    angle = F.linear(unit, directions.to(x.dtype))
    waves = torch.cat([angle.sin(), angle.cos()], -1) / math.sqrt(angle.shape[-1])
    return waves if valid is None else waves.masked_fill(~valid[:, None, :, None], 0)


def lifted_ratio(out: Tensor, norm: Tensor, floor: Tensor) -> Tensor:
    """Return out / max(norm, floor), (b h n e) by (b h n 1); tensors that `wave_kernels_fit`."""
    return LiftedRatio.apply(out, norm, floor)


def lifted_ratio_plain(out: Tensor, norm: Tensor, floor: Tensor) -> Tensor:
    """Compute `lifted_ratio` by differentiable operations: the definition."""
    return safe_ratio(out, norm + (floor - norm).relu())


def _wave_constants(name: str, x: Tensor, directions: Tensor) -> dict[str, Any]:
    """The sizes and the configuration of a kernel of waves of tokens x (b h n d)."""
    config = dict(kernel_config(name, "single" if x.dtype == torch.float32 else "half", x.device))
    m, d, most = len(directions), x.shape[-1], config.pop("features")
    sizes = {"d": d, "m": m, "BD": block_of(d, x.device), "BM": min(most, block_of(m, x.device)), "C": config.pop("chunk")}
    return {**sizes, "PRECISION": dot_precision(torch.float32), **config}


def _wave_grid(x: Tensor, chunk: int) -> tuple[tuple[int], tuple[int, int, int]]:
    """The grid of all tiles of tokens x (b h n d), and the numbers behind strides."""
    b, h, n, _ = x.shape
    tiles = -(-n // chunk)
    return (b * h * tiles,), (n, h, tiles)


class WaveFeatures(torch.autograd.Function):
    """The kernels for autograd. Directions are constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, directions: Tensor, valid: Tensor | None) -> Tensor:
        from regard.ops.linear.wave_feature_kernels import wave_forward

        x = dense_rows(x)
        b, h, n, _ = x.shape
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        phi = by_token(x, b, n, h, 2 * len(directions), dtype)
        present = None if valid is None else valid.contiguous().view(torch.uint8)
        constants = _wave_constants("exp_features", x, directions) | {"HAS_VALID": valid is not None}
        grid, sizes = _wave_grid(x, constants["C"])
        numbers = (*row_strides(x, phi), *sizes, len(directions) ** -0.5)
        launch_kernel(wave_forward, grid, (directions.contiguous(), x, phi, present), numbers, constants)
        ctx.save_for_backward(x, directions, valid, phi)
        return phi

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops.linear.wave_feature_kernels import wave_backward

        x, directions, valid, phi = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more

            def f(x: Tensor) -> list[Tensor]:
                wide = x.to(torch.promote_types(x.dtype, torch.float32))
                return [wave_features_plain(wide, directions, valid).to(grad.dtype)]

            return *differentiable_grads(f, (x,), (grad,)), None, None
        b, h, n, d = x.shape
        d_x = by_token(x, b, n, h, d)
        tensors = (x, phi, dense_rows(grad), d_x)
        constants = _wave_constants("exp_feature_grads", x, directions)
        grid, sizes = _wave_grid(x, constants["C"])
        launch_kernel(wave_backward, grid, (directions.contiguous(), *tensors), (*row_strides(*tensors), *sizes), constants)
        return d_x, None, None


class LiftedRatio(torch.autograd.Function):
    """The kernels for autograd. Arguments: those of `lifted_ratio`."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, norm: Tensor, floor: Tensor) -> Tensor:
        from regard.ops.linear.wave_feature_kernels import ratio_forward

        out, norm, floor = dense_rows(out), norm.float().contiguous(), floor.float().contiguous()
        b, h, n, e = out.shape
        y = by_token(out, b, n, h, e)
        _launch_ratio(ratio_forward, (out, y), norm, floor)
        ctx.save_for_backward(out, norm, floor)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops.linear.wave_feature_kernels import ratio_backward

        out, norm, floor = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            return tuple(differentiable_grads(lambda *x: (lifted_ratio_plain(*x).to(grad.dtype),), (out, norm, floor), (grad,)))
        b, h, n, e = out.shape
        d_out = by_token(out, b, n, h, e)
        d_norm, d_floor = torch.empty_like(norm), torch.empty_like(floor)
        _launch_ratio(ratio_backward, (out, dense_rows(grad), d_out), norm, floor, d_norm, d_floor)
        return d_out, d_norm, d_floor


def _launch_ratio(kernel: Any, tokens: tuple[Tensor, ...], *rows: Tensor) -> None:
    """Launch a kernel of ratios for all tiles of tensors (b h n e); `rows` are (b h n 1)."""
    b, h, n, e = tokens[0].shape
    tiles = -(-n // RATIO_TILE)
    constants = {"E": e, "BE": block_of(e, tokens[0].device), "C": RATIO_TILE}
    launch_kernel(kernel, (b * h * tiles,), (*tokens, *rows), (*row_strides(*tokens), n, h, tiles), constants)
