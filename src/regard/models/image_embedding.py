"""Embeddings of images: patches, or cells of a convolution's feature map, become tokens, row by row, with positions added.

Letters: b batch, c channels, n tokens, w width of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.blocks.conv_block import ConvNet
from regard.checks import need
from regard.mixers.places import PaddingMask, Places
from regard.mixers.position_interface import Positions
from regard.mixers.state import State
from regard.models.embedding import Embedding


class ImageEmbedding(Embedding):
    """Map an image (b c height width) to tokens (b n w): the cells of a grid, row by row, behind `front` learned vectors.

    A subclass makes the grid: `features` gives (b w rows columns).
    """

    def __init__(
        self, channels: int, width: int, *, positions: Positions | None = None, front: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__(width, positions=positions, dropout=dropout)
        self.front = nn.Parameter(torch.randn(front, width) * 0.02) if need("front", front, 0) else None
        self.channels = need("channels", channels)

    def features(self, x: Tensor) -> Tensor:
        """Return the grid (b w rows columns) of an image."""
        raise NotImplementedError

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the grid of an image of this size."""
        raise NotImplementedError

    def check_image(self, x: Tensor) -> None:
        """Refuse what is no image of these channels."""
        if x.dim() != 4 or x.shape[1] != self.channels or not x.is_floating_point():
            needed = f"(batch, {self.channels}, height, width)"
            raise ValueError(f"an image has numbers of shape {needed}, not {x.dtype} of shape {tuple(x.shape)}")

    def vectors(self, x: Tensor) -> Tensor:
        tokens = self.features(x).flatten(2).mT
        if self.front is None:
            return tokens
        front = self.front.to(tokens.dtype).expand(len(tokens), -1, -1)
        return torch.cat([front, tokens], 1)

    def places(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        after: State | None = None,
        *,
        packed: bool = False,  # noqa: ARG002
    ) -> Places:
        """Make the places of the tokens of an image."""
        self.check_image(x)
        if valid is not None or after is not None:
            raise ValueError("an image is read whole: it has no padding and nothing before it")
        rows, columns = self.grid(x.shape[2], x.shape[3])
        front = 0 if self.front is None else len(self.front)
        tokens = x.new_empty(x.shape[0], front + rows * columns)
        return Places.of(tokens)

    def forward(self, x: Tensor, valid: PaddingMask = None, after: State | None = None) -> Tensor:
        places = valid if isinstance(valid, Places) else self.places(x, valid, after)
        y = self.vectors(x)
        if self.positions is not None:
            y = self.positions.add(y, places)
        return self.drop(y)


class Patches(ImageEmbedding):
    """An image (b c height width) cut into rectangles, each a token, row by row: (b n w), n = (height / side) (width / side).

    `side` is that of a square, or (rows, columns) of pixels. An image must have whole patches, unless `fill` puts zeros below and
    to the right of it. `front` learned vectors precede the tokens, with positions of their own, as ViT's class token does: then
    n is greater by so many. Dosovitskiy et al. 2020, arXiv:2010.11929.

    `channels` is c, `width` w; `positions` are of the kind that is added to tokens, `dropout` is that of the sums.

    >>> import torch
    >>> from regard.models import Patches
    >>> tuple(Patches(3, 4, 16)(torch.randn(2, 3, 8, 12)).shape)
    (2, 6, 16)
    """

    def __init__(
        self,
        channels: int,
        side: int | tuple[int, int],
        width: int,
        *,
        positions: Positions | None = None,
        front: int = 0,
        fill: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(channels, width, positions=positions, front=front, dropout=dropout)
        self.sides = (need("side", side), side) if isinstance(side, int) else (need("side", side[0]), need("side", side[1]))
        self.fill = fill
        self.map = nn.Conv2d(channels, width, self.sides, stride=self.sides)

    def features(self, x: Tensor) -> Tensor:
        lacking = [-size % side for size, side in zip(x.shape[2:], self.sides, strict=True)]
        if any(lacking):
            x = pad(x, (0, lacking[1], 0, lacking[0]))
        return self.map(x)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = (-(-size // side) for size, side in zip((height, width), self.sides, strict=True))
        return rows, columns

    def check_image(self, x: Tensor) -> None:
        shaped = x.dim() == 4 and x.shape[1] == self.channels and x.is_floating_point()
        whole = shaped and (self.fill or not any(size % side for size, side in zip(x.shape[2:], self.sides, strict=True)))
        if not whole:
            high, wide = self.sides
            divisible = (
                "" if self.fill else f", both divisible by {high}" if high == wide else f", divisible by {high} and {wide}"
            )
            needed = f"(batch, {self.channels}, height, width){divisible}"
            raise ValueError(f"an image has numbers of shape {needed}, not {x.dtype} of shape {tuple(x.shape)}")


class ConvTokens(ImageEmbedding):
    """Cells of the feature map of a convolution net, each a token, row by row: (b c height width) -> (b n w).

    `net` is a stem of a few layers or a whole CNN; a linear map gives its channels the width of a token.

    `channels` are those of an image, `width` is w, `positions` are added to tokens, `front` learned vectors precede them,
    `dropout` is that of the sums.

    >>> import torch
    >>> from regard.blocks import conv_stem
    >>> from regard.models import ConvTokens
    >>> tuple(ConvTokens(3, conv_stem(3, 16), 16, front=1)(torch.randn(1, 3, 8, 8)).shape)
    (1, 5, 16)
    """

    def __init__(
        self,
        channels: int,
        net: ConvNet,
        width: int,
        *,
        positions: Positions | None = None,
        front: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(channels, width, positions=positions, front=front, dropout=dropout)
        self.net = net
        self.map = nn.Conv2d(net.channels, width, 1)

    def features(self, x: Tensor) -> Tensor:
        return self.map(self.net(x))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = self.net.size(height), self.net.size(width)
        if min(rows, columns) < 1:
            raise ValueError(f"nothing is left of an image of {height} x {width} pixels behind these convolutions: use fewer")
        return rows, columns


class ImageReader(nn.Module):
    """Classify images without layers over tokens: an embedding that is a whole CNN, and a head. (b c h w) -> (b classes).

    `embed` is the embedding, `head` the head.

    >>> import torch
    >>> from regard.blocks import conv_stages
    >>> from regard.models import ConvTokens, ImageReader, PerSequence
    >>> model = ImageReader(ConvTokens(3, conv_stages(3, first=4, stages=2, blocks=1), 16), PerSequence(16, 10))
    >>> tuple(model(torch.randn(2, 3, 8, 8)).shape)
    (2, 10)
    """

    def __init__(self, embed: ImageEmbedding, head: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = embed, head

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.head(self.embed(x, valid), None)
