"""An encoder: what comes in, read by a stack of blocks, all at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.mixers.base import mask_padding, pooled_valid
from regard.models.embedding import Embedding


class Encoded(NamedTuple):
    """What has been read: one vector a token."""

    x: Tensor  # (b n w), behind the last block and its norm
    valid: Tensor | None  # (b n)
    layers: tuple[Tensor, ...] = ()  # behind every block, if asked for


class Encoder(nn.Module):
    """Embedding and stack. `front` learned vectors stand in front of the tokens, as BERT's [CLS] does, and come out in front."""

    def __init__(self, embed: Embedding, stack: Stack, *, front: int = 0) -> None:
        super().__init__()
        if stack.reads or any(block.mixer.dims.causal for block in stack):
            raise ValueError("an encoder reads all of its own tokens at once: its stack is not causal and reads no context")
        self.embed, self.stack, self.width = embed, stack, embed.width
        self.front = nn.Parameter(torch.randn(front, embed.width) * 0.02) if front else None

    def forward(self, x: Tensor, valid: Tensor | None = None, *, layers: bool = False) -> Encoded:
        y = self.embed(x, valid)
        if self.front is not None:
            y = torch.cat([self.front.to(y.dtype).expand(len(y), -1, -1), y], 1)
            if valid is not None:
                valid = torch.cat([valid.new_ones(len(y), len(self.front)), valid], 1)
        if not layers:
            return Encoded(self.stack(y, valid), self.stack.valid(valid))
        if self.stack.rate > 1:
            raise ValueError("layers of different lengths cannot be read side by side: use a mixer that answers every token")
        behind = []
        for block in self.stack:
            y = block(y, valid)
            behind.append(y)
            valid = pooled_valid(valid, block.rate)
        out = y if self.stack.final_norm is None else mask_padding(self.stack.final_norm(y), valid)
        return Encoded(out, valid, tuple(behind))
