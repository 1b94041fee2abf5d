"""Two ways to see what a mechanism does: its attention matrix, and how much each token moves each output."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.mixers.attention import attend
from regard.mixers.base import Core


def attention_matrix(core: Core, q: Tensor, k: Tensor, *, causal: bool, valid: Tensor | None = None) -> Tensor:
    """A (b h n m) with out = A v, for a core that is linear in v: with the identity for v, the output is A."""
    b, g, m, _ = k.shape
    one = torch.eye(m, dtype=k.dtype, device=k.device).repeat(1, core.streams)  # a token's streams count together
    return attend(q, k, one.expand(b, g, *one.shape), core, causal=causal, valid=valid, query_valid=None if causal else valid)


@torch.no_grad()
def has_weights(core: Core, n: int = 4) -> bool:
    """Is its output a weighted sum of the values, and of nothing else? Ask it: without values, nothing comes out."""
    dims, own = core.dims, next(chain(core.parameters(), core.buffers()), torch.empty(0))  # its device and dtype
    q = torch.ones(1, dims.heads, n, dims.d * core.streams).to(own)
    k, v = (make(1, dims.g, n, size).to(own) for make, size in zip((torch.ones, torch.zeros), core.sizes, strict=True))
    return not attend(q, k, v, core, causal=dims.causal).any()


def sampled(core: Core, x: Tensor) -> tuple[Tensor, Tensor]:
    """x (b h n d) as queries and as keys of a core: a copy for every stream, and gates that stand half open."""
    q = x.repeat(1, 1, 1, core.streams)
    return q, pad(q, (0, core.gates))


def influence(mixer: nn.Module, x: Tensor, *, rows: int = 64) -> Tensor:
    """The Frobenius norm of dy_i / dx_j (n n), exact, for one sequence x (n w), of a mixer or a stack of them.

    Batch rows do not meet, so one backward pass over copies of x gives as many rows of the Jacobian.
    """
    n, w = x.shape
    with torch.no_grad():
        outputs = mixer(x[None]).shape[1]  # fewer than n where queries share an answer
    copies = x.detach().expand(min(rows, outputs * w), n, w).clone().requires_grad_()
    squares = x.new_zeros(outputs, n, dtype=torch.float64)  # the square of a faint influence is no zero
    for part in torch.arange(outputs * w, device=x.device).split(len(copies)):
        y = mixer(copies[: len(part)]).flatten(1)
        (grad,) = torch.autograd.grad(y.gather(1, part[:, None]).sum(), copies)
        squares.index_add_(0, part // w, grad[: len(part)].double().square().sum(-1))
    return squares.sqrt().to(x.dtype)
