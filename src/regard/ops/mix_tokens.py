"""Sums of tokens with weights for every position: the product of two tall matrices, and gradients that need no copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.tile.call import accumulator
from regard.transforms import transformed


def mix_tokens(weights: Tensor, x: Tensor) -> Tensor:
    """Return sum_n weights_nr x_ne (b g r e) of weights (b g n r) and tokens x (b g n e); b or g of weights may be 1.

    Both have one type; sums of half precision are float32.
    """
    if torch.compiler.is_compiling() or transformed():
        acc = accumulator(x.dtype)
        return weights.to(acc).mT @ x.to(acc)
    b, g, n, e = x.shape
    if weights.shape[0] != 1:
        flat = MixTokens.apply(weights.expand(b, g, -1, -1).flatten(0, 1), x.flatten(0, 1))
        return flat.unflatten(0, (b, g))
    apart = weights.shape[1]  # heads with weights of their own, or 1; rows and heads that share are columns of one product
    alike = g // apart
    columns = x.unflatten(1, (apart, alike)).permute(1, 3, 0, 2, 4)
    flat = MixTokens.apply(weights.squeeze(0), columns.reshape(apart, n, b * alike * e))
    sums = flat.unflatten(2, (b, alike, e)).permute(2, 0, 3, 1, 4)
    return sums.flatten(1, 2)


class MixTokens(torch.autograd.Function):
    """w^T x of w (h n r), x (h n e). Autograd would find the gradient of w transposed, and copy it."""

    @staticmethod
    def forward(w: Tensor, x: Tensor) -> Tensor:
        acc = accumulator(x.dtype)
        if acc != x.dtype and x.is_cuda:
            return torch.bmm(w.mT, x, out_dtype=acc)
        return w.to(acc).mT @ x.to(acc)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004 - torch names them
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        w, x = ctx.saved_tensors
        grad = grad.to(x.dtype)
        need_w, need_x = ctx.needs_input_grad
        return x @ grad.mT if need_w else None, w @ grad if need_x else None
