"""Translation of a user's pairs: line i of one file and line i of another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from regard.data.datasets import Splits
from regard.data.own_files import in_train, split_pairs
from regard.data.text_files import DataError, Pair, read_parallel
from regard.scores import bleu
from regard.tasks.own_data_config import OwnPairs
from regard.tasks.own_file import OwnFiles
from regard.tasks.translation import TranslationTask


class OwnPairsTask(TranslationTask):
    """Targets for the sources of a user's two files; scored by BLEU, beside that of the source itself."""

    config: OwnPairs

    def __init__(self, config: OwnPairs) -> None:
        super().__init__(config)
        if len(config.pairs) not in (0, 2):
            raise ValueError(f"pairs are two files, that of the sources and that of the targets, not {len(config.pairs)}")
        self.files = OwnFiles(config.pairs, config.valid, config.test, sides=("source", "target"))
        self.left_out = 0  # lines that are empty in both files
        self.repeated: dict[str, int] = {}  # sources of val and test that train has too

    def pairs(self, folder: Path | None) -> Splits[list[Pair]]:
        if not self.config.pairs:
            raise DataError("which files have the texts? Give --pairs SOURCES TARGETS, where line i belongs to line i")
        self.left_out, found = 0, dict[str, list[Pair]]()
        for split, (source, target) in self.files.find(folder).items():
            found[split], dropped = read_parallel(source, target)
            self.left_out += dropped
            if not found[split] and split != "train":
                raise DataError(f"{source} and {target} have no pair in them")
        where = " and ".join(self.config.pairs)
        parts = split_pairs(found.pop("train"), where, self.files.held)._replace(**found)
        self.repeated = in_train(parts, lambda pair: pair.source)
        return parts

    def describe_data(self) -> list[str]:
        counts = {name: len(part) for name, part in self.texts.items()}
        lines = [self.files.describe(counts, "pairs", "by a hash of each source"), *self.files.repeats(self.repeated, "sources")]
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
        return {**super().assets(), **self.files.assets()}

    def restore(self, assets: Mapping[str, str]) -> None:
        super().restore(assets)
        self.files.restore(assets)
