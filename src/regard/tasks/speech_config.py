"""Settings of tasks on recordings: what is computed of a wav file, and how training changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regard.config import Config


@dataclass
class Speech(Config):
    """Windows of 25 ms every 10 ms, subsampled by convolutions, and blocks over them."""

    features: str = "mel"  # of a window: mel (log energies), mfcc (13 cepstra with their slopes)
    mels: int = 40  # filters
    normalise: str = "utterance"  # by mean and spread of an utterance, by its mean alone (mean), or by those of training (train)
    halvings: int = 2  # convolutions with a stride of 2 before the first block
    channels: int = 0  # of these convolutions over time and features, which halve both; 0: over time alone
    scale: bool = False  # tokens times sqrt(width), and blocks that add little at first: CTC then hears much earlier
    block: str = "conformer"  # or transformer
    kernel: int = 15  # windows of the convolution in a conformer, after subsampling
    positions: str = "relative"
    activation: str = "silu"
    speeds: list[float] = field(default_factory=lambda: [0.9, 1.0, 1.1])  # each recording is learned from at all of them
    time_masks: int = 2  # SpecAugment: stretches of time set to their mean
    time_share: float = 0.1  # of a recording, the longest of them
    bands: int = 2  # bands of features set to their mean
    band_width: int = 8  # features of the widest


@dataclass
class SpokenLabel(Speech):
    """One label for a recording."""

    held_out: list[str] = field(default_factory=list)  # voices that are not learned from; none: the official split
    pool: str = "mean"  # mean, max, smooth
    trim: float = 0.0  # decibels below the loudest window at which the ends of a recording are cut off; 0: they stay
    floor: float = 0.0  # decibels below the loudest energy at which even noise is added to a recording; 0: none
    floor_change: float = 0.0  # decibels by which training moves that floor up or down, anew each time


@dataclass
class Recognition(Speech):
    """The text of a recording, in characters."""

    ctc_weight: float = 0.3  # of the CTC loss; the rest is that of a decoder that attends. 1: no decoder
    reader: str = "cross"  # of the decoder: cross (see there), plain, location, monotonic, monotonic-additive
    decode: str = "ctc"  # ctc (prefix beam search), attention (beam search), joint (CTC's best, scored by both)
    max_new_tokens: int = 100  # characters of an answer at most


@dataclass
class DigitStrings(Recognition):
    """Strings of digits, by voices that are not learned from."""

    held_out: list[str] = field(default_factory=lambda: ["theo"])  # the voices of the test part


def _digit_config(**own: Any) -> SpokenLabel:
    """Return what tasks of one label for a recording of FSDD share."""
    return SpokenLabel(
        **own,
        kernel=7,
        width=128,
        heads=4,
        ffn=256,
        dropout=0.2,
        batch_tokens=4096,
        lr=1e-3,
        schedule="cosine",
        warmup=100,
        decay=0.01,
        smoothing=0.1,
        validate_every=200,
        save_every=200,
        max_len=512,
    )


def fsdd_config() -> SpokenLabel:
    return _digit_config(
        task="fsdd",
        held_out=["theo"],
        speeds=[0.8, 0.9, 1.0, 1.1, 1.25],
        normalise="mean",
        trim=22.0,
        floor=30.0,
        floor_change=9.0,
        bands=0,
        channels=32,
        depth=2,
        steps=1200,
    )


def fsdd_speaker_config() -> SpokenLabel:
    # The mean of a recording is a part of its voice: utterance would subtract it.
    return _digit_config(
        task="fsdd_speaker",
        held_out=["nicolas", "theo"],
        speeds=[1.0],
        normalise="train",
        halvings=1,
        depth=3,
        steps=800,
    )


def an4_config() -> Recognition:
    return Recognition(
        task="an4",
        features="mfcc",
        scale=True,
        positions="rotary",
        ctc_weight=0.5,
        width=144,
        heads=4,
        depth=4,
        decoder_depth=2,
        ffn=576,
        bands=0,
        dropout=0.1,
        precision="tf32",
        steps=6000,
        batch_tokens=4096,
        lr=1e-3,
        schedule="cosine",
        warmup=200,
        decay=0.01,
        smoothing=0.1,
        validate_every=500,
        save_every=50,
        average=10,
        beam=10,
        max_len=512,
    )


def fsdd_strings_config() -> DigitStrings:
    return DigitStrings(
        task="fsdd_strings",
        held_out=["theo"],
        ctc_weight=1.0,
        normalise="train",
        mixer="Truncated(16, 2)",
        kernel=5,
        width=96,
        heads=4,
        depth=3,
        ffn=192,
        positions="rotary",
        dropout=0.1,
        steps=2000,
        batch_tokens=8192,
        lr=1.5e-3,
        schedule="cosine",
        warmup=200,
        decay=0.01,
        validate_every=200,
        save_every=200,
        beam=10,
        max_len=512,
    )
