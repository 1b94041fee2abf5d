"""Convolutions of images: blocks with a kernel, a stride, padding, pooling and a residual connection, and stages of them.

Letters: b batch, c channels, h height, w width of an image or a feature map.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from regard.blocks.feedforward import activate
from regard.checks import need
from regard.options import check_choice

GROUP_CHANNELS = 16  # channels of a group of norm="group"
POOLINGS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "max": lambda: nn.MaxPool2d(2),
    "mean": lambda: nn.AvgPool2d(2),
}
IMAGE_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(max(1, channels // GROUP_CHANNELS), channels),
    "none": lambda _: nn.Identity(),
}


class ConvBlock(nn.Module):
    """Convolutions, each with a norm, and an activation between them: (b c h w) -> (b c' h' w').

    With `residual` the input is added to what the last norm gives, through a convolution of kernel 1 where channels or stride
    change it: act(x + f(x)). He et al. 2015, arXiv:1512.03385. `stride` is that of the first convolution, `padding` counts zeros
    on every side (kernel // 2 unless given, which keeps the size), `pool` takes the maximum or mean of 2 x 2 cells at the end,
    or is left out: "none".

    `channels` go in and `out` come out, `kernel` is the side of a filter, `layers` the number of convolutions, `norm` and
    `activation` what follows each.

    >>> import torch
    >>> from regard.blocks import ConvBlock
    >>> tuple(ConvBlock(3, 4, stride=2)(torch.randn(1, 3, 8, 8)).shape)
    (1, 4, 4, 4)
    """

    def __init__(
        self,
        channels: int,
        out: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        padding: int | None = None,
        layers: int = 2,
        pool: str = "none",
        residual: bool = True,
        norm: str = "batch",
        activation: str = "relu",
    ) -> None:
        super().__init__()
        need("channels", channels)
        need("out", out)
        same = need("kernel", kernel) // 2
        side = same if padding is None else need("padding", padding, 0)
        check_choice("pool", pool, POOLINGS)
        check_choice("norm", norm, IMAGE_NORMS)
        if residual and (kernel % 2 == 0 or side != same):
            raise ValueError(
                f"a residual connection adds an image of the same size: kernel {kernel} needs to be odd with padding {same}, "
                f"not {side}; or leave it out with residual=False"
            )
        sizes = [channels, *[out] * need("layers", layers)]
        steps = [need("stride", stride), *[1] * (layers - 1)]
        plain = norm == "none"  # a norm has an offset of its own
        self.convs = nn.ModuleList(
            nn.Conv2d(a, out, kernel, stride=step, padding=side, bias=plain) for a, step in zip(sizes[:-1], steps, strict=True)
        )
        self.norms = nn.ModuleList(IMAGE_NORMS[norm](out) for _ in range(layers))
        self.shortcut: nn.Module | None = None
        if residual:
            changed = channels != out or stride > 1
            self.shortcut = nn.Conv2d(channels, out, 1, stride=stride) if changed else nn.Identity()
        self.act = activate(activation)
        self.pool = POOLINGS[pool]()
        self.channels = out  # of the output
        self.kernel, self.padding, self.steps, self.pooled = kernel, side, steps, pool != "none"

    def size(self, side: int) -> int:
        """Return the height of the output for this height of an image, or its width for this width; 0: the image is too small."""
        for step in self.steps:
            side = max((side + 2 * self.padding - self.kernel) // step + 1, 0)
        return side // 2 if self.pooled else side

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(self.act(y) if number else y))
        if self.shortcut is not None:
            y = y + self.shortcut(x)
        return self.pool(self.act(y))


class ConvNet(nn.Sequential):
    """ConvBlocks one after another: (b c h w) -> (b c' h' w').

    `blocks` are given one by one.

    >>> import torch
    >>> from regard.blocks import ConvBlock, ConvNet
    >>> tuple(ConvNet(ConvBlock(3, 4), ConvBlock(4, 8, stride=2))(torch.randn(1, 3, 8, 8)).shape)
    (1, 8, 4, 4)
    """

    def __init__(self, *blocks: ConvBlock) -> None:
        super().__init__(*blocks)
        self.channels = blocks[-1].channels  # of the output

    def size(self, side: int) -> int:
        """Return the height of the output for this height of an image, or its width for this width."""
        for block in self:
            side = block.size(side)  # type: ignore[operator]
        return side


def conv_stages(
    channels: int,
    *,
    first: int = 64,
    stages: int = 3,
    blocks: int = 2,
    kernel: int = 3,
    pool: str = "none",
    shrink: bool = True,
    residual: bool = True,
    norm: str = "batch",
    activation: str = "relu",
) -> ConvNet:
    """Build a CNN without its head: (b c h w) -> (b c' h' w').

    One convolution to `first` channels, then stages of ConvBlocks, each with twice the channels of the one before. Every stage
    but the first halves height and width, by stride, or by pooling behind the stage before where `pool` is not "none"; nothing
    does unless `shrink`.

    `channels` go in; there are `stages` stages of `blocks` blocks; `kernel`, `residual`, `norm` and `activation` are those of
    `ConvBlock`.

    >>> import torch
    >>> from regard.blocks import conv_stages
    >>> net = conv_stages(3, first=4, stages=2, blocks=1)
    >>> tuple(net(torch.randn(1, 3, 8, 8)).shape)
    (1, 8, 4, 4)
    """
    need("stages", stages)
    need("blocks", blocks)
    parts = [ConvBlock(channels, first, kernel=kernel, layers=1, residual=False, norm=norm, activation=activation)]
    pooled = shrink and check_choice("pool", pool, POOLINGS) != "none"
    now = first
    for stage in range(stages):
        out = first * 2**stage
        for number in range(blocks):
            stride = 2 if shrink and stage and not number and not pooled else 1
            here = pool if pooled and stage < stages - 1 and number == blocks - 1 else "none"
            options = {"kernel": kernel, "residual": residual, "norm": norm, "activation": activation}
            parts.append(ConvBlock(now, out, stride=stride, pool=here, **options))  # type: ignore[arg-type]
            now = out
    return ConvNet(*parts)


def conv_stem(
    channels: int,
    width: int,
    *,
    layers: int = 2,
    kernel: int = 3,
    stride: int = 1,
    pool: str = "max",
    norm: str = "none",
    activation: str = "relu",
) -> ConvNet:
    """Build a convolutional stem, (b c h w) -> (b width h' w'): each layer a convolution, an activation and pooling.

    Channels double from layer to layer up to `width`. Hassani et al. 2021, arXiv:2104.05704.

    `channels` go in, `layers` is the number of convolutions; `kernel`, `stride`, `pool`, `norm` and `activation` are those of
    `ConvBlock`.

    >>> import torch
    >>> from regard.blocks import conv_stem
    >>> tuple(conv_stem(3, 16)(torch.randn(1, 3, 8, 8)).shape)
    (1, 16, 2, 2)
    """
    sizes = [max(width >> (need("layers", layers) - number), 1) for number in range(1, layers + 1)]
    parts = [
        ConvBlock(a, b, kernel=kernel, stride=stride, layers=1, pool=pool, residual=False, norm=norm, activation=activation)
        for a, b in zip([channels, *sizes], sizes, strict=False)
    ]
    return ConvNet(*parts)
