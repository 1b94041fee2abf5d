"""The product of a matrix over positions, or of its lower triangle, and of tokens (n ...): gradients without copies or sums.

Strips of a triangle are multiplied into their places in the result, so that what is above them is never touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.budget import budget
from regard.transforms import differentiable_grads


def position_product(weight: Tensor, x: Tensor, triangle: bool) -> Tensor:
    """Return weight x of weights (n n) and tokens x (n c), by the lower triangle of the weights alone if `triangle`."""
    return _PositionProduct.apply(weight, x, triangle)


def _strips(n: int, triangle: bool, device: torch.device) -> list[tuple[int, int]]:
    """Return the first row of every strip of n rows, and the one behind it; one strip unless they are of a triangle."""
    size = budget(device).triangle_rows if triangle else max(1, n)
    return [(low, min(low + size, n)) for low in range(0, n, size)]


def _plain(weight: Tensor, x: Tensor, triangle: bool) -> Tensor:
    """Compute the product by differentiable operations: the definition."""
    weight = weight.to(x.dtype)
    return (weight.tril() if triangle else weight) @ x


class _PositionProduct(torch.autograd.Function):
    """The product for autograd, in the type of x."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, triangle: bool) -> Tensor:
        ctx.triangle = triangle
        made = weight.to(x.dtype)
        made = made.tril() if triangle else made
        ctx.save_for_backward(weight, x, made)
        out = torch.empty_like(x)
        for low, high in _strips(len(x), triangle, x.device):
            torch.mm(made[low:high, :high], x[:high], out=out[low:high])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, made = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            found = differentiable_grads(lambda w, y: (_plain(w, y, ctx.triangle),), (weight, x), (grad,))
            return *found, None
        dx, dw = torch.empty_like(x), torch.zeros_like(made) if ctx.triangle else torch.empty_like(made)
        for low, high in _strips(len(x), ctx.triangle, x.device):
            torch.mm(made[low:, low:high].mT, grad[low:], out=dx[low:high])
            torch.mm(grad[low:high], x[:high].mT, out=dw[low:high, :high])
        dw = dw.tril_() if ctx.triangle else dw
        return dw.to(weight.dtype), dx, None
