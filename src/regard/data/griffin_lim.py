"""Samples from log-mel energies: non-negative powers behind the filters, then phases by Griffin and Lim's iterations.

The inverse of `speech_features.log_mel`, as far as there is one: filters lose detail and energies have no phases.
Letters: n samples, t windows, s samples of a window, f mel filters, k frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.checks import need
from regard.data.speech_features import PREEMPHASIS, mel_filters, window_sizes
from regard.data.wav_files import Recording

LEAST_POWER = 1e-12
ECHO = 512  # samples after which an emphasised one has faded: 0.97^512 < 1e-6
MOMENTUM = 0.99  # Perraudin, Balazs and Sondergaard 2013
PEAK = 0.8  # of the loudest sample that is written


def mel_powers(energies: Tensor, filters: Tensor, rounds: int = 100) -> Tensor:
    """Find powers p >= 0 (t k) whose filtered sums are nearest to energies (t f), by least squares with filters (f k).

    Multiplicative updates p <- p (e F) / (p F' F), which never go below 0 and never increase the error. Lee and Seung 2000.
    """
    need("rounds", rounds)
    pull = energies @ filters
    square = filters.mT @ filters
    powers = pull.clamp_min(LEAST_POWER)
    for _ in range(rounds):
        powers = powers * pull / (powers @ square).clamp_min(LEAST_POWER)
    return powers


def griffin_lim(magnitudes: Tensor, rate: int, *, rounds: int = 60, seed: int = 0) -> Tensor:
    """Find samples (n) whose windows have nearly these magnitudes (t k), with random first phases of a seed.

    A round makes samples of the spectrum by overlapping windows, and takes the phases of those samples. Griffin and Lim 1984,
    with the momentum of Perraudin et al. 2013.
    """
    need("rounds", rounds)
    size, hop = window_sizes(rate)
    shape = torch.hann_window(size, periodic=False, dtype=magnitudes.dtype) ** 0.85
    dice = torch.Generator().manual_seed(seed)
    angles = 2 * torch.pi * torch.rand(magnitudes.shape, generator=dice, dtype=magnitudes.dtype)
    spectrum, before = torch.polar(magnitudes, angles), None
    for _ in range(rounds):
        now = _analysed(_overlapped(spectrum, shape, hop), shape, hop, magnitudes.shape[1])
        ahead = now if before is None else now + MOMENTUM * (now - before)
        spectrum, before = torch.polar(magnitudes, ahead.angle()), now
    return _overlapped(spectrum, shape, hop)


def _overlapped(spectrum: Tensor, shape: Tensor, hop: int) -> Tensor:
    """Add up the windows of a spectrum (t k): the samples (n) nearest to it by least squares."""
    size, t = len(shape), len(spectrum)
    parts = torch.fft.irfft(spectrum)[:, :size] * shape
    n = (t - 1) * hop + size
    weights = shape.square().expand(t, -1)
    both = torch.stack([parts.mT, weights.mT])
    sums, over = F.fold(both, (1, n), (1, size), stride=(1, hop)).flatten(1)
    return sums / over.clamp_min(1e-3)


def _analysed(samples: Tensor, shape: Tensor, hop: int, bins: int) -> Tensor:
    return torch.fft.rfft(samples.unfold(0, len(shape), hop) * shape, 2 * (bins - 1))


def deemphasised(samples: Tensor) -> Tensor:
    """Undo the emphasis of high frequencies, x_i - 0.97 x_(i-1), over samples (n)."""
    echo = PREEMPHASIS ** torch.arange(ECHO - 1, -1, -1, dtype=samples.dtype)
    return F.conv1d(F.pad(samples, (ECHO - 1, 0))[None, None], echo[None, None])[0, 0]


def wav_of_mel(
    mel: Tensor, rate: int, *, low: float = 20.0, high: float | None = None, rounds: int = 60, loud: bool = True
) -> Recording:
    """Make a recording of log-mel energies (t f) as `log_mel` computes them at this rate; `loud` scales its peak to 0.8."""
    if mel.dim() != 2 or not len(mel) or not mel.isfinite().all():
        raise ValueError(f"log-mel energies are finite numbers of shape (windows, filters), not of {tuple(mel.shape)}")
    size, _ = window_sizes(rate)
    transform = 1 << (size - 1).bit_length()
    filters = mel_filters(mel.shape[1], transform, rate, low, rate / 2 if high is None else high).float()
    powers = mel_powers(mel.detach().float().cpu().exp(), filters)
    samples = deemphasised(griffin_lim(powers.sqrt(), rate, rounds=rounds))
    peak = float(samples.abs().max())
    return Recording(samples * (PEAK / peak) if loud and peak > 0 else samples, rate)
