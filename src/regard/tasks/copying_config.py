"""Settings of tasks that copy words of their source."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import Config


@dataclass
class Copying(Config):
    """Words in lower case, signs by themselves, one vocabulary for both sides."""

    vocab: int = 20_000  # words at most
    copy: bool = True  # without: the same model, whose answers have words of its vocabulary only
    pointers: int = 1  # heads of the pointer
    coverage: float = 0.0  # weight of the loss for attending to the same words again
    cut: int = 200  # words of a source that are read at most
    max_new_tokens: int = 40  # words of an answer at most


def acl_titles_config() -> Copying:
    return Copying(
        task="acl_titles",
        precision="tf32",
        vocab=8_000,
        cut=200,
        max_new_tokens=40,
        width=256,
        heads=4,
        depth=4,
        decoder_depth=3,
        ffn=1024,
        dropout=0.3,
        steps=2000,
        batch_tokens=16_384,
        lr=1e-3,
        schedule="cosine",
        warmup=400,
        validate_every=500,
        save_every=250,
        average=4,
        beam=5,
        max_len=256,
    )


def wikisql_config() -> Copying:
    return Copying(
        task="wikisql",
        precision="tf32",
        vocab=8_000,
        cut=80,
        max_new_tokens=80,
        width=256,
        heads=4,
        depth=4,
        decoder_depth=4,
        ffn=1024,
        dropout=0.2,
        steps=2500,
        batch_tokens=8_192,
        lr=1e-3,
        schedule="cosine",
        warmup=400,
        validate_every=500,
        save_every=250,
        average=4,
        beam=1,
        max_len=128,
    )
