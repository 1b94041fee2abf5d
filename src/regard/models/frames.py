"""Windows of speech to tokens: convolutions that halve their number, and see padding as if it were absent.

Letters: b batch, t windows, f features, n tokens, w width, c channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.checks import check_dense, check_valid, need
from regard.mixers.places import PaddingMask, Places, mask_padding, pooled_valid
from regard.mixers.position_interface import Positions
from regard.mixers.state import State
from regard.models.embedding import Embedding


class FramePlaces(Places):
    """Places of the tokens that windows become, which also hold those of the windows."""

    def __init__(self, tokens: Places, windows: Places) -> None:
        super().__init__(tokens._at, tokens.valid, tokens.start, packed=True)
        self.windows = windows


class Frames(Embedding):
    """Embed windows of speech (b t f) as fewer tokens (b n w), n = ceil(t / 2^halvings), by convolutions with a stride of 2.

    Each convolution sees one window to either side, and zeros beyond the ends of a row: a token depends on `reach` windows to
    either side of its own. Without `channels` it is one over time, whose channels are the features. With `channels` it is one
    over time and features, of so many maps, which halves both: a voice that is higher is the same picture a few features up.
    `scale` multiplies tokens by sqrt(w), as those of a vocabulary are: without it they are a tenth of what the first block adds
    to them, and a Conformer learns the letters long before the sounds.
    Padding may lie anywhere and is as if absent; real tokens come to the front.
    """

    def __init__(
        self,
        features: int,
        width: int,
        *,
        halvings: int = 2,
        channels: int = 0,
        scale: bool = False,
        positions: Positions | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(width, positions=positions, dropout=dropout)
        self.features = need("features", features)
        self.rate = 2 ** need("halvings", halvings, 0, 4)
        self.reach = self.rate - 1
        self.channels = need("channels", channels, 0)
        self.scale = math.sqrt(width) if scale else 1.0
        if channels and not halvings:
            raise ValueError("channels are those of the convolutions that halve the windows: halvings=0 has none")
        self.convolutions = nn.ModuleList(self._convolutions(halvings))
        self.map = nn.Linear(channels * -(-features // self.rate) if channels else width if halvings else features, width)

    def _convolutions(self, halvings: int) -> list[nn.Module]:
        if self.channels:
            return [nn.Conv2d(self.channels if i else 1, self.channels, 3, stride=2, padding=1) for i in range(halvings)]
        return [nn.Conv1d(self.width if i else self.features, self.width, 3, stride=2, padding=1) for i in range(halvings)]

    def places(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        after: State | None = None,
        *,
        packed: bool = False,
    ) -> Places:
        """Make the places of the tokens of checked windows x (b t f)."""
        check_dense(x, "windows")
        if x.dim() != 3 or x.shape[-1] != self.features or not x.is_floating_point():
            needed = f"(batch, windows, {self.features})"
            raise ValueError(f"windows are numbers of shape {needed}, not {x.dtype} of shape {tuple(x.shape)}")
        if after is not None:
            raise ValueError("windows are embedded from the first one on: they follow no state")
        check_valid(valid, x.shape[0], x.shape[1], "the windows")
        count = -(-x.shape[1] // self.rate)
        real = None if valid is None else torch.arange(count, device=x.device) * self.rate < valid.sum(1, keepdim=True)
        tokens = Places.of(x[:, :count], real, packed=True)
        return FramePlaces(tokens, Places.of(x, valid, packed=packed))

    def forward(self, x: Tensor, valid: PaddingMask = None, after: State | None = None) -> Tensor:
        """Return tokens (b n w), with zeros at padding. `valid` is a mask (b t) of the windows, or the `places` of x."""
        places = valid if isinstance(valid, FramePlaces) else self.places(x, None if isinstance(valid, Places) else valid, after)
        assert isinstance(places, FramePlaces)
        windows = places.windows
        y, real = self.unpadded(x, windows.valid), windows.valid
        if (order := windows.unpad_order) is not None:
            y, real = y.gather(1, order.there[..., None].expand_as(y)), order.real
        y = y[:, None] if self.channels else y.mT  # (b c t f), (b f t)
        for convolution in self.convolutions:
            y = convolution(y).relu()
            real = pooled_valid(real, 2)
            if real is not None:
                y = y.masked_fill(~(real[:, None, :, None] if self.channels else real[:, None]), 0)
        y = self.map(y.transpose(1, 2).flatten(2) if self.channels else y.mT)
        if self.scale != 1:
            y = y * self.scale
        if self.positions is not None:
            y = self.positions.add(y, places)
        return mask_padding(self.drop(y), places.valid)
