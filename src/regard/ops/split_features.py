"""Split the features of tokens into two tensors: gradients that a kernel wrote side by side are joined without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.transforms import needs_plain_ops


def split_features(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the first features of x (b h n d), and the others."""
    if torch.compiler.is_compiling() or needs_plain_ops() or not (torch.is_grad_enabled() and x.requires_grad):
        return x[..., :first], x[..., first:]
    return _Split.apply(x, first)


def joined_features(a: Tensor, b: Tensor) -> Tensor:
    """Return a and b (b h n d) as one tensor: without a copy where the features of b follow those of a in memory."""
    width = a.shape[-1] + b.shape[-1]
    behind = a.data_ptr() + a.shape[-1] * a.element_size()
    together = a.dtype == b.dtype and a.stride() == b.stride() and b.data_ptr() == behind and a.stride(-1) == 1
    # one storage: tensors of two can be neighbours by chance
    if not together or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return torch.cat([a, b], -1)
    return a.as_strided((*a.shape[:-1], width), a.stride())


class _Split(torch.autograd.Function):
    """The split for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return x[..., :first], x[..., first:]

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        if torch.is_grad_enabled():  # create_graph=True: the gradient will be differentiated once more
            return torch.cat([a, b], -1), None
        return joined_features(a, b), None
