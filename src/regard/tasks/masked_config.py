"""Settings of masked-language pre-training. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from regard.tasks.own_data_config import GivenSplits
from regard.tasks.presets import Preset
from regard.tasks.user_paths import absolute_path

CORPORA = ("imdb", "polarity", "ewt", "saw")


@dataclass
class MaskedLanguage(GivenSplits):
    """Texts, what they are made of, and which of their tokens are predicted."""

    file: str = ""  # a text file, every line a text; its absolute path is kept
    corpus: str = ""  # or the texts of a task: imdb, polarity, ewt, saw
    join: bool = False  # lines of the file are one text, as of a book
    units: str = "subwords"  # or words, characters, bytes, or spelled: words with their letters, as taggers read them
    vocab: int = 16_000  # units at most
    lower: bool = True
    window: int = 256  # units of an example at most; a longer text is cut into several
    min_count: int = 2  # units=spelled: occurrences of a word that gets a vector of its own
    letters: int = 20  # units=spelled: of a word, the first and the last of them
    spelling: int = 128  # units=spelled: width of the vector of its letters
    predicted: float = 0.15  # fraction of the tokens that are predicted, drawn anew at every update
    masked: float = 0.8  # fraction of those that are masked
    random: float = 0.1  # fraction of those that are replaced by a random token; the rest is kept as it is
    top: int = 1  # candidates of a blank that predict answers; 1: the text with its blanks filled

    def __post_init__(self) -> None:
        super().__post_init__()
        self.file = absolute_path(self.file)


def mlm_config() -> MaskedLanguage:
    """Make settings whose encoder is that of imdb and classify."""
    return MaskedLanguage(
        task="mlm",
        precision="tf32",
        mixer=["conv", "softmax"],
        width=128,
        heads=4,
        depth=2,
        ffn=256,
        dropout=0.1,
        steps=4000,
        batch_tokens=16_384,
        lr=1e-3,
        schedule="linear",
        warmup=400,
        decay=0.01,
        validate_every=500,
        save_every=500,
        max_len=1024,
    )


# Each with the encoder of the task whose texts it reads, so that this can start from it.
MLM_PRESETS: dict[str, Preset] = {
    "imdb": {"corpus": "imdb"},
    "ewt": {
        "corpus": "ewt",
        "units": "spelled",
        "mixer": ["rnn", "rnn", "softmax"],
        "width": 320,
        "heads": 8,
        "depth": 3,
        "ffn": 640,
        "spelling": 256,
        "window": 128,
        "batch_tokens": 4096,
        "max_len": 512,
    },
    "polarity": {
        "corpus": "polarity",
        "units": "words",
        "mixer": "softmax",
        "width": 64,
        "ffn": 128,
        "window": 64,
        "steps": 1500,
        "batch_tokens": 2048,
        "lr": 2e-3,
        "warmup": 100,
        "max_len": 256,
    },
    "saw": {
        "corpus": "saw",
        "units": "spelled",
        "mixer": "softmax",
        "width": 64,
        "ffn": 128,
        "min_count": 1,
        "spelling": 32,
        "window": 64,
        "steps": 1500,
        "batch_tokens": 2048,
        "lr": 2e-3,
        "warmup": 100,
        "max_len": 128,
    },
}
