"""Generator and discriminator of images of 32 x 32 pixels, with a layer over the cells of one feature map: SAGAN.

Every weight of both is divided by its largest singular value, as one step of the power method after each update estimates it
(Miyato et al. 2018, arXiv:1802.05957). The layer is attention of any row of the catalogue, a convolution of as many weights, or
left out. Zhang et al. 2018, arXiv:1805.08318.

Letters: b images, c channels, h height, w width of a feature map, z latent numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import cached

from regard.checks import need
from regard.mixers.dims import Dims
from regard.options import check_choice
from regard.spec import Spec

GAN_SIDE = 32  # pixels
MAP_SIDES = (16, 32)  # of the feature maps that can have a layer
HEAD_CHANNELS = 64  # of one head of attention
MAP_LAYERS = ("attention", "convolution", "none")


class MapLayer(nn.Module):
    """Add a learned share of what a layer makes of a feature map: x + gain * f(x), (b c h w) -> (b c h w); gain begins at 0.

    `kind` is "attention" (over all cells, by `mixer`) or "convolution": c to 2 c / 5 channels by 3 x 3, and back by 1 x 1, which
    has the 4 c^2 weights of attention.
    """

    def __init__(self, channels: int, kind: str = "attention", mixer: str = "softmax") -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(()))
        self.mix: nn.Module | None = None
        if kind == "attention":
            heads = max(1, channels // HEAD_CHANNELS)
            self.mix = Spec.of(mixer).build(Dims(channels, heads, max_len=GAN_SIDE**2))
            for part in list(self.mix.modules()):
                if isinstance(part, nn.Linear):
                    spectral_norm(part)
        else:
            hidden = max(1, round(0.4 * channels))
            self.net = nn.Sequential(_conv(channels, hidden, 3), nn.ReLU(), _conv(hidden, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.mix is None:
            return x + self.gain * self.net(x)
        y = self.mix(x.flatten(2).mT)
        return x + self.gain * y.mT.reshape(x.shape)


def _conv(channels: int, out: int, kernel: int) -> nn.Module:
    return spectral_norm(nn.Conv2d(channels, out, kernel, padding=kernel // 2))


class UpBlock(nn.Module):
    """Double height and width: two convolutions behind norms, and the input added: (b c h w) -> (b out 2h 2w)."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(out)])
        self.first, self.second, self.short = _conv(channels, out, 3), _conv(out, out, 3), _conv(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(functional.interpolate(self.norms[0](x).relu(), scale_factor=2))
        y = self.second(self.norms[1](y).relu())
        return y + functional.interpolate(self.short(x), scale_factor=2)


class DownBlock(nn.Module):
    """Two convolutions and the input added, with the mean of 2 x 2 cells behind them where `half`: (b c h w) -> (b out h' w')."""

    def __init__(self, channels: int, out: int, *, half: bool = True, bare: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.short = _conv(channels, out, 3), _conv(out, out, 3), _conv(channels, out, 1)
        self.halves, self.bare = half, bare  # bare: of pixels, which no activation is in front of

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x if self.bare else x.relu()).relu())
        y = y + self.short(x)
        return functional.avg_pool2d(y, 2) if self.halves else y


def _map_layers(kind: str, at: int, channels: int, mixer: str) -> nn.Module:
    check_choice("kind", kind, MAP_LAYERS)
    if at not in MAP_SIDES:
        raise ValueError(f"a layer is over a feature map of {' or '.join(map(str, MAP_SIDES))} cells a side, not {at}")
    return nn.Identity() if kind == "none" else MapLayer(channels, kind, mixer)


class ImageGenerator(nn.Module):
    """Make images (b colours 32 32) from -1 to 1 of latent numbers (b z).

    `channels` are those of the last feature map; the first has four times as many. `kind`, `mixer` and the side `at` of its map
    are those of the layer.
    """

    def __init__(
        self,
        colours: int,
        *,
        channels: int = 64,
        latent: int = 128,
        kind: str = "attention",
        mixer: str = "softmax",
        at: int = 16,
    ) -> None:
        super().__init__()
        c = need("channels", channels)
        self.latent, self.at = need("latent", latent), at
        self.start = spectral_norm(nn.Linear(latent, 4 * c * 16))
        self.blocks = nn.ModuleList([UpBlock(4 * c, 4 * c), UpBlock(4 * c, 2 * c), UpBlock(2 * c, c)])
        self.layer = _map_layers(kind, at, 2 * c if at == 16 else c, mixer)
        self.norm, self.end = nn.BatchNorm2d(c), _conv(c, colours, 3)

    def forward(self, z: Tensor) -> Tensor:
        with cached():  # one step of the power method a call
            x = self.start(z).view(len(z), -1, 4, 4)
            for block in self.blocks:
                x = block(x)
                if x.shape[-1] == self.at:
                    x = self.layer(x)
            return self.end(self.norm(x).relu()).tanh()


class ImageCritic(nn.Module):
    """Score images (b colours 32 32) as real, (b): the larger, the more real. Options are those of `ImageGenerator`."""

    def __init__(
        self, colours: int, *, channels: int = 64, kind: str = "attention", mixer: str = "softmax", at: int = 16
    ) -> None:
        super().__init__()
        c = need("channels", channels)
        self.at = at
        self.open = DownBlock(colours, c, half=False, bare=True)
        self.blocks = nn.ModuleList([DownBlock(c, 2 * c), DownBlock(2 * c, 4 * c), DownBlock(4 * c, 4 * c, half=False)])
        self.layer = _map_layers(kind, at, 2 * c if at == 16 else c, mixer)
        self.end = spectral_norm(nn.Linear(4 * c, 1))

    def forward(self, images: Tensor) -> Tensor:
        with cached():
            x = self.open(images)
            x = self.layer(x) if self.at == GAN_SIDE else x
            for block in self.blocks:
                x = block(x)
                if x.shape[-1] == self.at:
                    x = self.layer(x)
            return self.end(x.relu().mean((2, 3)))[:, 0]
