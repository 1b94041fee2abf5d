"""Sequence to sequence: an encoder that reads, a decoder that says, and the wires between them.

Letters: b batch, n source tokens, m target tokens, w width, v vocabulary, l layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.mixers.places import Places
from regard.mixers.state import State
from regard.models.embedding import Embedding
from regard.models.encoder import Encoded, Encoder

WIRINGS = ("last", "each", "mixed")


class SourceMemory(NamedTuple):
    """What the blocks of a decoder read: the encoded source."""

    contexts: tuple[Tensor, ...]  # (b n w): one for all blocks, or one for each
    places: Places

    @property
    def valid(self) -> Tensor | None:
        return self.places.valid


class CrossWiring(nn.Module):
    """Which of the encoder's layers the decoder's blocks read.

    last: all read the last one, as the Transformer does. each: block i reads layer i. mixed: block i reads a mean of all layers,
    by weights of its own that are learned (Bapna et al. 2018, arXiv:1808.07561). Layers other than the last get a norm.
    """

    def __init__(self, wiring: str, encoder: Stack, decoder: Stack, width: int) -> None:
        super().__init__()
        if wiring not in WIRINGS:
            raise ValueError(f"wiring must be one of {', '.join(WIRINGS)}, not {wiring!r}")
        layers, blocks = len(encoder.blocks), len(decoder.blocks)
        if wiring == "each" and layers != blocks:
            raise ValueError(f"wiring='each' needs as many encoder as decoder layers, not {layers} and {blocks}")
        self.wiring = wiring
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers - 1)) if wiring != "last" else None
        self.weights = nn.Parameter(torch.zeros(blocks, layers)) if wiring == "mixed" else None

    def forward(self, read: Encoded) -> tuple[Tensor, ...]:
        if self.norms is None:
            return (read.x,)
        normed = [*(norm(x) for norm, x in zip(self.norms, read.layers[:-1], strict=True)), read.x]
        if self.weights is None:
            return tuple(normed)
        stacked = torch.stack(normed)  # (l b n w)
        mixed = torch.einsum("il,lbnw->ibnw", self.weights.softmax(-1).to(stacked.dtype), stacked)
        return tuple(mixed.unbind())


class Translator(nn.Module):
    """Encoder and decoder. `model(source, source_valid, target)` gives scores (b m v) of what follows each target token, with
    teacher forcing; `start` and `extend` give the same token by token.
    """

    def __init__(self, encoder: Encoder, embed: Embedding, decoder: Stack, head: nn.Module, *, wiring: str = "last") -> None:
        super().__init__()
        if not decoder.reads:
            raise ValueError("a decoder must read the encoder: build its stack with cross=...")
        self.encoder, self.embed, self.decoder, self.head = encoder, embed, decoder, head
        self.wires = CrossWiring(wiring, encoder.stack, decoder, encoder.width)

    def hear(self, source: Tensor, source_valid: Tensor | None = None) -> SourceMemory:
        """The source, read once."""
        read = self.encoder(source, source_valid, layers=self.wires.norms is not None)
        return SourceMemory(self.wires(read), read.places)

    def hidden(self, heard: SourceMemory, target: Tensor, target_valid: Tensor | None = None) -> Tensor:
        """What the decoder makes of the target (b m), before the head: (b m w)."""
        places = self.embed.places(target, target_valid)
        x = self.embed(target, places)
        return self.decoder(x, places, context=heard.contexts, context_valid=heard.places)

    def forward(self, source: Tensor, source_valid: Tensor | None, target: Tensor, target_valid: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(self.hear(source, source_valid), target, target_valid))

    def start(self, source: Tensor, source_valid: Tensor | None = None) -> State:
        """The source has been read, nothing has been said."""
        heard = self.hear(source, source_valid)
        return self.decoder.start(context=heard.contexts, context_valid=heard.places)

    def extend(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        places = self.embed.places(tokens, valid, state)
        y, after = self.decoder.extend(state, self.embed(tokens, places), places)
        return self.head(y), after
