"""Settings of tasks with a label for every word."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import Config
from regard.tasks.user_paths import absolute_path


@dataclass
class Tagging(Config):
    """Words by what they are and how they are spelt."""

    min_count: int = 2  # occurrences of a word that gets a vector of its own
    letters: int = 20  # of a word, the first and the last of them
    spelling: int = 128  # width of the vector of its letters
    forget: float = 0.2  # fraction of words masked in training, so that spelling is learned
    fine: float = 1.0  # weight of the finer tags of the data, which it learns beside the others; they are not scored
    init_from: str = ""  # a finished run, as of mlm with units=spelled, whose embeddings, encoder and vocabulary it starts with

    def __post_init__(self) -> None:
        super().__post_init__()
        self.init_from = absolute_path(self.init_from)


def ewt_config() -> Tagging:
    return Tagging(
        task="ewt",
        mixer=["rnn", "rnn", "softmax"],
        width=320,
        heads=8,
        depth=3,
        ffn=640,
        dropout=0.4,
        spelling=256,
        forget=0.3,
        fine=0.5,
        steps=2200,
        batch_tokens=2048,
        lr=1.5e-3,
        schedule="cosine",
        warmup=200,
        decay=0.01,
        smoothing=0.1,
        precision="tf32",
        validate_every=200,
        save_every=200,
        average=4,
        max_len=512,
    )


def saw_config() -> Tagging:
    return Tagging(
        task="saw",
        width=64,
        heads=4,
        depth=2,
        ffn=128,
        dropout=0.1,
        steps=700,
        batch_tokens=1024,
        lr=2e-3,
        schedule="cosine",
        warmup=50,
        validate_every=250,
        save_every=250,
        min_count=1,
        spelling=32,
        max_len=128,
    )
