"""An encoder: an embedding and a stack of blocks over all tokens at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.mixers.places import Places
from regard.models.embedding import Embedding


class Encoded(NamedTuple):
    """Hold the outputs of an encoder: one vector a token.

    `x` (b n w) is behind the last block and its norm, `places` has positions and padding, `layers` what is behind every block,
    if requested.

    >>> import torch
    >>> from regard.blocks import Stack
    >>> from regard.models import Encoder, Vectors
    >>> encoder = Encoder(Vectors(3, 16), Stack.of("linear", width=16, heads=2, depth=2))
    >>> found = encoder(torch.randn(1, 5, 3), layers=True)
    >>> len(found.layers), found.valid is None
    (2, True)
    """

    x: Tensor  # (b n w), behind the last block and its norm
    places: Places
    layers: tuple[Tensor, ...] = ()  # behind every block, if requested

    @property
    def valid(self) -> Tensor | None:
        return self.places.valid


class Encoder(nn.Module):
    """Embedding and stack. `front` learned vectors precede the tokens, as BERT's [CLS] does, and precede the outputs.

    `embed` makes vectors of the input, `stack` is not causal.

    >>> import torch
    >>> from regard.blocks import Stack
    >>> from regard.models import Encoder, Tokens
    >>> encoder = Encoder(Tokens(20, 16), Stack.of("Local(4)", width=16, heads=2, depth=1), front=1)
    >>> tuple(encoder(torch.randint(20, (2, 5))).x.shape)
    (2, 6, 16)
    """

    def __init__(self, embed: Embedding, stack: Stack, *, front: int = 0) -> None:
        super().__init__()
        if stack.reads or any(block.mixer.dims.causal for block in stack):
            raise ValueError("an encoder reads all of its own tokens at once: its stack is not causal and reads no context")
        self.embed = embed
        self.stack = stack
        self.width = embed.width
        self.front = nn.Parameter(torch.randn(front, embed.width) * 0.02) if front else None

    def forward(self, x: Tensor, valid: Tensor | None = None, *, layers: bool = False) -> Encoded:
        places = self.embed.places(x, valid)
        y = self.embed(x, places)
        if self.front is not None:
            front = self.front.to(y.dtype)
            y = torch.cat([front.expand(len(y), -1, -1), y], 1)
            if valid is not None:
                front_valid = valid.new_ones(len(y), len(self.front))
                valid = torch.cat([front_valid, valid], 1)
            places = Places.of(y, valid)
        if not layers:
            return Encoded(self.stack(y, places), self.stack.outputs(places))
        if self.stack.rate > 1:
            raise ValueError("layers of different lengths cannot be read side by side: use a mixer that answers every token")
        *behind, out = self.stack.layers(y, places)
        return Encoded(out, places, tuple(behind))
