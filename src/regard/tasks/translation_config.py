"""Settings of tasks that give a text for a text."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import Config


@dataclass
class Translation(Config):
    """Two languages over one vocabulary."""

    units: str = "subwords"  # of the vocabulary: subwords, words, characters
    vocab: int = 10_000  # subwords or words at most; characters are all taken
    lower: bool = False  # texts are lower-cased
    waver: float = 0.0  # subwords: how often a merge is left out while it learns (BPE-dropout); a text then has eight spellings
    most: int = 100  # tokens of an answer at most
    mode: str = "teacher"  # how it learns: teacher, agree, free, scheduled, two_pass, parallel, self_critical, minimum_risk
    truth: str = "linear"  # scheduled sampling: how the share of true tokens falls: linear, exponential, inverse_sigmoid
    floor: float = 0.5  # ... and how far
    own: str = "argmax"  # ... and what it gets of itself: argmax, sample, or soft mixes of embeddings: softmax, gumbel
    alpha: float = 1.0  # ... soft mixes: softmax(alpha scores)
    through: bool = False  # ... soft mixes: gradients go back through them
    agree: float = 5.0  # agree: how strongly two passes, each with a dropout of its own, are held together
    samples: int = 8  # minimum_risk: answers that are compared
    begin_from: str = ""  # a run whose weights it starts with; all but the slots of a decoder that says everything at once
    decoder: str = "autoregressive"  # or one that says everything at once: ctc, masked, length, fixed
    teacher: str = ""  # for those: a teacher's answers to the training sources, a file that `regard distil` wrote
    upsample: int = 3  # ctc: slots for every source token
    slots: str = "soft"  # length: what slots hold: soft or uniform copies of the source, none (one vector), begin (BEGIN tokens)
    glance: float = 0.5  # ctc, length, fixed: the share of its mistakes that it is shown in training, at the start
    iterations: int = 4  # masked: rounds of an answer
    lengths: int = 4  # masked, length: lengths that are tried


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
        mode="agree",
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
