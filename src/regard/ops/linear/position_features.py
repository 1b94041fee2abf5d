"""Features that turn with the position of a token, one launch forward and one backward: see `position_feature_kernels.py`.

phi(x) = [relu(x) cos(a), relu(x) sin(a)],   a = step * position
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.bucket.bucket_launch import by_token, dense_rows, row_strides
from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import block_of, triton_cannot_run
from regard.transforms import differentiable_grads, needs_plain_ops

POSITION_TILE = 32  # tokens of a program


def position_features(x: Tensor, at: Tensor, step: float, fused: bool) -> Tensor:
    """Return the features (b h n 2d) of tokens x (b h n d) at positions `at` (b n), in the type that their products need.

    fused: kernels may compute them, on tensors that they can take.
    """
    traced = torch.compiler.is_compiling() or needs_plain_ops()
    if traced or not fused or x.numel() == 0 or triton_cannot_run(x):
        return position_features_plain(x, at, step)
    return PositionFeatures.apply(x, at, step)


def position_features_plain(x: Tensor, at: Tensor, step: float) -> Tensor:
    """Compute `position_features` by differentiable operations: the definition."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).relu()
    angle = at.to(wide.dtype)[:, None, :, None] * step
    features = torch.cat([wide * angle.cos(), wide * angle.sin()], -1)
    return features.to(_feature_type(x))


def _feature_type(x: Tensor) -> torch.dtype:
    """The type of features: norms of clipped ones may be small, and float32 keeps the digits that float16 would lose."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def _launch_positions(kernel: Any, tokens: Tensor, at: Tensor, step: float, *others: Tensor) -> None:
    """Launch a kernel for all tiles of tokens (b h n d); `others` are tensors (b h n ...) behind the positions."""
    b, h, n, d = tokens.shape
    tiles = -(-n // POSITION_TILE)
    numbers = (*row_strides(tokens, *others), *at.stride(), step, n, h, tiles)
    constants = {"D": d, "BD": block_of(d, tokens.device), "BM": POSITION_TILE}
    launch_kernel(kernel, (b * h * tiles,), (tokens, at, *others), numbers, constants)


class PositionFeatures(torch.autograd.Function):
    """The kernels for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, step: float) -> Tensor:
        from regard.ops.linear.position_feature_kernels import position_feature_forward

        x = dense_rows(x)
        b, h, n, d = x.shape
        phi = by_token(x, b, n, h, 2 * d, _feature_type(x))
        _launch_positions(position_feature_forward, x, at, step, phi)
        ctx.save_for_backward(x, at)
        ctx.step = step
        return phi

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.ops.linear.position_feature_kernels import position_feature_backward

        x, at = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            (found,) = differentiable_grads(lambda x: (position_features_plain(x, at, ctx.step),), (x,), (grad,))
            return found, None, None
        b, h, n, d = x.shape
        grad, dx = dense_rows(grad), by_token(x, b, n, h, d)
        _launch_positions(position_feature_backward, x, at, ctx.step, grad, dx)
        return dx, None, None
