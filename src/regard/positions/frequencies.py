"""Frequencies of sinusoidal and rotary positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_base(base: float) -> float:
    """Return the base of the wavelengths, a number above 1."""
    number = isinstance(base, int | float) and not isinstance(base, bool)
    if not number or not 1 < base < math.inf:
        raise ValueError(f"base must be a number above 1, not {base!r}")
    return float(base)


def inverse_frequencies(d: int, base: float, device: torch.device) -> Tensor:
    """Return base^(-2f / d) for f = 0 .. d / 2 - 1, (d / 2) in float64: a buffer would be rounded with a half-precision model."""
    even = torch.arange(0, d, 2, dtype=torch.float64, device=device)
    rate = -math.log(base) / d
    return torch.exp(even * rate)
