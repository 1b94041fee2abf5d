"""Changes of recordings for training: speed, masked bands and stretches of time (SpecAugment).

Letters: b batch, t windows, f features, n samples.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.checks import need


def resized(samples: Tensor, count: int) -> Tensor:
    """Resample a recording (n) to `count` samples, band-limited: its Fourier series is cut off, or continued with zeros."""
    n = len(samples)
    if need("count", count) == n:
        return samples
    series = torch.fft.rfft(samples)
    kept = min(n, count) // 2 + 1
    return torch.fft.irfft(series[:kept], count) * (count / n)


def change_speed(samples: Tensor, factor: float) -> Tensor:
    """Play a recording (n) `factor` times as fast: n / factor samples, pitch included. Ko et al. 2015."""
    if factor <= 0:
        raise ValueError(f"a speed is above 0, not {factor!r}")
    return resized(samples, max(1, round(len(samples) / factor)))


def change_tempo(x: Tensor, factor: float) -> Tensor:
    """Run features (t f) `factor` times as fast, by linear interpolation: t / factor windows, where samples are not there."""
    if factor <= 0:
        raise ValueError(f"a speed is above 0, not {factor!r}")
    count = max(1, round(len(x) / factor))
    return F.interpolate(x.mT[None], count, mode="linear", align_corners=False)[0].mT


def spec_augment(
    x: Tensor,
    valid: Tensor | None = None,
    *,
    time_masks: int = 2,
    time_share: float = 0.1,
    bands: int = 2,
    band_width: int = 8,
) -> Tensor:
    """Set random stretches of time and bands of features (b t f) to 0, their mean. Park et al. 2019, arXiv:1904.08779.

    A stretch is up to `time_share` of the real windows of its row, a band up to `band_width` features; both may be empty, and
    `valid` (b t) tells which windows are real. Without the paper's warp of time. Reads no number from the device.
    """
    b, t, f = x.shape
    if not 0 <= time_share <= 1 or not 0 <= band_width <= f:
        raise ValueError(f"time_share is from 0 to 1 and band_width from 0 to {f}, not {time_share!r} and {band_width!r}")
    real = torch.ones(b, t, dtype=torch.bool, device=x.device) if valid is None else valid
    at = real.long().cumsum(1) - 1
    length = real.sum(1, keepdim=True).to(x.dtype)
    hidden = _stretches(at, length, (time_share * length).floor(), need("time_masks", time_masks, 0)) & real
    features = torch.arange(f, device=x.device).expand(b, f)
    whole = torch.full_like(length, f)
    silenced = _stretches(features, whole, torch.full_like(length, band_width), need("bands", bands, 0))
    return x.masked_fill(hidden[:, :, None] | silenced[:, None], 0)


def _stretches(at: Tensor, length: Tensor, longest: Tensor, count: int) -> Tensor:
    """Draw `count` stretches for each row, of 0 to `longest` (b 1) places within `length` (b 1); return which `at` lie in one."""
    width = (torch.rand(len(at), count, device=at.device) * (longest + 1)).floor()
    start = (torch.rand(len(at), count, device=at.device) * (length - width + 1)).floor()
    here = at[:, :, None]
    inside = (here >= start[:, None]) & (here < (start + width)[:, None])
    return inside.any(-1)
