"""Schedules of scheduled sampling: the probability of a true token at an update. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable

from regard.text import unknown


def linear_decay(step: float, steps: float, floor: float = 0.0) -> float:
    """Fall from 1 to `floor` in so many steps, in a line."""
    return 1 - (1 - floor) * min(1.0, step / steps)


def exponential_decay(step: float, k: float) -> float:
    """Compute k ** step, k < 1."""
    return k**step


def inverse_sigmoid_decay(step: float, k: float) -> float:
    """Compute k / (k + exp(step / k)), k >= 1: high at first, half at k log k, low at last."""
    return 1 / (1 + math.exp(min(step / k - math.log(k), 700.0)))


def _exponentially(step: float, steps: float, floor: float) -> float:
    return floor + (1 - floor) * exponential_decay(step, 0.01 ** (1 / steps))  # a hundredth is left at the end


def _sigmoidally(step: float, steps: float, floor: float) -> float:
    """Reach the middle at half of the steps: k log k = steps / 2, by Newton's method for z = log k."""
    half = steps / 2
    z = 1.0 + math.log1p(half)
    for _ in range(50):
        z -= (z * math.exp(z) - half) / (math.exp(z) * (1 + z))
    return floor + (1 - floor) * inverse_sigmoid_decay(step, math.exp(z))


# by name, called as schedule(step, steps, floor): from about 1 to about `floor`
SAMPLING_SCHEDULES: dict[str, Callable[[float, float, float], float]] = {
    "linear": linear_decay,
    "exponential": _exponentially,
    "inverse_sigmoid": _sigmoidally,
}


def truth_probability(schedule: str, step: float, steps: float, floor: float = 0.0) -> float:
    """Compute the probability of a true token at an update, by the name of the schedule."""
    if schedule not in SAMPLING_SCHEDULES:
        raise ValueError(unknown("there is no schedule of true tokens", schedule, SAMPLING_SCHEDULES))
    if not 0 <= floor <= 1 or steps <= 0 or step < 0:
        raise ValueError(f"step >= 0, steps > 0 and floor in [0, 1] are needed, not {step!r}, {steps!r} and {floor!r}")
    return SAMPLING_SCHEDULES[schedule](step, steps, floor)
