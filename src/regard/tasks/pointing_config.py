"""Settings of tasks that are answered by positions of the input. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from regard.config import Config


@dataclass
class Pointing(Config):
    """Sets of points."""

    least: int = 5  # points of a set at least
    most: int = 10  # and at most
    examples: int = 20_000  # sets of train


def hull_config() -> Pointing:
    return Pointing(
        task="hull",
        width=64,
        heads=4,
        depth=2,
        decoder_depth=1,
        ffn=128,
        dropout=0.0,
        steps=3000,
        batch_tokens=1024,
        lr=2e-3,
        schedule="cosine",
        warmup=200,
        validate_every=500,
        save_every=500,
        max_len=128,
    )


def sorting_config() -> Pointing:
    """Make the settings of hull, with fewer updates."""
    return replace(hull_config(), task="sorting", steps=2000)
