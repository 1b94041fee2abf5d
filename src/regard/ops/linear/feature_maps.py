"""Feature maps of kernelized attention and the division by its norm, in plain operations: what fused kernels compute inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.transforms import transformed

FEATURES = ("identity", "elu", "relu")  # a kernel has the index of a name


def feature_map(x: Tensor, name: str) -> Tensor:
    """Return the features of queries or keys: x, elu(x) + 1, or relu(x)."""
    if name == "elu":
        return elu_plus_one(x)
    if name == "relu":
        return x.relu()
    if name != "identity":
        raise ValueError(f"feature must be one of {', '.join(FEATURES)}, not {name!r}")
    return x


def safe_ratio(out: Tensor, norm: Tensor) -> Tensor:
    """Return out / norm, and 0 where a query sees nothing, or so little that its weights have no digits left."""
    limits = torch.finfo(norm.dtype)
    enough = norm > limits.tiny / limits.eps
    return out / torch.where(enough, norm, torch.inf)


def elu_plus_one(x: Tensor) -> Tensor:
    """Return elu(x) + 1 with all its digits, where exp(x) - 1 + 1 loses them."""
    if torch.compiler.is_compiling() or transformed():  # fused by itself; torch 2.11 compiles the Function into a wrong gradient
        return x.clamp(max=0).exp() + x.relu()
    return EluPlusOne.apply(x)


class EluPlusOne(torch.autograd.Function):
    """elu(x) + 1 in one pass and one tensor: its slope is min(phi, 1), so only phi is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(max=0).exp_().add_(x.relu())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004 - torch names them
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return phi.clamp(max=1) * grad
