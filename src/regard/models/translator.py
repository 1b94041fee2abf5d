"""Sequence to sequence: an encoder, a causal decoder, and the wiring of cross attention between them.

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

WIRINGS = ("last", "each", "both", "mixed")


class SourceMemory(NamedTuple):
    """The encoded source that the blocks of a decoder read.

    `contexts` (b n w) are one for all blocks, or one for each; `places` has positions and padding.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import SourceMemory, translator
    >>> model = translator(Config(width=16, heads=2, depth=1, ffn=32), vocab=20)
    >>> found = model.encode(torch.randint(1, 20, (2, 5)))
    >>> isinstance(found, SourceMemory), len(found.contexts)
    (True, 1)
    """

    contexts: tuple[Tensor, ...]  # (b n w): one for all blocks, or one for each
    places: Places

    @property
    def valid(self) -> Tensor | None:
        return self.places.valid


class CrossWiring(nn.Module):
    """Select the encoder's layers that the decoder's blocks read.

    last: all read the last one, as the Transformer does. each: block i reads layer i. both: block i reads layer i and the last
    one together, the mean of the two, (norm(x_i) + x_l) / 2 (the two views of Liu et al. 2020, arXiv:2005.08081, as one
    context); the last block reads the last layer alone. mixed: block i reads a mean of all layers, by weights of its own that
    are learned (Bapna et al. 2018, arXiv:1808.07561). Layers other than the last get a norm. Where block i reads layer i there
    must be as many blocks as layers.
    """

    def __init__(self, wiring: str, encoder: Stack, decoder: Stack, width: int) -> None:
        super().__init__()
        if wiring not in WIRINGS:
            raise ValueError(f"wiring must be one of {', '.join(WIRINGS)}, not {wiring!r}")
        layers, blocks = len(encoder.blocks), len(decoder.blocks)
        if wiring in ("each", "both") and layers != blocks:
            raise ValueError(f"wiring={wiring!r} needs as many encoder as decoder layers, not {layers} and {blocks}")
        self.wiring = wiring
        self.norms = None
        if wiring != "last":
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers - 1))
        self.weights = None
        if wiring == "mixed":
            self.weights = nn.Parameter(torch.zeros(blocks, layers))

    def forward(self, read: Encoded) -> tuple[Tensor, ...]:
        if self.norms is None:
            return (read.x,)
        normed = [*(norm(x) for norm, x in zip(self.norms, read.layers[:-1], strict=True)), read.x]
        if self.wiring == "both":
            return (*((x + read.x) / 2 for x in normed[:-1]), read.x)
        if self.weights is None:
            return tuple(normed)
        stacked = torch.stack(normed)  # (l b n w)
        weights = self.weights.softmax(-1).to(stacked.dtype)
        mixed = torch.einsum("il,lbnw->ibnw", weights, stacked)
        return tuple(mixed.unbind())


class Translator(nn.Module):
    """Encoder and decoder. `model(source, source_valid, target)` returns scores (b m v) of the token after each one, with
    teacher forcing; `start` and `extend` return the same token by token.

    `encoder` encodes the source, `embed` makes vectors of target tokens, `decoder` is causal and reads a context, `head` makes
    scores. `wiring` is which encoder layers the decoder reads: "last", "each" (block i reads layer i), "both" (block i reads
    layer i and the last) or "mixed" (all, by learned weights). `translator` builds one from a configuration.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.decoding import Constraints, generate
    >>> from regard.models import translator
    >>> model = translator(Config(width=16, heads=2, depth=1, ffn=32), vocab=20).eval()
    >>> state = model.start(torch.randint(1, 20, (2, 5)))
    >>> limits = Constraints(eos=0, max_new_tokens=3)
    >>> len(generate(model, state, torch.ones(2, 1, dtype=torch.long), constraints=limits))
    2
    """

    def __init__(self, encoder: Encoder, embed: Embedding, decoder: Stack, head: nn.Module, *, wiring: str = "last") -> None:
        super().__init__()
        if not decoder.reads:
            raise ValueError("a decoder must read the encoder: build its stack with cross=...")
        self.encoder = encoder
        self.embed = embed
        self.decoder = decoder
        self.head = head
        self.wiring = CrossWiring(wiring, encoder.stack, decoder, encoder.width)

    def encode(self, source: Tensor, source_valid: Tensor | None = None) -> SourceMemory:
        """Encode the source (b n), once for all target tokens."""
        read = self.encoder(source, source_valid, layers=self.wiring.norms is not None)
        return SourceMemory(self.wiring(read), read.places)

    def hidden(self, memory: SourceMemory, target: Tensor, target_valid: Tensor | None = None) -> Tensor:
        """Return the decoder's outputs (b m w) of the target (b m), before the head."""
        places = self.embed.places(target, target_valid)
        x = self.embed(target, places)
        return self.decoder(x, places, context=memory.contexts, context_valid=memory.places)

    def forward(self, source: Tensor, source_valid: Tensor | None, target: Tensor, target_valid: Tensor | None = None) -> Tensor:
        memory = self.encode(source, source_valid)
        y = self.hidden(memory, target, target_valid)
        return self.head(y)

    def start(self, source: Tensor, source_valid: Tensor | None = None) -> State:
        """Return the state of a decoder with an encoded source and no target tokens."""
        memory = self.encode(source, source_valid)
        return self.decoder.start(context=memory.contexts, context_valid=memory.places)

    def extend(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        places = self.embed.places(tokens, valid, state)
        x = self.embed(tokens, places)
        y, after = self.decoder.extend(state, x, places)
        return self.head(y), after
