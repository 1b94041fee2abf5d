"""Learning-rate schedules: factors of the peak rate, as pure functions of the update, without state."""

from __future__ import annotations

import math
from collections.abc import Callable

from regard.config import Config
from regard.text import unknown


def lr_factor(config: Config, step: int) -> float:
    """Return the factor of `lr` at an update, counted from 1. All schedules rise linearly during `warmup` updates."""
    if config.schedule not in LR_SCHEDULES:
        raise ValueError(unknown("there is no schedule", config.schedule, LR_SCHEDULES))
    if step < 1:
        raise ValueError(f"updates are counted from 1, not from {step!r}")
    if step < config.warmup:
        return step / config.warmup
    return LR_SCHEDULES[config.schedule](config, step)


def _constant(config: Config, step: int) -> float:  # noqa: ARG001 - a schedule takes a step
    return 1.0


def _linear(config: Config, step: int) -> float:
    """Decay linearly to 0 at the last update."""
    return 1 - _past(config, step)


def _cosine(config: Config, step: int) -> float:
    """Decay to 0 at the last update by a half cosine (Loshchilov and Hutter 2016, arXiv:1608.03983, without restarts)."""
    return (1 + math.cos(math.pi * _past(config, step))) / 2


def _inverse_sqrt(config: Config, step: int) -> float:
    """Decay as min(step / warmup, sqrt(warmup / step)): the shape of Vaswani et al. 2017, arXiv:1706.03762, with peak 1."""
    return math.sqrt(max(config.warmup, 1) / step)


def _past(config: Config, step: int) -> float:
    """Return the fraction of updates done since the end of the warm-up."""
    return min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))


LR_SCHEDULES: dict[str, Callable[[Config, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
}
