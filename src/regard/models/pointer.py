"""Pointer network: a decoder whose outputs are positions of its input.

Letters: b batch, h heads, n source tokens, m target tokens, d head dim, w width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.checks import check_valid, need
from regard.config import Config
from regard.mixers.attention import no_autocast
from regard.mixers.feature_math import upcast
from regard.mixers.places import Places, mask_padding
from regard.mixers.position_interface import Positions
from regard.mixers.state import State
from regard.models import build
from regard.models.embedding import Vectors
from regard.models.encoder import Encoded, Encoder
from regard.ops.dropout import Dropout


class PointerState(nn.Module):
    """Attention scores without values: q.k / sqrt(d) of a few heads (b h m n), in float32 or better."""

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        if width % need("heads", heads):
            raise ValueError(f"width {width} is not divisible by {heads} heads that point")
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=False)  # a bias of keys moves all scores alike
        for part in (self.q, self.k):
            nn.init.xavier_uniform_(part.weight)

    def keys(self, x: Tensor) -> Tensor:
        """(b n w) -> (b h n d)."""
        return self._split(self.k(x))

    def _split(self, x: Tensor) -> Tensor:
        """Split heads: (b n w) -> (b h n d)."""
        heads = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)

    def forward(self, y: Tensor, keys: Tensor) -> Tensor:
        q = self._split(self.q(y))
        scale = math.sqrt(q.shape[-1])
        with no_autocast(q):
            scores = upcast(q) @ upcast(keys).mT
            return scores / scale


def check_each(encoder: Encoder, does: str) -> None:
    """Check that an encoder returns one vector for every token."""
    if encoder.stack.rate > 1 or encoder.front is not None:
        raise ValueError(f"a model that {does} tokens needs a vector for each: no front, and a mixer that answers every token")


class Choices(NamedTuple):
    """The positions that can be chosen: the end in slot 0, and token j in slot j + 1."""

    vectors: Tensor  # (b n + 1 w): the decoder's input after each choice
    keys: Tensor  # (b 1 n + 1 d)
    real: Tensor  # (b n + 1)


class Pointer(nn.Module):
    """An encoder, and a decoder whose outputs are positions of the source. Vinyals et al. 2015, arXiv:1506.03134.

    p(j | choices so far) = softmax_j(q(y).k(x_j)), where x_j is the encoder's output at token j. Scores: (b m n + 1): slot 0 is
    the end, `Pointer.END`, and slot j + 1 is token j, so a target does not depend on the batch's padding. The decoder's input
    is the vector of the last choice; before the first choice, a learned one. `model(source, source_valid, chosen)` with
    chosen = 0, then the target without its last; `start` and `extend` return the same step by step. An order of all tokens, where
    none comes twice, is `Constraints(eos=Pointer.END, max_new_tokens=..., no_repeat_ngram_size=1)`.

    `encoder` encodes the source, `decoder` is causal and reads it, `positions` are those of choices, `dropout` that of their
    vectors.

    >>> import torch
    >>> from regard.blocks import Stack
    >>> from regard.models import Encoder, Pointer, Vectors
    >>> encoder = Encoder(Vectors(2, 16), Stack.of("softmax", width=16, heads=2, depth=1))
    >>> model = Pointer(encoder, Stack.of("softmax", width=16, heads=2, depth=1, causal=True, cross="softmax"))
    >>> chosen = torch.tensor([[0, 3, 1]])  # nothing yet, then token 2, then token 0
    >>> tuple(model(torch.randn(1, 5, 2), None, chosen).shape)
    (1, 3, 6)
    """

    END = 0

    def __init__(self, encoder: Encoder, decoder: Stack, *, positions: Positions | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        if not decoder.reads:
            raise ValueError("a decoder must read the encoder: build its stack with cross=...")
        check_each(encoder, "points at")
        self.encoder = encoder
        self.decoder = decoder
        self.positions = positions
        self.point = PointerState(encoder.width)
        self.drop = Dropout(dropout)
        scale = encoder.width**-0.5
        self.begin = nn.Parameter(torch.randn(encoder.width) * scale)
        self.end = nn.Parameter(torch.randn(encoder.width) * scale)

    def forward(self, source: Tensor, source_valid: Tensor | None, chosen: Tensor, chosen_valid: Tensor | None = None) -> Tensor:
        choices, read = self._read(source, source_valid)
        x, places = self._chosen(choices, chosen, chosen_valid, None)
        y = self.decoder(x, places, context=read.x, context_valid=read.places)
        return self._scores(y, choices)

    def start(self, source: Tensor, source_valid: Tensor | None = None) -> State:
        choices, read = self._read(source, source_valid)
        state = self.decoder.start(context=read.x, context_valid=read.places)
        return State((state, choices), state.t, state.start)

    def extend(self, state: State, chosen: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        before, choices = state.memory
        x, places = self._chosen(choices, chosen, valid, state)
        y, after = self.decoder.extend(before, x, places)
        return self._scores(y, choices), State((after, choices), after.t, after.start)

    def _read(self, source: Tensor, valid: Tensor | None) -> tuple[Choices, Encoded]:
        read = self.encoder(source, valid)
        x = read.x
        begin, end = (part.to(x.dtype).expand(len(x), 1, -1) for part in (self.begin, self.end))
        if valid is None:
            valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        targets = torch.cat([end, x], 1)
        keys = self.point.keys(targets)
        inputs = torch.cat([begin, x], 1)
        end_valid = torch.ones_like(valid[:, :1])
        real = torch.cat([end_valid, valid], 1)
        return Choices(inputs, keys, real), read

    def _chosen(self, choices: Choices, chosen: Tensor, valid: Tensor | None, after: State | None) -> tuple[Tensor, Places]:
        """Return the vectors (b m w) of the choices so far, and their places."""
        check_valid(valid, chosen.shape[0], chosen.shape[1], "what has been chosen")
        width = choices.vectors.shape[-1]
        index = chosen[..., None].expand(-1, -1, width)
        x = choices.vectors.gather(1, index)
        t, start = (None, 0) if after is None else (after.t, after.start)
        places = Places.of(x, valid, t, start)
        if self.positions is not None:
            x = self.positions.add(x, places)
        x = self.drop(x)
        return mask_padding(x, valid), places

    def _scores(self, y: Tensor, choices: Choices) -> Tensor:
        scores = self.point(y, choices.keys)[:, 0]
        return scores.masked_fill(~choices.real[:, None], -torch.inf)


def pointer(config: Config, features: int) -> Pointer:
    """Build a pointer network over vectors (b n features). Only the decoder has positions; a source is a set without an order."""
    if config.wiring != "last":
        raise ValueError(f"a pointer reads what it points at, the encoder's last layer: wiring='last', not {config.wiring!r}")
    unordered = replace(config, positions="none")
    vectors = Vectors(features, config.width, dropout=config.dropout)
    encoder = build.encoder(unordered, vectors)
    decoder = build.glorot(build.stack(config, causal=True, reads=True))
    positions = build.added(config)
    return Pointer(encoder, decoder, positions=positions, dropout=config.dropout)
