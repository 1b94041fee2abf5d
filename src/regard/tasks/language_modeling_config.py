"""Settings of language models."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import Config


@dataclass
class Language(Config):
    """Windows of one long text."""

    window: int = 256  # characters of an example at most
    stride: int = 16  # between the beginnings of two windows of an epoch
    max_new_tokens: int = 300  # characters of a continuation at most: with its prompt it has max_len of them
    temperature: float = 0.8


def shakespeare_config() -> Language:
    return Language(
        task="shakespeare",
        precision="tf32",
        width=384,
        heads=6,
        depth=6,
        ffn=1536,
        activation="gelu",
        positions="rotary",
        dropout=0.3,
        weight_dropout=0.2,
        steps=5000,
        batch_tokens=16_384,
        lr=1e-3,
        betas=[0.9, 0.99],
        decay=1.0,
        schedule="cosine",
        warmup=100,
        validate_every=500,
        save_every=250,
        average=8,
        max_len=2048,
    )
