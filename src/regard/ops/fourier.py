"""The Fourier transform of tokens over the sequence and the channels, its real part."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def fourier_mix(x: Tensor, norm: str) -> Tensor:
    """Return Re(F_n x F_w) of x (b n w), in the type of x.

    The waves of real numbers come in pairs, (k, l) and (-k, -l), with one real part: half of the channels is all.
    """
    if x.shape[1] == 0:
        return x
    half = torch.fft.rfft2(x.to(torch.promote_types(x.dtype, torch.float32)), dim=(1, 2), norm=norm).real
    w = x.shape[2]
    rest = half[:, :, 1 : w - w // 2].flip(1, 2).roll(1, 1)
    return torch.cat([half, rest], 2).to(x.dtype)


def fourier_mix_by_row(x: Tensor, count: Tensor, norm: str) -> Tensor:
    """Transform the first count (b) tokens of each row, zeros behind them. Rows of one length are transformed together."""
    order = count.argsort()
    sizes, rows = count[order].unique_consecutive(return_counts=True)
    parts = x[order].split(rows.tolist())
    n = x.shape[1]
    done = [pad(fourier_mix(part[:, :m], norm), (0, 0, 0, n - m)) for part, m in zip(parts, sizes.tolist(), strict=True)]
    return torch.cat(done)[order.argsort()]
