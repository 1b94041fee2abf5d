"""The Conformer: half a feed-forward layer, attention, a convolution, the other half. Gulati et al. 2020, arXiv:2005.08100."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import torch.nn.functional as F
from torch import Tensor, nn

from regard.blocks.feedforward import FeedForward
from regard.blocks.parts_block import BlockPart, PartsBlock
from regard.blocks.stack import Stack
from regard.checks import need
from regard.mixers.base import Dims
from regard.mixers.baselines import Conv
from regard.spec import Named, Spec


class ConvModule(Conv):
    """A gated depthwise convolution: out = W2 silu(norm(c)), c_i = sum_t F_t h_(i-t), h = a * sigmoid(b), [a, b] = W1 x.

    Padding is as if absent: h is 0 there and beyond the ends. The norm is over the channels of a token, where the paper's is
    over the batch, so that neither padding nor other rows have an effect and a stream gives what a whole pass gives.
    """

    def __init__(self, dims: Dims, *, kernel: int = 15) -> None:
        super().__init__(dims, kernel=kernel)
        self.into = nn.Linear(dims.width, 2 * dims.width)
        self.norm = nn.LayerNorm(dims.width)

    def prepare(self, x: Tensor) -> Tensor:
        return F.glu(super().prepare(x), -1)

    def project(self, mixed: Tensor) -> Tensor:
        return super().project(F.silu(self.norm(mixed)))


def conformer(
    specs: Named | Sequence[Named],
    *,
    width: int,
    heads: int,
    depth: int,
    ffn: int | None = None,
    kernel: int = 15,
    causal: bool = False,
    positions: str | None = "relative",
    max_len: int | None = None,
    activation: str = "silu",
    dropout: float = 0.0,
    weight_dropout: float = 0.0,
) -> Stack:
    """Build a stack of Conformer blocks: (b n w) -> (b n w), by one mechanism or by several that take turns.

    A block is x + 1/2 FFN(x), x + attention(x), x + convolution(x), x + 1/2 FFN(x), norm; a norm is in front of every part.
    `positions` act inside attention; None leaves the order to the convolution.
    """
    names = [Spec.of(x) for x in (specs if isinstance(specs, Sequence) and not isinstance(specs, str) else [specs])]
    dims = Dims(width, heads, causal=causal, max_len=max_len, dropout=weight_dropout)
    around = Dims(width, heads, causal=causal, max_len=max_len)

    def block(spec: Spec) -> PartsBlock:
        halves = [FeedForward(width, ffn or 4 * width, activation=activation, dropout=dropout) for _ in range(2)]
        attention, convolution = spec.build(dims, positions=positions), ConvModule(around, kernel=kernel)
        parts = [BlockPart(halves[0], 0.5), BlockPart(attention), BlockPart(convolution), BlockPart(halves[1], 0.5)]
        return PartsBlock(parts, last_norm=True, dropout=dropout)

    return Stack([block(spec) for spec in islice(cycle(names), need("depth", depth))])
