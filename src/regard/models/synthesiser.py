"""Speech synthesis: characters to frames of log-mel energies, by a decoder whose readers show where they are in the text.

Letters: b batch, n characters, m steps of the decoder, r frames of a step, f features of a frame, w width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.feedforward import check_fraction
from regard.checks import need
from regard.config import Config
from regard.mixers.places import PaddingMask, Places, mask_padding
from regard.mixers.position_interface import Positions
from regard.mixers.state import State
from regard.models.build import added, encoder, glorot, stack, tokens
from regard.models.embedding import Embedding
from regard.models.guided import ALIGNERS, guided, record_alignments
from regard.models.translator import Translator
from regard.ops.dropout import drop_out
from regard.text import unknown

STOPS_SEEN = 8  # steps after which the host sees whether all rows have stopped


class Prenet(Embedding):
    """Embed frames (b m f) through two narrow layers with dropout, which a decoder cannot copy its next frame through.

    Wang et al. 2017, arXiv:1703.10135. With `always`, dropout is on in evaluation too. It then is a fixed table of masks, one
    for each step and drawn by `reseed`: the same seed gives the same speech, in any batch, whole or step by step.
    """

    keep: Tensor  # (steps 2 w), 0 or 1 / (1 - dropout)

    def __init__(
        self,
        features: int,
        width: int,
        *,
        hidden: int,
        steps: int,
        dropout: float = 0.5,
        always: bool = True,
        positions: Positions | None = None,
    ) -> None:
        super().__init__(width, positions=positions)
        self.features = need("features", features)
        self.narrow = nn.ModuleList([nn.Linear(features, hidden), nn.Linear(hidden, hidden)])
        self.map = nn.Linear(hidden, width)
        self.dropout, self.always = check_fraction("prenet_dropout", dropout), always
        self.register_buffer("keep", torch.ones(need("steps", steps), 2, hidden), persistent=False)
        self.reseed(1)

    def reseed(self, seed: int) -> None:
        """Draw the masks of evaluation anew."""
        dice = torch.Generator().manual_seed(seed)
        kept = torch.rand(self.keep.shape, generator=dice) >= self.dropout
        self.keep = (kept / (1 - self.dropout)).to(self.keep)

    def forward(self, x: Tensor, valid: PaddingMask = None, after: State | None = None) -> Tensor:
        """Return the vectors (b m w) of frames, with zeros at padding."""
        places = valid if isinstance(valid, Places) else self.places(x, valid, after)
        if x.dim() != 3 or x.shape[-1] != self.features:
            raise ValueError(f"frames have the shape (batch, steps, {self.features}), not {tuple(x.shape)}")
        y = self.unpadded(x, places.valid).to(self.map.weight.dtype)
        for number, layer in enumerate(self.narrow):
            y = self._dropped(layer(y).relu(), places.at, number)
        y = self.map(y)
        if self.positions is not None:
            y = self.positions.add(y, places)
        return mask_padding(y, places.valid)

    def _dropped(self, x: Tensor, at: Tensor, number: int) -> Tensor:
        if self.training:
            return drop_out(x, self.dropout)
        return x * self.keep[at, number].to(x.dtype) if self.always and self.dropout else x


class FrameHead(nn.Module):
    """Map vectors (b m w) to r frames and the score of a stop behind them: (b m r f + 1)."""

    def __init__(self, width: int, features: int, reduction: int) -> None:
        super().__init__()
        self.frames = nn.Linear(width, features * need("reduction", reduction))
        self.stop = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.frames(x), self.stop(x)], -1)


class SpokenFrames(NamedTuple):
    """What a model has made of texts, on the CPU: lists with one tensor for each text."""

    frames: list[Tensor]  # (m r, f)
    weights: list[Tensor]  # (m n) of the last reader, the mean of its heads
    stopped: list[bool]  # False: it went on to the limit


class Synthesiser(Translator):
    """A `Translator` of characters to frames: its target is the last frame of each step, its outputs are those of `FrameHead`."""

    embed: Prenet

    def generate(self, source: Tensor, source_valid: Tensor | None, most: Tensor) -> SpokenFrames:
        """Generate frames of texts (b n), each from the last one before, until the stop or `most` (b) steps."""
        found, last, counts, limit = [], [], most.to(source.device), int(most.max())
        frame = torch.zeros(len(source), 1, self.embed.features, device=source.device)
        with torch.no_grad(), record_alignments(self) as seen:
            state = self.start(source, source_valid)
            for step in range(1, limit + 1):
                y, state = self.extend(state, frame)
                found.append(y[:, 0, :-1])
                last.append(seen[-1][:, :, 0].mean(1))
                seen.clear()
                frame = y[..., -1 - self.embed.features : -1]
                counts = torch.where((y[:, 0, -1] > 0) & (counts > step), step, counts)
                if step % STOPS_SEEN == 0 and bool((counts <= step).all()):
                    break
        frames, weights = (torch.stack(x, 1).float().cpu() for x in (found, last))
        lengths, sizes = counts.tolist(), _sizes(source, source_valid)
        return SpokenFrames(
            [row[:m].reshape(-1, self.embed.features) for row, m in zip(frames, lengths, strict=True)],
            [row[:m, :n] for row, m, n in zip(weights, lengths, sizes, strict=True)],
            [m < least for m, least in zip(lengths, most.tolist(), strict=True)],
        )


def _sizes(source: Tensor, valid: Tensor | None) -> list[int]:
    """Return the number of real characters of each row, which lie in front."""
    return [source.shape[1]] * len(source) if valid is None else valid.sum(1).tolist()


def synthesiser(
    config: Config,
    vocab: int,
    features: int,
    *,
    reader: str = "plain",
    reduction: int = 1,
    hidden: int = 64,
    dropout: float = 0.5,
    always: bool = True,
) -> Synthesiser:
    """Build a model of characters to frames; `reader` is how its decoder reads: plain, location, monotonic, monotonic-additive.

    `hidden` and `dropout` are those of the `Prenet`, `always` keeps its dropout on in evaluation.
    """
    if reader not in ALIGNERS:
        raise ValueError(unknown("no reader is called", reader, ALIGNERS))
    prenet = Prenet(
        features, config.width, hidden=hidden, steps=config.max_len, dropout=dropout, always=always, positions=added(config)
    )
    head = FrameHead(config.width, features, reduction)
    body = glorot(stack(config, causal=True, reads=True))
    made = Synthesiser(encoder(config, tokens(config, vocab)), prenet, body, head, wiring=config.wiring)
    guided(made, ALIGNERS[reader])
    return made
