"""Settings of tasks on files of a user. Each setting that names a file or a column is also an option of `regard train`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from regard.config import Config
from regard.tasks.image_config import Images
from regard.tasks.language_modeling_config import Language
from regard.tasks.presets import Preset
from regard.tasks.sentiment_config import Sentiment
from regard.tasks.tagging_config import Tagging, ewt_config
from regard.tasks.translation_config import Translation, multi30k_config
from regard.tasks.user_paths import absolute_path


@dataclass
class GivenSplits(Config):
    """Files of validation and of the test, where a user has them apart."""

    valid: list[str] = field(default_factory=list)  # files of validation, as those of train are; else held out of train
    test: list[str] = field(default_factory=list)  # files of the test; else held out of train

    def __post_init__(self) -> None:
        super().__post_init__()
        self.valid, self.test = ([absolute_path(path) for path in paths] for paths in (self.valid, self.test))


@dataclass
class Classification(GivenSplits, Sentiment):
    """Texts and labels of one file, or of a folder for each label."""

    csv: str = ""  # a CSV file whose first line names its columns; its absolute path is kept
    jsonl: str = ""  # or a file with a JSON object on every line
    folder: str = ""  # or a folder that has one for each label, and those a text in every file; also below train and test
    text: str = "text"  # the column, or key, of the texts
    label: str = "label"  # the column, or key, of the labels
    delimiter: str = "auto"  # between the columns of a CSV file: comma, tab, semicolon; auto: as its header has it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.csv, self.jsonl, self.folder = map(absolute_path, (self.csv, self.jsonl, self.folder))


def classify_config() -> Classification:
    return Classification(
        task="classify",
        precision="tf32",
        mixer=["conv", "softmax"],
        vocab=8000,
        cut=256,
        width=128,
        heads=4,
        depth=2,
        ffn=256,
        dropout=0.3,
        steps=600,
        batch_tokens=4096,
        lr=2e-3,
        schedule="cosine",
        warmup=50,
        decay=0.01,
        validate_every=100,
        save_every=100,
        max_len=256,
    )


@dataclass
class OwnImages(GivenSplits, Images):
    """Images of a folder for each label."""

    folder: str = ""  # a folder that has one for each label, and those an image in every file; also below train and test
    side: int = 32  # pixels of a side to which the middle square of every image is scaled
    gray: bool = False  # levels of gray in place of colours

    def __post_init__(self) -> None:
        super().__post_init__()
        self.folder = absolute_path(self.folder)


def images_config() -> OwnImages:
    return OwnImages(
        task="images",
        precision="tf32",
        stem="patches(side=4)",
        positions="learned_2d",
        width=128,
        heads=4,
        depth=4,
        ffn=256,
        activation="gelu",
        dropout=0.1,
        smoothing=0.1,
        steps=1500,
        batch_tokens=64,
        lr=1e-3,
        schedule="cosine",
        warmup=100,
        decay=0.05,
        colour=0.2,
        validate_every=250,
        save_every=250,
    )


OWN_IMAGE_PRESETS: dict[str, Preset] = {
    "cnn": {
        "stem": "cnn(channels=32, stages=3, blocks=2)",
        "depth": 0,
        "positions": "none",
        "lr": 2e-3,
        "colour": 0.0,
    },
    "hybrid": {"stem": "cnn(channels=32, stages=2, blocks=1)", "depth": 2},
    "mlp_mixer": {"mixer": "mlp_mixer", "positions": "none"},
}


@dataclass
class OwnText(GivenSplits, Language):
    """Windows of the text of one file."""

    file: str = ""  # a text file; its absolute path is kept
    units: str = "characters"  # or bytes, of any file, or subwords
    vocab: int = 4000  # subwords at most

    def __post_init__(self) -> None:
        super().__post_init__()
        self.file = absolute_path(self.file)


def text_config() -> OwnText:
    return OwnText(
        task="text",
        precision="tf32",
        window=128,
        width=128,
        heads=4,
        depth=4,
        ffn=512,
        activation="gelu",
        positions="rotary",
        dropout=0.1,
        steps=2000,
        batch_tokens=4096,
        lr=1e-3,
        betas=[0.9, 0.99],
        decay=0.1,
        schedule="cosine",
        warmup=100,
        validate_every=250,
        save_every=250,
        max_len=1024,
    )


@dataclass
class OwnPairs(GivenSplits, Translation):
    """Lines of two files."""

    pairs: list[str] = field(default_factory=list)  # the file of the sources and that of the targets; absolute paths are kept

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pairs = [absolute_path(path) for path in self.pairs]


def translate_config() -> OwnPairs:
    """Make the settings of multi30k, with texts as they are written."""
    return OwnPairs(**asdict(multi30k_config()) | {"task": "translate", "lower": False})


@dataclass
class OwnTags(GivenSplits, Tagging):
    """Words and tags of one file."""

    conll: str = ""  # a CoNLL-U file, or a word and its tag on every line; its absolute path is kept
    column: int = 0  # of the tag, counted from 1; 0: UPOS of CoNLL-U, or the second of two

    def __post_init__(self) -> None:
        super().__post_init__()
        self.conll = absolute_path(self.conll)


def tag_config() -> OwnTags:
    """Make the settings of ewt."""
    return OwnTags(**asdict(ewt_config()) | {"task": "tag"})
