"""Settings of parsing: a tree for a sentence, as a sequence of brackets."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import Config


@dataclass
class Parsing(Config):
    """Sentences by words and letters, trees as brackets."""

    min_count: int = 2  # occurrences of a word that gets a vector of its own
    letters: int = 20  # of a word, the first and the last of them
    spelling: int = 128  # width of the vector of its letters
    forget: float = 0.2  # fraction of words masked in training, so that spelling is learned
    tags: bool = True  # parts of speech are predicted too; without: XX for every word, as in the paper
    functions: bool = False  # labels keep their functions: NP-SBJ. They are not scored
    chain: int = 8  # brackets opened between two words at most
    max_new_tokens: int = 400  # tokens of a tree at most, a word and each bracket one of them


def gum_config() -> Parsing:
    return Parsing(
        task="gum",
        precision="tf32",
        width=256,
        heads=4,
        depth=4,
        decoder_depth=3,
        ffn=1024,
        dropout=0.3,
        steps=5000,
        batch_tokens=8_192,
        lr=1e-3,
        schedule="cosine",
        warmup=400,
        smoothing=0.1,
        validate_every=1000,
        save_every=250,
        average=4,
        beam=5,
        max_len=512,
    )
