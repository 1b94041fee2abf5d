"""Translation of a user's pairs: line i of one file and line i of another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from regard.data.datasets import Splits
from regard.data.own_files import split_pairs
from regard.data.text_files import DataError, Pair, read_parallel
from regard.scores import bleu
from regard.tasks.own_data import OwnFile
from regard.tasks.own_data_config import OwnPairs
from regard.tasks.translation import TranslationTask


class OwnPairsTask(TranslationTask):
    """Targets for the sources of a user's two files; scored by BLEU, beside that of the source itself."""

    config: OwnPairs

    def __init__(self, config: OwnPairs) -> None:
        super().__init__(config)
        if len(config.pairs) not in (0, 2):
            raise ValueError(f"pairs are two files, that of the sources and that of the targets, not {len(config.pairs)}")
        names = ("source_data.json", "target_data.json")
        self.files = [OwnFile(path, name) for path, name in zip(config.pairs, names, strict=False)]
        self.left_out = 0  # lines that are empty in both files

    def pairs(self, folder: Path | None) -> Splits[list[Pair]]:
        if not self.files:
            raise DataError("which files have the texts? Give --pairs SOURCES TARGETS, where line i belongs to line i")
        if folder is not None and folder.is_file():
            raise DataError(f"{folder} is one file: for pairs --data names the folder that has both")
        source, target = (file.find(folder) for file in self.files)
        pairs, self.left_out = read_parallel(source, target)
        return split_pairs(pairs, f"{source} and {target}")

    def describe_data(self) -> list[str]:
        sizes = ", ".join(f"{len(part):,} {name}" for name, part in self.texts.items())
        count, (source, target) = sum(map(len, self.texts.values())), self.files
        lines = [f"{count:,} pairs of {source.path} and {target.path}: {sizes}, by a hash of each source"]
        if self.left_out:
            lines.append(f"left out: lines that are empty in both files, {self.left_out:,} in all")
        floors = " and ".join(f"{self._floor(name):.2f} on {name}" for name in ("val", "test"))
        return [
            *lines,
            f"vocabulary: {len(self._words()):,} {self.config.units} of both sides of train",
            f"floor: the source, said again, has BLEU {floors}",
        ]

    def _floor(self, split: str) -> float:
        """Return the BLEU of sources given as answers, without regard to case."""
        return bleu([pair.source for pair in self.texts[split]], [pair.target for pair in self.texts[split]], lower=True).value

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        return {**super().score(model, split), "floor": self._floor(split)}

    def assets(self) -> dict[str, str]:
        return super().assets() | {name: text for file in self.files for name, text in file.asset().items()}

    def restore(self, assets: Mapping[str, str]) -> None:
        super().restore(assets)
        for file in self.files:
            file.restore(assets)
