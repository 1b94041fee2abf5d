"""Settings of tasks that map a text to a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.config import Config
from regard.options import Options
from regard.tasks.decoder_options import DECODERS
from regard.tasks.user_paths import absolute_path
from regard.training.mode_options import MODES


@dataclass
class Translation(Config):
    """Two languages over one vocabulary."""

    families: ClassVar[Mapping[str, Mapping[str, type[Options]]]] = {"decoder": DECODERS, "mode": MODES}

    units: str = "subwords"  # of the vocabulary: subwords, words, characters
    vocab: int = 10_000  # subwords or words at most; characters are all taken
    lower: bool = False  # texts are lower-cased
    bpe_dropout: float = 0.0  # subwords: probability that a merge is left out in training; a text then has eight spellings
    max_new_tokens: int = 100  # tokens of an answer at most
    decoder: str = "autoregressive"  # or one that generates all tokens at once: ctc, masked, length, fixed; options below
    mode: str = "teacher_forcing"  # how the decoder is trained; options below
    init_from: str = ""  # a finished run whose weights it starts with; a non-autoregressive decoder keeps its own slots
    distilled: str = ""  # targets of the training sources by another model, a file that `regard distil` wrote

    def __post_init__(self) -> None:
        super().__post_init__()
        self.init_from, self.distilled = absolute_path(self.init_from), absolute_path(self.distilled)


def multi30k_config() -> Translation:
    return Translation(
        task="multi30k",
        precision="tf32",
        lower=True,
        width=256,
        heads=4,
        depth=4,
        ffn=512,
        dropout=0.3,
        mode="rdrop",
        steps=6000,
        batch_tokens=8192,
        lr=1.5e-3,
        schedule="cosine",
        warmup=500,
        smoothing=0.1,
        validate_every=2000,
        save_every=100,
        average=10,
        beam=5,
        max_len=256,
    )


def _small(task: str, units: str) -> Translation:
    return Translation(
        task=task,
        units=units,
        width=64,
        heads=4,
        depth=2,
        ffn=256,
        dropout=0.0,
        steps=1500,
        batch_tokens=2048,
        lr=3e-3,
        warmup=100,
        schedule="cosine",
        validate_every=250,
        save_every=250,
        max_len=256,
    )


def numbers_config() -> Translation:
    return _small("numbers", units="characters").replace({"steps": 1200, "validate_every": 300, "save_every": 300})


def reverse_config() -> Translation:
    return _small("reverse", units="words")


def copy_config() -> Translation:
    return _small("copy", units="words")
