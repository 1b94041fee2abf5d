"""Answers that are places of the input: a decoder whose every word is a position it points at.

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


class PointerState(nn.Module):
    """Attention that only points: scores q.k / sqrt(d) of a few heads (b h m n), in float32 or better, and nothing is read."""

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        if width % need("heads", heads):
            raise ValueError(f"width {width} is not divisible by {heads} heads that point")
        self.heads = heads
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width, bias=False)  # a bias of keys moves all scores alike
        for part in (self.q, self.k):
            nn.init.xavier_uniform_(part.weight)

    def keys(self, x: Tensor) -> Tensor:
        """(b n w) -> (b h n d)."""
        return self.k(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, y: Tensor, keys: Tensor) -> Tensor:
        q = self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        with no_autocast(q):
            return upcast(q) @ upcast(keys).mT / math.sqrt(q.shape[-1])


def check_each(encoder: Encoder, does: str) -> None:
    """That it gives one vector for every token."""
    if encoder.stack.rate > 1 or encoder.front is not None:
        raise ValueError(f"who {does} tokens needs a vector for each: no front, and a mixer that answers every token")


class Choices(NamedTuple):
    """What can be pointed at: the end in slot 0, and token j in slot j + 1."""

    vectors: Tensor  # (b n + 1 w): what the decoder is told when one has been chosen
    keys: Tensor  # (b 1 n + 1 d)
    real: Tensor  # (b n + 1)


class Pointer(nn.Module):
    """An encoder, and a decoder that answers with positions of the source. Vinyals et al. 2015, arXiv:1506.03134.

    p(j | said so far) = softmax_j(q(y).k(x_j)), where x_j is what the encoder made of token j. Scores are (b m n + 1): slot 0 is
    the end, `Pointer.END`, and slot j + 1 is token j, so a target does not depend on how far its batch is padded. The decoder is
    told the vector of what it has chosen; before the first choice, one of its own. `model(source, source_valid, told)` with
    told = 0, then the target without its last; `start` and `extend` give the same step by step. An order of all tokens, where
    none comes twice, is `Rules(end=Pointer.END, no_repeat=1, most=...)`.
    """

    END = 0

    def __init__(self, encoder: Encoder, decoder: Stack, *, positions: Positions | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        if not decoder.reads:
            raise ValueError("a decoder must read the encoder: build its stack with cross=...")
        check_each(encoder, "points at")
        self.encoder, self.decoder, self.positions = encoder, decoder, positions
        self.point, self.drop = PointerState(encoder.width), nn.Dropout(dropout)
        self.begin, self.end = (nn.Parameter(torch.randn(encoder.width) * encoder.width**-0.5) for _ in range(2))

    def forward(self, source: Tensor, source_valid: Tensor | None, told: Tensor, told_valid: Tensor | None = None) -> Tensor:
        choices, read = self._read(source, source_valid)
        x, places = self._told(choices, told, told_valid, None)
        return self._scores(self.decoder(x, places, context=read.x, context_valid=read.places), choices)

    def start(self, source: Tensor, source_valid: Tensor | None = None) -> State:
        choices, read = self._read(source, source_valid)
        state = self.decoder.start(context=read.x, context_valid=read.places)
        return State((state, choices), state.t, state.start)

    def extend(self, state: State, told: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        before, choices = state.memory
        y, after = self.decoder.extend(before, *self._told(choices, told, valid, state))
        return self._scores(y, choices), State((after, choices), after.t, after.start)

    def _read(self, source: Tensor, valid: Tensor | None) -> tuple[Choices, Encoded]:
        read = self.encoder(source, valid)
        x = read.x
        begin, end = (part.to(x.dtype).expand(len(x), 1, -1) for part in (self.begin, self.end))
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
        keys = self.point.keys(torch.cat([end, x], 1))
        return Choices(torch.cat([begin, x], 1), keys, torch.cat([torch.ones_like(real[:, :1]), real], 1)), read

    def _told(self, choices: Choices, told: Tensor, valid: Tensor | None, after: State | None) -> tuple[Tensor, Places]:
        """Return the vectors (b m w) of the choices so far, and their places."""
        check_valid(valid, told.shape[0], told.shape[1], "what has been chosen")
        x = choices.vectors.gather(1, told[..., None].expand(-1, -1, choices.vectors.shape[-1]))
        t, start = (None, 0) if after is None else (after.t, after.start)
        places = Places.of(x, valid, t, start)
        if self.positions is not None:
            x = self.positions.add(x, places)
        return mask_padding(self.drop(x), valid), places

    def _scores(self, y: Tensor, choices: Choices) -> Tensor:
        return self.point(y, choices.keys)[:, 0].masked_fill(~choices.real[:, None], -torch.inf)


def pointer(config: Config, features: int) -> Pointer:
    """A pointer network over vectors (b n features). Positions tell the decoder its step; a source is a set without an order."""
    if config.wiring != "last":
        raise ValueError(f"a pointer reads what it points at, the encoder's last layer: wiring='last', not {config.wiring!r}")
    read = build.encoder(replace(config, positions="none"), Vectors(features, config.width, dropout=config.dropout))
    body = build.glorot(build.stack(config, causal=True, reads=True))
    return Pointer(read, body, positions=build.added(config), dropout=config.dropout)
