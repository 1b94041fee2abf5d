"""Speech recognition: an encoder of windows with a CTC head, alone or with a decoder that attends to it.

Letters: b batch, t windows, f features, n tokens of the encoder, w width, v vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.conformer import conformer
from regard.blocks.stack import Stack
from regard.config import Config
from regard.mixers.dims import Dims
from regard.mixers.feature_math import upcast
from regard.models.build import glorot, stack, tokens
from regard.models.embedding import Embedding, add_positions
from regard.models.encoder import Encoded, Encoder
from regard.models.frames import Frames
from regard.models.guided import ALIGNERS, guided
from regard.models.heads import NextToken, PerVector
from regard.models.translator import SourceMemory, Translator
from regard.text import unknown

SPEECH_BLOCKS = ("conformer", "transformer")
READERS = ("cross", *ALIGNERS)


class CtcSlotLogs(NamedTuple):
    """Log-probabilities of the classes in every slot, and which slots are real."""

    logs: Tensor  # (b n v), in float32 or better
    valid: Tensor | None  # (b n)
    encoded: Encoded


class CtcRecogniser(nn.Module):
    """Predict a class for every token of an encoder; the blank is class 0."""

    def __init__(self, encoder: Encoder, vocab: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.ctc = PerVector(encoder.width, vocab, dropout=dropout)

    def slots(self, x: Tensor, valid: Tensor | None = None) -> CtcSlotLogs:
        """Encode windows (b t f), of which `valid` (b t) are real."""
        return _slots(self.encoder, self.ctc, x, valid)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.slots(x, valid).logs


class JointRecogniser(Translator):
    """A `Translator` of windows to text, with a CTC head on its encoder. Watanabe et al. 2017, doi:10.1109/JSTSP.2017.2763455."""

    def __init__(
        self, encoder: Encoder, embed: Embedding, decoder: Stack, head: nn.Module, vocab: int, *, wiring: str, dropout: float
    ) -> None:
        super().__init__(encoder, embed, decoder, head, wiring=wiring)
        self.ctc = PerVector(encoder.width, vocab, dropout=dropout)

    def slots(self, x: Tensor, valid: Tensor | None = None) -> CtcSlotLogs:
        """Encode windows (b t f), of which `valid` (b t) are real; `memory` makes what the decoder reads of it."""
        return _slots(self.encoder, self.ctc, x, valid, layers=self.wiring.norms is not None)

    def memory(self, encoded: Encoded) -> SourceMemory:
        """Return what the blocks of the decoder read."""
        return SourceMemory(self.wiring(encoded), encoded.places)


def _slots(encoder: Encoder, head: nn.Module, x: Tensor, valid: Tensor | None, *, layers: bool = False) -> CtcSlotLogs:
    read = encoder(x, valid, layers=layers)
    return CtcSlotLogs(upcast(head(read.x)).log_softmax(-1), read.valid, read)


def speech_encoder(
    config: Config,
    features: int,
    *,
    halvings: int = 2,
    channels: int = 0,
    scale: bool = False,
    block: str = "conformer",
    kernel: int = 15,
) -> Encoder:
    """Build the encoder of windows of so many features: convolutions that halve their number (see `Frames`), then blocks.

    With `scale`, that of `Frames`, what blocks add is small at first: the residual stream is the recording.
    """
    if block not in SPEECH_BLOCKS:
        raise ValueError(unknown("no block is called", block, SPEECH_BLOCKS))
    outside, inside = add_positions(config.positions, Dims(config.width, config.heads, max_len=config.max_len))
    embed = Frames(
        features, config.width, halvings=halvings, channels=channels, scale=scale, positions=outside, dropout=config.dropout
    )
    body = glorot(stack(config) if block == "transformer" else _conformer_body(config, inside, kernel))
    return Encoder(embed, quiet(body) if scale else body)


def _conformer_body(config: Config, positions: str | None, kernel: int) -> Stack:
    if config.norm != "pre" or config.gated:
        raise ValueError("a conformer has norms in front and plain feed-forward layers: leave out norm and gated")
    return conformer(
        config.mixer,
        width=config.width,
        heads=config.heads,
        depth=config.depth,
        ffn=config.ffn,
        kernel=kernel,
        positions=positions,
        max_len=config.max_len,
        activation=config.activation,
        dropout=config.dropout,
        weight_dropout=config.weight_dropout,
    )


def quiet(body: Stack) -> Stack:
    """Divide the weights of the last map of every part by sqrt(2 depth), as GPT-2 does. Radford et al. 2019."""
    with torch.no_grad():
        for name, p in body.named_parameters():
            if name.split(".")[-2:-1] in (["out"], ["down"]):
                p.div_((2 * len(body.blocks)) ** 0.5)
    return body


def recogniser(config: Config, encoder: Encoder, vocab: int, *, reader: str | None = None) -> CtcRecogniser | JointRecogniser:
    """Build a recogniser on an encoder: CTC alone, or with a decoder whose `reader` is cross attention (`config.cross`) or an
    aligner: plain, monotonic, monotonic-additive, location.
    """
    if reader is None:
        return CtcRecogniser(encoder, vocab, dropout=config.dropout)
    if reader not in READERS:
        raise ValueError(unknown("no reader is called", reader, READERS))
    if reader != "cross" and config.cross != Config.cross:
        raise ValueError(f"cross={config.cross!r} is in no block where {reader} readers are in all: leave it out")
    embed = tokens(config, vocab)
    head = NextToken(config.width, vocab, table=embed.table if config.share else None)
    body = glorot(stack(config, causal=True, reads=True))
    made = JointRecogniser(encoder, embed, body, head, vocab, wiring=config.wiring, dropout=config.dropout)
    if reader != "cross":
        guided(made, ALIGNERS[reader])
    return made
