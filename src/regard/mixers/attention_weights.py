"""Attention weights of a layer: the matrix A with answers = A v, found by the values that a core is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regard.mixers.attend import attend
from regard.mixers.base import Core

CURVED = 0.05  # relative deviation from a straight line that no rounding explains: a norm of the answers has 0.5


def core_weights(core: Core, q: Tensor, k: Tensor, *, valid: Tensor | None = None, query_valid: Tensor | None = None) -> Tensor:
    """Compute A (b h n m) of queries q (b h n d) and keys k (b g m d), without dropout: what answers A v take of each value.

    Columns of the identity are the values, as many at a time as a value has numbers: the calls are those that the layer makes.
    What a core adds whatever the values are, as relative positions do, is no part of A. Rows are ceil(n / rate).
    """
    b, g, m, _ = k.shape
    e = core.dims.e
    causal = core.dims.causal
    asked, offset = (None, None) if causal else (query_valid, 0)

    def answers(values: Tensor) -> Tensor:
        v = values.repeat(1, core.streams).expand(b, g, m, e * core.streams)
        return attend(q, k, v, core, causal=causal, valid=valid, query_valid=asked, offset=offset)

    with _without_dropout(core):
        none = torch.zeros(m, e, dtype=k.dtype, device=k.device)
        added = answers(none)
        _check_linear(core, answers, added, none)
        one = torch.eye(m, dtype=k.dtype, device=k.device)
        found = [added[..., :0]]
        for columns in one.split(e, 1):
            count = columns.shape[1]
            part = torch.cat([columns, none[:, count:]], 1)
            found.append((answers(part) - added)[..., :count])
    return torch.cat(found, -1)


@torch.no_grad()
def _check_linear(core: Core, answers: Callable[[Tensor], Tensor], added: Tensor, none: Tensor) -> None:
    """Refuse a core whose answers are no weighted sums: with values of -2 times the size they must change by as much."""
    some = torch.arange(1, none.numel() + 1, device=none.device).sin().to(none.dtype).view_as(none)
    once, twice = answers(some) - added, answers(-2 * some) - added
    if (twice + 2 * once).abs().sum() > CURVED * once.abs().sum():
        raise ValueError(f"{core.name} has no attention weights: its answers are no sums of values by weights")


@contextmanager
def _without_dropout(core: Core) -> Iterator[None]:
    """Have a core answer as in evaluation, and put its mode back."""
    trained = [module for module in core.modules() if module.training]
    core.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
