"""Probe a mechanism: its attention matrix, the error of that matrix, and the influence of tokens on outputs."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.mixers.attend import attend
from regard.mixers.attention import Attention
from regard.mixers.base import Core, Places
from regard.mixers.estimation import Estimator, relative_errors


def attention_matrix(core: Core, q: Tensor, k: Tensor, *, causal: bool, valid: Tensor | None = None) -> Tensor:
    """Compute A (b h n m) with out = A v, for a core that is linear in v: with the identity for v, the output is A."""
    b, g, m, _ = k.shape
    one = torch.eye(m, dtype=k.dtype, device=k.device)
    one = one.repeat(1, core.streams)  # sums over the streams of a token
    v = one.expand(b, g, *one.shape)
    query_valid = None if causal else valid
    return attend(q, k, v, core, causal=causal, valid=valid, query_valid=query_valid)


class Estimation(NamedTuple):
    """Hold relative errors of attention weights: || A - exact A || / || exact A || over all queries."""

    error: float
    of_equal_weights: float  # the same for equal weights, as a baseline


@torch.no_grad()
def estimation_error(
    mixer: Attention | Core, x: Tensor, k: Tensor | None = None, *, causal: bool | None = None, valid: Tensor | None = None
) -> Estimation:
    """Measure how far the weights of a layer or core are from the exact attention that it estimates, on your own data.

    A layer takes tokens x (b n w); a core takes queries x (b h n d) and keys k (b g m d). The exact attention is the softmax
    of q . k / sqrt(d); for a core that estimates another one, such as rfa (cosines), that one. `causal` is the mixer's own
    form unless given, `valid` (b m) is True at real tokens. Makes the whole matrix: n m numbers for each head.
    """
    if not isinstance(mixer, Attention):
        core, q = mixer, x
    else:
        core = mixer.core
        if k is not None or mixer.dims.cross:
            raise ValueError("a layer takes the tokens x (b n w) alone; for cross attention give its core q and k")
        places = Places.of(x, valid)
        q, k, _ = mixer.heads(x, places)
    if k is None:
        raise ValueError("a core takes queries (b h n d) and keys (b g m d): give k")
    if core.streams > 1 or core.rate > 1 or core.ignores:
        raise ValueError(f"{core.name} does not weigh keys by one query and one key per token: there is nothing to compare")
    if causal is None:
        causal = core.dims.causal
    found = attention_matrix(core, q, k, causal=causal, valid=valid)
    exact, visible = _exact(core, q, k, causal, valid)
    errors = relative_errors(found, exact, visible)
    return Estimation(*errors)


def _exact(core: Core, q: Tensor, k: Tensor, causal: bool, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the weights (b h n m) that a core estimates, and the mask of visible pairs; rows of padding are False."""
    group = q.shape[1] // k.shape[1]
    k = k[..., : core.dims.d].repeat_interleave(group, 1)
    if isinstance(core, Estimator):
        scores = core.exact(q, k)
    else:
        scale = core.dims.d**-0.5
        scores = q @ k.mT * scale
    visible = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        visible = visible.tril()
    if valid is not None:
        visible = visible & valid[:, None, None] & valid[:, None, :, None]
    hidden = ~visible
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return weights.masked_fill(hidden, 0), visible


@torch.no_grad()
def has_weights(core: Core, n: int = 4) -> bool:
    """Return whether the output of a core is a weighted sum of its values: with zero values it must be zero."""
    dims = core.dims
    own = next(chain(core.parameters(), core.buffers()), torch.empty(0))  # for the device and dtype
    key_size, value_size = core.sizes
    q = torch.ones(1, dims.heads, n, dims.d * core.streams).to(own)
    k = torch.ones(1, dims.g, n, key_size).to(own)
    v = torch.zeros(1, dims.g, n, value_size).to(own)
    y = attend(q, k, v, core, causal=dims.causal)
    return not y.any()


def sampled(core: Core, x: Tensor) -> tuple[Tensor, Tensor]:
    """Turn x (b h n d) into queries and keys of a core: a copy for every stream, and gates with zero logits."""
    q = x.repeat(1, 1, 1, core.streams)
    return q, pad(q, (0, core.gates))


def influence(mixer: nn.Module, x: Tensor, *, rows: int = 64) -> Tensor:
    """Compute the Frobenius norms of dy_i / dx_j (n n) for one sequence x (n w) through a mixer or a stack.

    Batch rows are independent, so one backward pass over copies of x gives as many rows of the Jacobian.
    """
    n, w = x.shape
    with torch.no_grad():
        outputs = mixer(x[None]).shape[1]  # fewer than n where queries share an output
    numbers = outputs * w
    count = min(rows, numbers)
    copies = x.detach().expand(count, n, w).clone()
    copies.requires_grad_()
    squares = x.new_zeros(outputs, n, dtype=torch.float64)  # squares of small values do not underflow
    for part in torch.arange(numbers, device=x.device).split(count):
        y = mixer(copies[: len(part)]).flatten(1)
        chosen = y.gather(1, part[:, None])
        (grad,) = torch.autograd.grad(chosen.sum(), copies)
        norms = grad[: len(part)].double().square().sum(-1)
        squares.index_add_(0, part // w, norms)
    return squares.sqrt().to(x.dtype)
