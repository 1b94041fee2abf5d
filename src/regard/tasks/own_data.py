"""Tasks on files of a user: a label for every text of a CSV or JSONL file or of folders, a language model of a text."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from regard.data.batch import UNKNOWN
from regard.data.datasets import LabelledText, Splits
from regard.data.naive_bayes import NaiveBayes
from regard.data.own_files import (
    DELIMITERS,
    in_train,
    read_labelled_csv,
    read_labelled_jsonl,
    split_labelled,
    split_text,
)
from regard.data.own_folders import read_labelled_folder
from regard.data.text_files import DataError, NotTextError, read_any_file, read_text
from regard.data.vocabulary import FIRST_TEXT_ID, Bytes, Characters, Subwords
from regard.options import check_choice
from regard.tasks.label_counts import label_line, train_alone
from regard.tasks.language_modeling import LanguageTask
from regard.tasks.own_data_config import Classification, OwnText
from regard.tasks.own_file import OwnFiles
from regard.tasks.sentiment import SentimentTask
from regard.tasks.support import check_vocab

OWN_UNITS: dict[str, type[Characters | Bytes | Subwords]] = {"characters": Characters, "bytes": Bytes, "subwords": Subwords}


class ClassificationTask(SentimentTask):
    """Labels for a user's texts; scored by accuracy, beside that of the most frequent label and of naive Bayes."""

    config: Classification

    def __init__(self, config: Classification) -> None:
        super().__init__(config)
        check_choice("delimiter", config.delimiter, ("auto", *DELIMITERS))
        paths = [path for path in (config.csv, config.jsonl, config.folder) if path]
        if len(paths) > 1:
            raise ValueError("the texts are in one place: give --csv, --jsonl or --folder, not two of them")
        self.files = OwnFiles(paths, config.valid, config.test, folder=bool(config.folder))
        self.bayes: dict[str, float] = {}  # accuracy of naive Bayes by split
        self.repeated: dict[str, int] = {}  # texts of val and test that train has too

    def unused(self) -> dict[str, str]:
        found, config = super().unused(), self.config
        if config.jsonl or config.folder:
            found["delimiter"] = "--csv"
        return found | (dict.fromkeys(("text", "label"), "--csv and --jsonl") if config.folder else {})

    def examples(self, folder: Path | None) -> Splits[list[LabelledText]]:
        if not self.files.files:
            columns = "with --text COLUMN and --label COLUMN, or --folder FOLDER"
            raise DataError(f"which file has the texts? Give --csv FILE or --jsonl FILE, {columns}")
        paths = self.files.find_single(folder)
        found = {split: self._texts_of(path) for split, path in paths.items()}
        if empty := [path for split, path in paths.items() if not found[split] and split != "train"]:
            raise DataError(f"{empty[0]} has no text in it")
        parts = split_labelled(found.pop("train"), paths["train"], self.files.held)._replace(**found)
        label_of = NaiveBayes(parts.train)
        self.bayes = {"val": label_of.accuracy(parts.val), "test": label_of.accuracy(parts.test)}
        self.repeated = in_train(parts, lambda x: x.text)
        return parts

    def _texts_of(self, path: Path) -> list[LabelledText]:
        config = self.config
        if config.folder:
            return read_labelled_folder(path)
        if config.csv:
            return read_labelled_csv(path, config.text, config.label, config.delimiter)
        return read_labelled_jsonl(path, config.text, config.label)

    def describe_data(self) -> list[str]:
        counts = {name: Counter(label for _, label in part) for name, part in self.splits.items()}
        floors = " and ".join(f"{self._floor(name):.1f} % of {name}" for name in ("val", "test"))
        bayes = " and ".join(f"{accuracy:.1f} % of {name}" for name, accuracy in self.bayes.items())
        how, totals = self.files.chosen("by a hash of each text"), {name: part.total() for name, part in counts.items()}
        return [
            self.files.describe(totals, "texts", how),
            *self.files.repeats(self.repeated, "texts"),
            *self.files.beside(),
            label_line(counts, self.labels),
            *(line + self._hint(names) for line, names in train_alone(counts, self.labels)),
            f"floor: the most frequent label, {self.labels[self._most_frequent()]}, is right for {floors}",
            f"floor: naive Bayes of the words is right for {bayes}",
        ]

    def _hint(self, names: list[str]) -> str:
        """Write what to do where the label that train alone has is that of reviews without one, of aclImdb."""
        if not (self.config.folder and names == ["unsup"] and {"neg", "pos"} <= {*map(str, self.labels)}):
            return ""
        return f"; this looks like aclImdb: {self._prepare_imdb()} leaves unsup out, for regard train imdb"

    def _prepare_imdb(self) -> str:
        """Write the command that reads aclImdb, which is the folder of the texts or has it as train."""
        folder = Path(self.config.folder)
        return shlex.join(["regard", "prepare", "imdb", str(folder.parent if folder.name == "train" else folder)])

    def _most_frequent(self) -> int:
        """Return the label that most training texts have, the first of equals."""
        counts = Counter(label for _, label in self.splits["train"])
        return max(sorted(counts), key=counts.__getitem__)

    def _floor(self, split: str) -> float:
        """Return the accuracy of the most frequent label, in percent."""
        most, examples = self._most_frequent(), self.splits[split]
        return 100 * sum(label == most for _, label in examples) / max(1, len(examples))

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        return {**super().score(model, split), "floor": self._floor(split), "bayes": self.bayes[split]}

    def assets(self) -> dict[str, str]:
        return {**super().assets(), **self.files.assets()}

    def restore(self, assets: Mapping[str, str]) -> None:
        super().restore(assets)
        self.files.restore(assets)


class OwnTextTask(LanguageTask):
    """The next character, byte or subword of a user's text; scored by cross-entropy, beside that of frequencies alone."""

    config: OwnText

    def __init__(self, config: OwnText) -> None:
        super().__init__(config)
        check_choice("units", config.units, OWN_UNITS)
        if config.units == "subwords":
            check_vocab(config.units, config.vocab)
        self.units_class = OWN_UNITS[config.units]
        self.files = OwnFiles([config.file] if config.file else [], config.valid, config.test)

    @property
    def description(self) -> str:
        return f"the next {self.config.units.removesuffix('s')} of your text"

    def unused(self) -> dict[str, str]:
        return super().unused() | ({} if self.config.units == "subwords" else {"vocab": "units=subwords"})

    def parts(self, folder: Path | None) -> Splits[str]:
        if not self.config.file:
            raise DataError("which file has the text? Give --file FILE")
        texts = {split: self._text_of(path) for split, (path,) in self.files.find(folder).items()}
        parts = split_text(texts.pop("train"), self.files.held)._replace(**texts)
        if min(map(len, parts)) < 2:
            raise self._too_few(sum(map(len, parts)), "characters")
        return parts

    def _text_of(self, path: Path) -> str:
        """Read the text of a file; with units=bytes that of any file."""
        if self.config.units == "bytes":
            return read_any_file(path)
        try:
            return read_text(path)
        except NotTextError as error:
            raise DataError(f"{error}. {self.config.units.capitalize()} need UTF-8: --set units=bytes takes any file") from None

    def encode(self, text: str) -> list[int]:
        if self.config.units != "bytes":
            return super().encode(text)
        return [byte + FIRST_TEXT_ID for byte in text.encode(errors="surrogateescape")]

    def _too_few(self, count: int, units: str) -> DataError:
        place = " and ".join(file.path for files in self.files.files.values() for file in files)
        return DataError(f"{place} has {count:,} {units}: too few to be split into train, val and test")

    def learn(self, train: str) -> Characters | Bytes | Subwords:
        units = self.config.units
        if units == "subwords":
            return Subwords.of([train], size=self.config.vocab)
        return Bytes() if units == "bytes" else Characters.of([train])

    def read(self, folder: Path | None = None) -> None:
        super().read(folder)
        if self.config.units == "bytes":
            self.sample = "".join(x for x in self.sample if x.isprintable())  # of a file that may not be text
        units, window, count = self.config.units, self.config.window, len(self.texts["train"])
        if min(map(len, self.texts.values())) < 2:
            raise self._too_few(sum(map(len, self.texts.values())), units)
        if count <= window:
            needed = f"a window of {window:,} needs {window + 1:,}: use --set window={count - 1}, or a longer text"
            raise DataError(f"{self.config.file} is too short: its training part has {count:,} {units}, but {needed}")

    def describe_data(self) -> list[str]:
        units = self.config.units
        counts = {name: len(ids) for name, ids in self.texts.items()}
        lines = [self.files.describe(counts, units, "from its beginning to its end")]
        if units == "characters":
            lines.append(f"{len(self.characters) - FIRST_TEXT_ID:,} different characters in train")
        if units == "subwords":
            lines.append(f"vocabulary: {len(self.characters):,} subwords of train")
        if new := sum(int((self.texts[name] == UNKNOWN).sum()) for name in ("val", "test")):
            lines.append(
                f"not in train, and not told apart: {new:,} of the characters of val and test; --set units=bytes knows all"
            )
        floors = " and ".join(f"{self._floor_bits(name):.3f} on {name}" for name in ("val", "test"))
        return [*lines, f"floor: {units} by their frequency in train alone have {floors}, in bits"]

    def _floor_bits(self, split: str) -> float:
        """Return the cross-entropy of unigrams of train, each counted once more than it occurs, in bits."""
        size = len(self.characters)
        counts = torch.bincount(self.texts["train"], minlength=size).double()
        counts[UNKNOWN], counts[FIRST_TEXT_ID:] = 1, counts[FIRST_TEXT_ID:] + 1
        return float((counts.sum().log2() - counts[self.texts[split][1:]].log2()).mean())

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        found = {**super().score(model, split), "floor_bits": self._floor_bits(split)}
        if isinstance(self.characters, Subwords):
            ids = self.texts[split][1:].tolist()
            found["bits_per_byte"] = found["bits"] * len(ids) / max(1, self.characters.byte_count(ids))
        return found

    def assets(self) -> dict[str, str]:
        return {**super().assets(), **self.files.assets()}

    def restore(self, assets: Mapping[str, str]) -> None:
        super().restore(assets)
        self.files.restore(assets)
