"""Ways to see what a mechanism does: its attention matrix, how far that is from softmax's, how much tokens move outputs."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.mixers.attention import Attention, attend
from regard.mixers.base import Core, Places
from regard.mixers.estimation import Estimator, relative_errors


def attention_matrix(core: Core, q: Tensor, k: Tensor, *, causal: bool, valid: Tensor | None = None) -> Tensor:
    """A (b h n m) with out = A v, for a core that is linear in v: with the identity for v, the output is A."""
    b, g, m, _ = k.shape
    one = torch.eye(m, dtype=k.dtype, device=k.device).repeat(1, core.streams)  # a token's streams count together
    return attend(q, k, one.expand(b, g, *one.shape), core, causal=causal, valid=valid, query_valid=None if causal else valid)


class Estimation(NamedTuple):
    """Relative errors of attention weights: || A - exact A || / || exact A || over all queries."""

    error: float
    of_equal_weights: float  # the same for equal weights: what knowing nothing costs


@torch.no_grad()
def estimation_error(
    mixer: Attention | Core, x: Tensor, k: Tensor | None = None, *, causal: bool | None = None, valid: Tensor | None = None
) -> Estimation:
    """Measure how far the weights of a layer or core are from the exact attention that it estimates, on your own data.

    A layer takes tokens x (b n w); a core takes queries x (b h n d) and keys k (b g m d). The exact attention is the softmax
    of q . k / sqrt(d); for a core that estimates another one, such as rfa (cosines), that one. `causal` is the mixer's own
    form unless given, `valid` (b m) is True at real tokens. Makes the whole matrix: n m numbers for each head.
    """
    core, q = mixer.core if isinstance(mixer, Attention) else mixer, x
    if isinstance(mixer, Attention):
        if k is not None or mixer.dims.cross:
            raise ValueError("a layer takes the tokens x (b n w) alone; for cross attention give its core q and k")
        q, k, _ = mixer.heads(x, Places.of(x, valid))
    if k is None:
        raise ValueError("a core takes queries (b h n d) and keys (b g m d): give k")
    if core.streams > 1 or core.rate > 1 or core.ignores:
        raise ValueError(f"{core.name} does not weigh keys by one query and one key per token: there is nothing to compare")
    causal = core.dims.causal if causal is None else causal
    found, exact, seen = attention_matrix(core, q, k, causal=causal, valid=valid), *_exact(core, q, k, causal, valid)
    return Estimation(*relative_errors(found, exact, seen))


def _exact(core: Core, q: Tensor, k: Tensor, causal: bool, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights (b h n m) that a core estimates, and which pairs are seen; queries at padding see nothing."""
    k = k[..., : core.dims.d].repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = core.exact(q, k) if isinstance(core, Estimator) else q @ k.mT * core.dims.d**-0.5
    seen = torch.ones_like(scores, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    if valid is not None:
        seen = seen & valid[:, None, None] & valid[:, None, :, None]
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0), seen


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
