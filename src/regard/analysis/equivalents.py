"""Convert layers into equivalent ones: a convolution into attention, a feed-forward layer into convolutions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.blocks.feedforward import ACTIVATIONS, FeedForward
from regard.mixers.attend import attend
from regard.mixers.base import Can, Dims, Places
from regard.mixers.kv_cache import CachedCore, KVCache
from regard.mixers.pattern_attention import expand_heads
from regard.ops.budget import budget
from regard.ops.pair.torch import softmax_of_seen
from regard.ops.strip import in_strips
from regard.ops.tile.tile_op import accumulator

SHARP = 40.0  # e^-40 is 4e-18: all pixels but the target have weights below the rounding of float64


class Offsets(CachedCore):
    """Attend with each head to one fixed offset from the query: scores depend on relative position alone.

    s_ij = -sharpness_h |p_j - p_i - offset_h|^2, A = softmax(s). Queries and keys are the positions p themselves, (b h n axes).
    This is u_h . (|x|^2, x) with x = p_j - p_i, the quadratic encoding of the paper, and a number that all j share.
    Cost: n^2 e, a strip of queries at a time: never n^2 in memory. Cordonnier et al. 2020, arXiv:1911.03584.
    """

    can = Can.CROSS | Can.PADDING
    positional = False

    def __init__(self, dims: Dims, offsets: Tensor, *, sharpness: float = SHARP) -> None:
        super().__init__(dims)
        if offsets.shape != (dims.heads, dims.d):
            raise ValueError(f"offsets have shape {tuple(offsets.shape)}, but (heads, axes) = {(dims.heads, dims.d)} is needed")
        number = isinstance(sharpness, int | float) and not isinstance(sharpness, bool)
        positive = number and 0 < sharpness < math.inf
        if not positive:
            raise ValueError(f"sharpness must be a positive number, not {sharpness!r}")
        self.offset = nn.Parameter(offsets.clone())
        every = torch.full_like(offsets[:, 0], sharpness)
        self.sharpness = nn.Parameter(every)

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:  # noqa: ARG002 - it is never causal
        acc = accumulator(q.dtype)
        k, v = expand_heads(log.keys.to(acc), log.values.to(acc), q.shape[1])
        valid = log.places.valid
        seen = None if valid is None else valid[:, None, None]

        def strip(targets: Tensor) -> tuple[Tensor]:
            return (softmax_of_seen(self._scores(targets, k), seen) @ v,)

        targets = q.to(acc) + self.offset.to(acc)[:, None]  # of each head and query
        each = 2 * q.shape[-1] * q.shape[0] * q.shape[1] * k.shape[2]  # a difference and its square, per axis
        out = in_strips(strip, (targets,), 2, each, room=budget(q.device).softmax_strip)[0]
        return out.to(log.v.dtype)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        far = q.new_zeros(())
        for here, there in zip(q.unbind(-1), k.unbind(-1), strict=True):  # axes: differences are exact in any precision
            far = far + (there[:, :, None] - here[..., None]).square()
        sharpness = self.sharpness.to(q.dtype)
        return far * -sharpness[:, None, None]


class ConvAttention(nn.Module):
    """Attend over the pixels of an image, (b c H W) -> (b c' H' W'), initialised to compute a convolution.

    One head per position of the kernel. Values are the channels of a pixel, shared by all heads; the output projection of a head
    is its slice of the kernel. Zero padding is a ring of tokens with zero values.
    """

    def __init__(self, conv: nn.Conv2d, *, sharpness: float = SHARP) -> None:
        super().__init__()
        check_convolution(conv)
        weight = conv.weight.detach()
        groups = conv.groups
        high, wide = conv.kernel_size
        down, right = conv.dilation
        self.channels = conv.in_channels
        self.reach = (high // 2 * down, wide // 2 * right)
        self.ring = _ring(conv, self.reach)
        self.stride = tuple(conv.stride)
        rows = torch.arange(high, device=weight.device) - high // 2
        columns = torch.arange(wide, device=weight.device) - wide // 2
        offsets = torch.cartesian_prod(rows * down, columns * right).to(weight.dtype)
        heads = len(offsets)
        dims = Dims(width=self.channels, heads=heads, kv_heads=1, key_dim=2, value_dim=self.channels)
        self.core = Offsets(dims, offsets, sharpness=sharpness)
        out = nn.Linear(heads * self.channels, conv.out_channels, bias=conv.bias is not None)
        self.out = out.to(weight)
        slices = weight.new_zeros(groups, conv.out_channels // groups, heads, groups, self.channels // groups)
        for g, kernel in enumerate(weight.chunk(groups)):  # block diagonal: zeros between different groups
            slices[g, :, :, g] = kernel.flatten(2).transpose(1, 2)
        with torch.no_grad():
            joined = slices.flatten(0, 1).flatten(1)
            self.out.weight.copy_(joined)
            if self.out.bias is not None and conv.bias is not None:
                self.out.bias.copy_(conv.bias)

    def places(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return positions of the queries (1 h n 2) and of all pixels (1 1 m 2), the ring included."""
        like = self.out.weight
        sizes = [size + 2 * ring for size, ring in zip((height, width), self.ring, strict=True)]
        kind = accumulator(like.dtype)  # half precision cannot count to 1,000
        axes = [torch.arange(size, dtype=kind, device=like.device) for size in sizes]
        inner = [
            axis[reach : max(reach, len(axis) - reach) : step]
            for axis, reach, step in zip(axes, self.reach, self.stride, strict=True)
        ]
        q = _grid(inner)
        k = _grid(axes)
        return q.expand(1, self.core.dims.heads, -1, -1), k[None, None]

    def forward(self, x: Tensor) -> Tensor:
        b, c, height, width = self._shape(x)
        q, k = self.places(height, width)
        (up, side), (tall, broad) = self.ring, self.reach
        rows = height + 2 * (up - tall)
        columns = width + 2 * (side - broad)
        if min(rows, columns) < 1:
            raise ValueError(f"an image of {height} x {width} is smaller than the kernel: pad it by {self.reach}, or enlarge it")
        size = tuple(-(-length // step) for length, step in zip((rows, columns), self.stride, strict=True))
        # The weights do not depend on the content: the images of a batch are further channels of one sequence.
        padded = pad(x, (side, side, up, up))
        tokens = padded.flatten(2).permute(2, 0, 1).flatten(1)
        values = tokens.to(q.dtype)[None, None]
        heads = attend(q, k, values, self.core)  # (1 h n b*c)
        images = heads[0].unflatten(-1, (b, c))
        joined = images.permute(2, 1, 0, 3).flatten(2)  # (b n h*c)
        y = self.out(joined.to(x.dtype))
        return y.transpose(1, 2).unflatten(2, size)

    def _shape(self, x: Tensor) -> tuple[int, int, int, int]:
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise ValueError(f"x has shape {tuple(x.shape)}, but (batch, {self.channels}, height, width) is needed")
        b, c, height, width = x.shape
        return b, c, height, width

    def extra_repr(self) -> str:
        return f"heads={self.core.dims.heads}, ring={self.ring}, stride={self.stride}"


def conv_as_attention(conv: nn.Conv2d, *, sharpness: float = SHARP) -> ConvAttention:
    """Convert a convolution to an attention layer with the same outputs and gradients, and parameters of its own.

    Any odd kernel, stride, zero padding, dilation and groups; with a stride fewer pixels are queries. Softmax runs over all
    pixels: those other than the target of a head are at least 1 away, so their weights sum to about 4 e^-sharpness, below the
    rounding of float64 at the default of 40. The gradients of the offsets vanish there, and only the kernel learns; with a
    sharpness of about 2 the offsets learn too. Time grows with the square of the pixels; memory does not, but there is one
    output of heads per kernel position.
    """
    return ConvAttention(conv, sharpness=sharpness)


class PointwiseConv(nn.Module):
    """Compute a feed-forward layer as two convolutions of kernel size 1, (b w n) -> (b w n)."""

    def __init__(self, layer: FeedForward) -> None:
        super().__init__()
        self.act = ACTIVATIONS[layer.activation]
        self.gated = layer.gated
        self.up = _pointwise(layer.up)
        self.down = _pointwise(layer.down)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if not self.gated:
            return self.down(self.act(y))
        gate, value = y.chunk(2, 1)
        return self.down(self.act(gate) * value)


def feedforward_as_conv(layer: FeedForward) -> PointwiseConv:
    """Convert a feed-forward layer to convolutions of kernel size 1 with the same outputs and gradients.

    Tokens are along the last axis, as in convolutions: `feedforward_as_conv(layer)(x.mT).mT`. There is no dropout. Mentioned in
    Vaswani et al. 2017, arXiv:1706.03762.
    """
    return PointwiseConv(layer)


def _grid(axes: list[Tensor]) -> Tensor:
    """Return all positions (n axes) of a grid, row by row."""
    grid = torch.meshgrid(*axes, indexing="ij")
    return torch.stack(grid, -1).flatten(0, 1)


def _pointwise(linear: nn.Linear) -> nn.Conv1d:
    conv = nn.Conv1d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None)
    conv = conv.to(linear.weight)
    with torch.no_grad():
        conv.weight.copy_(linear.weight[..., None])
        if conv.bias is not None:
            conv.bias.copy_(linear.bias)
    return conv


def check_convolution(conv: nn.Conv2d) -> None:
    """Refuse convolutions without an equivalent attention layer."""
    if not isinstance(conv, nn.Conv2d):
        raise TypeError(f"conv_as_attention takes an nn.Conv2d, not {type(conv).__name__}")
    if any(size % 2 == 0 for size in conv.kernel_size):
        raise ValueError(f"an even kernel has no pixel in its middle for the query: {conv.kernel_size} must be odd")
    if conv.padding_mode != "zeros":
        raise ValueError(f"padding is a ring of tokens with zero values: 'zeros', not {conv.padding_mode!r}")


def _ring(conv: nn.Conv2d, reach: tuple[int, int]) -> tuple[int, int]:
    """Return the number of rows and columns of zeros around the image."""
    if isinstance(conv.padding, str):
        return reach if conv.padding == "same" else (0, 0)
    up, side = conv.padding
    return up, side
