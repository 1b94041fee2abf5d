"""Settings of speech synthesis."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import Config


@dataclass
class Synthesis(Config):
    """Characters to log-mel frames, in windows of 25 ms every 10 ms."""

    mels: int = 40  # filters
    decibels: float = 50.0  # energies that are so far below the loudest of train are as if they were at that floor
    reduction: int = 3  # frames that the decoder makes at a step
    reader: str = "plain"  # how it reads the text: plain (softmax), location, monotonic, monotonic-additive
    guide: float = 1.0  # weight of the guided attention loss, for weights far from the diagonal; 0: none
    guide_width: float = 0.2  # of that diagonal, as a share of the text
    frame_loss: str = "l1+l2"  # l1, l2, l1+l2
    prenet: int = 64  # width of the two layers that a frame goes through
    prenet_dropout: float = 0.5  # in them
    test_dropout: bool = True  # it stays on in evaluation and answers
    take: int = 1  # another number draws other dropout: another rendition of the same text
    phases: int = 60  # rounds of Griffin and Lim, for a wav file


@dataclass
class DigitSynthesis(Synthesis):
    """Strings of digits by one voice."""

    voice: str = "george"  # of fsdd


@dataclass
class CorpusSynthesis(Synthesis):
    """Texts of a corpus in the layout of LJ Speech."""

    rate: int = 16_000  # samples a second: recordings are resampled


def tones_config() -> Synthesis:
    return Synthesis(
        task="tones",
        width=96,
        heads=2,
        depth=2,
        decoder_depth=2,
        ffn=192,
        dropout=0.05,
        steps=1500,
        batch_tokens=3000,
        lr=3e-3,
        schedule="cosine",
        warmup=100,
        validate_every=300,
        save_every=300,
        max_len=256,
    )


def fsdd_tts_config() -> DigitSynthesis:
    return DigitSynthesis(
        task="fsdd_tts",
        width=128,
        heads=2,
        depth=3,
        decoder_depth=3,
        ffn=512,
        steps=3000,
        batch_tokens=6000,
        lr=1e-3,
        schedule="cosine",
        warmup=200,
        validate_every=500,
        save_every=500,
        max_len=512,
    )


def tts_config() -> CorpusSynthesis:
    return CorpusSynthesis(
        task="tts",
        mels=80,
        prenet=128,
        width=256,
        heads=4,
        depth=4,
        decoder_depth=4,
        ffn=1024,
        steps=10_000,
        batch_tokens=16_000,
        lr=1e-3,
        schedule="cosine",
        warmup=1000,
        validate_every=1000,
        save_every=1000,
        precision="tf32",
        max_len=1024,
    )
