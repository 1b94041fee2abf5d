"""Settings of tasks with one label for a text."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import Config
from regard.tasks.user_paths import absolute_path


@dataclass
class Sentiment(Config):
    """A text of subwords, words or bytes, and what is taken of it."""

    units: str = "subwords"  # or words, characters, bytes
    vocab: int = 16_000  # units at most
    lower: bool = True
    cut: int = 1024  # units of a text that are read: its beginning and its end, half of it each
    pool: str = "mean"  # token, mean, max, smooth
    forget: float = 0.1  # fraction of units masked in training
    init_from: str = ""  # a finished run, as of mlm, whose embeddings, encoder and vocabulary it starts with

    def __post_init__(self) -> None:
        super().__post_init__()
        self.init_from = absolute_path(self.init_from)


def imdb_config() -> Sentiment:
    return Sentiment(
        task="imdb",
        precision="tf32",
        mixer=["conv", "softmax"],
        pool="max",
        width=128,
        heads=4,
        depth=2,
        ffn=256,
        dropout=0.5,
        steps=2000,
        batch_tokens=32_768,
        lr=1e-3,
        schedule="cosine",
        warmup=200,
        decay=0.01,
        validate_every=250,
        save_every=250,
        max_len=1024,
    )


def polarity_config() -> Sentiment:
    return Sentiment(
        task="polarity",
        units="words",
        forget=0.0,
        width=64,
        heads=4,
        depth=2,
        ffn=128,
        dropout=0.1,
        steps=800,
        batch_tokens=2048,
        lr=2e-3,
        schedule="cosine",
        warmup=50,
        validate_every=200,
        save_every=200,
        max_len=256,
    )
