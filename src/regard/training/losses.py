"""What a model loses: the surprise at what it should have said."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.batch import NO_LABEL
from regard.mixers.features import wide


class Loss(NamedTuple):
    """A sum, and over how many things: passes of different sizes add up to one update without weighing the small ones more."""

    total: Tensor  # summed
    over: Tensor  # how many it is summed over
    parts: dict[str, Tensor] = {}  # noqa: RUF012 - for the log: sums as well; never changed

    @property
    def mean(self) -> Tensor:
        return self.total / self.over.clamp_min(1)


def cross_entropy(scores: Tensor, target: Tensor, valid: Tensor | None = None, *, smoothing: float = 0.0) -> Loss:
    """Minus the log-probability of the target, summed over real ones: scores (... v), target (...).

    With smoothing s the target is (1 - s) of the truth and s of a uniform choice among all v (Szegedy et al. 2015,
    arXiv:1512.00567). A target of NO_LABEL is not counted. `parts["nll"]` is the loss without smoothing.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), not {smoothing!r}")
    target = _real(scores, target, valid).flatten()
    logs = wide(scores).log_softmax(-1).flatten(0, -2)
    count = (target != NO_LABEL).sum()
    plain = F.nll_loss(logs, target, ignore_index=NO_LABEL, reduction="sum")
    if not smoothing:
        return Loss(plain, count, {"nll": plain.detach()})
    total = (1 - smoothing) * plain - smoothing * logs.mean(-1).masked_fill(target == NO_LABEL, 0).sum()
    return Loss(total, count, {"nll": plain.detach()})


def by_step(scores: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Minus the log-probability at every step, shaped as the target (b m), 0 where there is none: what `cross_entropy` sums."""
    target = _real(scores, target, valid)
    logs = wide(scores).log_softmax(-1).flatten(0, -2)
    return F.nll_loss(logs, target.flatten(), ignore_index=NO_LABEL, reduction="none").view_as(target)


def perplexity(loss: Loss) -> Tensor:
    return torch.exp(loss.parts.get("nll", loss.total) / loss.over.clamp_min(1))


def _real(scores: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """The target, with NO_LABEL at padding."""
    if scores.shape[:-1] != target.shape:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} need a target of shape {tuple(scores.shape[:-1])}, not {tuple(target.shape)}"
        )
    return target if valid is None else target.masked_fill(~valid, NO_LABEL)
