"""Tasks on files of a user: a label for every text of a CSV or JSONL file, a language model of a text."""

from __future__ import annotations

import json
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
    file_digest,
    read_labelled_csv,
    read_labelled_jsonl,
    split_labelled,
    split_text,
)
from regard.data.strict_json import JsonError, read_value
from regard.data.text_files import DataError, read_text
from regard.data.vocabulary import FIRST_TEXT_ID, Bytes
from regard.options import check_choice
from regard.tasks.language_modeling import LanguageTask
from regard.tasks.own_data_config import Classification, OwnText
from regard.tasks.sentiment import SentimentTask

DATA_ASSET = "data.json"
OWN_UNITS = ("characters", "bytes")
LABELS_SHOWN = 12  # labels that are printed with their counts


class OwnFile:
    """The file of a run: where it is, and the SHA-256 that it had when training began."""

    def __init__(self, path: str, asset: str = DATA_ASSET) -> None:
        self.path, self.name, self.sha256 = path, asset, ""

    def find(self, folder: Path | None) -> Path:
        """Return the file: at its recorded path, or at `folder`, which is the file or has it; it must not have changed."""
        path = Path(self.path)
        if folder is not None:
            path = folder if folder.is_file() else folder / path.name
        if not path.is_file():
            problem = f"{path} is a folder, not a file" if path.exists() else f"there is no file {path}"
            raise DataError(f"{problem}: check its name, or, where the file of a run has moved, name its new place by --data")
        digest = file_digest(path)
        if self.sha256 and digest != self.sha256:
            raise DataError(
                f"{path} is not as it was when this run was trained (its SHA-256 differs): its splits would be others, and "
                "texts of training among the test. Restore the file, or train again in another folder"
            )
        self.sha256 = digest
        return path

    def asset(self) -> dict[str, str]:
        return {self.name: json.dumps({"file": self.path, "sha256": self.sha256})}

    def restore(self, assets: Mapping[str, str]) -> None:
        try:
            self.sha256 = str(read_value(assets[self.name])["sha256"])
        except (JsonError, TypeError, LookupError) as error:
            if error.args == (self.name,):  # the asset is not there
                raise
            raise ValueError(f"{self.name} holds no SHA-256: restore it") from None


class ClassificationTask(SentimentTask):
    """Labels for the texts of a user's file; scored by accuracy, beside that of the most frequent label and of naive Bayes."""

    config: Classification

    def __init__(self, config: Classification) -> None:
        super().__init__(config)
        check_choice("delimiter", config.delimiter, tuple(DELIMITERS))
        if config.csv and config.jsonl:
            raise ValueError("the texts are in one file: give --csv or --jsonl, not both")
        self.file = OwnFile(config.csv or config.jsonl)
        self.bayes: dict[str, float] = {}  # accuracy of naive Bayes by split

    def examples(self, folder: Path | None) -> Splits[list[LabelledText]]:
        config = self.config
        if not self.file.path:
            raise DataError("which file has the texts? Give --csv FILE or --jsonl FILE, with --text COLUMN and --label COLUMN")
        path = self.file.find(folder)
        if config.csv:
            found = read_labelled_csv(path, config.text, config.label, config.delimiter)
        else:
            found = read_labelled_jsonl(path, config.text, config.label)
        parts = split_labelled(found, path)
        label_of = NaiveBayes(parts.train)
        self.bayes = {"val": label_of.accuracy(parts.val), "test": label_of.accuracy(parts.test)}
        return parts

    def describe_data(self) -> list[str]:
        counts = {name: Counter(label for _, label in part) for name, part in self.splits.items()}
        total = sum(counts.values(), Counter())
        shown = [f"{self.labels[place]} ({count:,})" for place, count in total.most_common(LABELS_SHOWN)]
        more = f" and {len(total) - len(shown):,} more" if len(total) > len(shown) else ""
        sizes = ", ".join(f"{part.total():,} {name}" for name, part in counts.items())
        floors = " and ".join(f"{self._floor(name):.1f} % of {name}" for name in ("val", "test"))
        bayes = " and ".join(f"{accuracy:.1f} % of {name}" for name, accuracy in self.bayes.items())
        return [
            f"{total.total():,} texts of {self.file.path}: {sizes}, by a hash of each text",
            f"{len(total):,} labels: {', '.join(shown)}{more}",
            f"floor: the most frequent label, {self.labels[self._most_frequent()]}, is right for {floors}",
            f"floor: naive Bayes of the words is right for {bayes}",
        ]

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
        return {**super().assets(), **self.file.asset()}

    def restore(self, assets: Mapping[str, str]) -> None:
        super().restore(assets)
        self.file.restore(assets)


class OwnTextTask(LanguageTask):
    """The next character, or byte, of a user's text; scored by cross-entropy, beside that of frequencies alone."""

    config: OwnText

    def __init__(self, config: OwnText) -> None:
        super().__init__(config)
        check_choice("units", config.units, OWN_UNITS)
        if config.units == "bytes":
            self.characters = Bytes()
        self.file = OwnFile(config.file)

    def parts(self, folder: Path | None) -> Splits[str]:
        if not self.file.path:
            raise DataError("which file has the text? Give --file FILE")
        path = self.file.find(folder)
        parts = split_text(read_text(path))
        units, window = self.config.units, self.config.window
        counts = [len(part.encode()) if units == "bytes" else len(part) for part in parts]
        if min(counts) < 2:
            raise DataError(f"{path} has {sum(counts):,} {units}: too few to be split into train, val and test")
        if counts[0] <= window:
            needed = f"a window of {window:,} needs {window + 1:,}: use --set window={counts[0] - 1}, or a longer text"
            raise DataError(f"{path} is too short: its training part has {counts[0]:,} {units}, but {needed}")
        return parts

    def describe_data(self) -> list[str]:
        units = self.config.units
        sizes = ", ".join(f"{len(ids):,} {name}" for name, ids in self.texts.items())
        lines = [f"{sum(map(len, self.texts.values())):,} {units} of {self.file.path}: {sizes}, from its beginning to its end"]
        if units == "characters":
            lines.append(f"{len(self.characters) - FIRST_TEXT_ID:,} different characters in train")
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
        return {**super().score(model, split), "floor_bits": self._floor_bits(split)}

    def assets(self) -> dict[str, str]:
        return {**super().assets(), **self.file.asset()}

    def restore(self, assets: Mapping[str, str]) -> None:
        super().restore(assets)
        self.file.restore(assets)
