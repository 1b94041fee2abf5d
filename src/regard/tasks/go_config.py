"""Settings of Go: the move of a professional."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import Config


@dataclass
class Go(Config):
    """Positions of games, and networks over the board."""

    net: str = "conv"  # conv, pooled (the same with pooling), hybrid (with attention blocks), attention (no convolutions)
    every: int = 4  # hybrid: each so-manieth block is one of attention
    games: int = 0  # training games, the first of the file; 0: all
    symmetric: bool = True  # training positions are turned by one of the eight symmetries, drawn each time
    views: int = 1  # symmetries whose answers are averaged in scores and predictions: 1 or 8
    play: int = 0  # `predict` goes on with a game for so many moves and writes SGF; 0: it names the likeliest moves
    temperature: float = 0.0  # of moves that are played: 0 plays the likeliest


def go_config() -> Go:
    return Go(
        task="go",
        precision="bf16-mixed",
        width=128,
        heads=4,
        depth=12,
        ffn=512,
        dropout=0.0,
        positions="rotary_2d(columns=19)",
        max_len=361,
        steps=12_000,
        batch_tokens=361 * 512,
        lr=1e-3,
        schedule="cosine",
        warmup=300,
        decay=0.01,
        validate_every=2000,
        save_every=1000,
    )
