"""Features of recordings: log-mel energies, cepstra (MFCC) and their slopes, in windows of 25 ms every 10 ms.

A window depends on its own samples alone, so that features of a recording that is still growing are those of the whole.
Letters: b recordings, n samples, t windows, s samples of a window, f features.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.checks import need

WINDOW, HOP = 0.025, 0.010  # seconds
PREEMPHASIS = 0.97
ENERGY_FLOOR = 1e-10
DECIBEL = math.log(10) / 10  # of a log energy


def window_sizes(rate: int) -> tuple[int, int]:
    """Return the samples of a window, and from one window to the next."""
    return round(WINDOW * rate), round(HOP * rate)


def windows(samples: Tensor, rate: int) -> Tensor:
    """Cut samples (n) into overlapping windows (t s). The last ones that fill no window are left out; t is at least 1."""
    if samples.dim() != 1 or not samples.is_floating_point():
        raise ValueError(f"samples are numbers of shape (n,), not {samples.dtype} of shape {tuple(samples.shape)}")
    size, hop = window_sizes(need("rate", rate, 1000))
    if len(samples) < size:
        samples = F.pad(samples, (0, size - len(samples)))
    return samples.unfold(0, size, hop)


def log_mel(samples: Tensor, rate: int, *, mels: int = 40, low: float = 20.0, high: float | None = None) -> Tensor:
    """Compute log energies (t mels) of triangular filters that are equally wide on the mel scale, from `low` to `high` Hz.

    Each window loses its mean, is emphasised (x_i - 0.97 x_(i-1)), gets Povey's window, a Hann window to the power of 0.85, and
    the squared magnitudes of its Fourier transform are summed by the filters. `high` is half of the rate unless given.
    """
    parts = windows(samples, rate)
    parts = parts - parts.mean(1, keepdim=True)
    before = torch.cat([parts[:, :1], parts[:, :-1]], 1)
    size = parts.shape[1]
    shape = torch.hann_window(size, periodic=False, dtype=parts.dtype, device=parts.device) ** 0.85
    transform_size = 1 << (size - 1).bit_length()
    spectrum = torch.fft.rfft((parts - PREEMPHASIS * before) * shape, transform_size)
    power = spectrum.real.square() + spectrum.imag.square()
    top = rate / 2 if high is None else high
    filters = mel_filters(mels, transform_size, rate, low, top).to(power)
    return (power @ filters.mT).clamp_min(ENERGY_FLOOR).log()


def mfcc(
    samples: Tensor, rate: int, *, cepstra: int = 13, mels: int = 40, low: float = 20.0, high: float | None = None
) -> Tensor:
    """Compute cepstra (t cepstra): the first coefficients of the cosine transform (DCT-II, orthonormal) of log-mel energies."""
    if need("cepstra", cepstra) > mels:
        raise ValueError(f"{mels} mel filters have {mels} cepstra at most, not {cepstra}")
    energies = log_mel(samples, rate, mels=mels, low=low, high=high)
    k = torch.arange(cepstra, dtype=torch.float64)[:, None]
    i = torch.arange(mels, dtype=torch.float64)
    waves = (math.pi / mels * (i + 0.5) * k).cos() * math.sqrt(2 / mels)
    waves[0] /= math.sqrt(2)
    return energies @ waves.mT.to(energies)


@lru_cache(maxsize=16)
def mel_filters(mels: int, transform_size: int, rate: int, low: float, high: float) -> Tensor:
    """Make triangular filters (mels, transform_size / 2 + 1): each rises from the centre before it and falls to the next one."""
    if not 0 <= low < high <= rate / 2:
        raise ValueError(f"filters lie between 0 and {rate / 2:g} Hz, half of the rate, not from {low:g} to {high:g}")
    edges = torch.linspace(_mel(low), _mel(high), need("mels", mels) + 2, dtype=torch.float64)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    bins = torch.arange(transform_size // 2 + 1, dtype=torch.float64) * rate / transform_size
    left, centre, right = (x[:, None] for x in (hertz[:-2], hertz[1:-1], hertz[2:]))
    rise = (bins - left) / (centre - left)
    fall = (right - bins) / (right - centre)
    return torch.minimum(rise, fall).clamp_min(0)


def _mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def slopes(x: Tensor, reach: int = 2) -> Tensor:
    """Compute the slope of every feature (t f) over `reach` windows to each side, by least squares; ends are repeated."""
    need("reach", reach)
    line = F.pad(x.mT[None], (reach, reach), mode="replicate")[0].mT
    steps = range(1, reach + 1)
    n = len(x)
    apart = [k * (line[reach + k : reach + k + n] - line[reach - k : reach - k + n]) for k in steps]
    return torch.stack(apart).sum(0) / (2 * sum(k * k for k in steps))


def with_slopes(x: Tensor) -> Tensor:
    """Append the slopes of features (t f), and the slopes of those: (t 3f)."""
    first = slopes(x)
    return torch.cat([x, first, slopes(first)], 1)


def centred(x: Tensor, valid: Tensor | None = None, *, spread: bool = True) -> Tensor:
    """Subtract the mean of every feature (t f) or (b t f) over the windows, and divide by its standard deviation with `spread`.

    Windows that are not `valid` (b t) count for nothing, and are 0 in the result.
    """
    real = x.new_ones(x.shape[-2], 1) if valid is None else valid.to(x)[..., None]
    count = real.sum(-2, keepdim=True).clamp_min(1)
    away = (x - (x * real).sum(-2, keepdim=True) / count) * real
    if not spread:
        return away
    return away / (away.square().sum(-2, keepdim=True) / count).sqrt().clamp_min(1e-3)


def trimmed(x: Tensor, decibels: float, margin: int = 3) -> Tensor:
    """Cut windows of log energies (t f) off both ends that are more than `decibels` below the loudest, but `margin` of them."""
    energy = x.logsumexp(1)
    loud = (energy >= energy.max() - decibels * DECIBEL).nonzero()[:, 0]
    return x[max(0, int(loud[0]) - margin) : int(loud[-1]) + 1 + margin]


def raised_floor(x: Tensor, decibels: Tensor | float, valid: Tensor | None = None) -> Tensor:
    """Add even noise to log energies (t f) or (b t f), `decibels` below the loudest of a recording: a number, or (b 1 1).

    What lies below is then alike in a quiet room and in a noisy one. Windows that are not `valid` (b t) are never the loudest.
    """
    heard = x if valid is None else x.masked_fill(~valid[..., None], -torch.inf)
    return torch.logaddexp(x, heard.amax((-1, -2), keepdim=True) - decibels * DECIBEL)
