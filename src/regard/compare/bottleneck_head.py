"""The head of an auto-encoder: all labels of a sequence are read from one vector, each by its position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.mixers.dims import Dims
from regard.positions import Sinusoidal


class BottleneckHead(nn.Module):
    """Score the label of each position from the last vector of a sequence and the position's waves: (b n w) -> (b n c).

    Two layers of the model's width, as MAD's decoder has them. Poli et al. 2024, arXiv:2403.17844.
    """

    waves: Tensor

    def __init__(self, width: int, classes: int, length: int) -> None:
        super().__init__()
        waves = Sinusoidal(Dims(width, 1)).table(length, torch.device("cpu"))
        self.register_buffer("waves", waves.float(), persistent=False)
        layers = [(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)]
        self.decoder = nn.Sequential(
            *(part for layer in layers for part in layer), nn.LayerNorm(width), nn.Linear(width, classes)
        )

    def forward(self, y: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return scores at all positions; the last vector is that of the last real token."""
        if valid is None:
            code = y[:, -1:]
        else:
            places = torch.arange(y.shape[1], device=y.device)
            last = torch.where(valid, places, 0).amax(1)
            code = y.take_along_dim(last[:, None, None], 1)
        return self.decoder(code + self.waves[: y.shape[1]].to(y.dtype))
