"""Tags for the words of a user's file: CoNLL-U, or a word and its tag on every line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from regard.data.datasets import Splits, Tagged
from regard.data.own_files import in_train, read_tagged, split_tagged
from regard.data.text_files import DataError
from regard.scores import accuracy
from regard.tasks.label_counts import LABELS_SHOWN
from regard.tasks.own_data_config import OwnTags
from regard.tasks.own_file import OwnFiles
from regard.tasks.tagging import TaggingTask


class OwnTagsTask(TaggingTask):
    """Tags for the words of a user's file; scored by the share that is right, beside that of each word's most frequent tag."""

    config: OwnTags

    def __init__(self, config: OwnTags) -> None:
        super().__init__(config)
        self.files = OwnFiles([config.conll] if config.conll else [], config.valid, config.test)
        self.texts: Splits[list[Tagged]] = Splits([], [], [])
        self.repeated: dict[str, int] = {}  # sentences of val and test that train has too

    def sentences(self, folder: Path | None) -> Splits[list[Tagged]]:
        if not self.config.conll:
            raise DataError("which file has the sentences? Give --conll FILE")
        paths = {split: path for split, (path,) in self.files.find(folder).items()}
        found = {split: read_tagged(path, self.config.column) for split, path in paths.items()}
        if empty := [paths[split] for split, part in found.items() if not part and split != "train"]:
            raise DataError(f"{empty[0]} has no sentence in it")
        path = paths["train"]
        self.texts = split_tagged(found.pop("train"), path, self.files.held)._replace(**found)
        self.repeated = in_train(self.texts, lambda x: " ".join(x.words))
        tags = {tag for x in self.texts.train for tag in x.tags}
        if len(tags) < 2:
            raise DataError(f"{path}: every word of train has the tag {min(tags)!r}, but a tagger needs two tags at least")
        longest = max(len(x.words) for x in (*self.texts.val, *self.texts.test))
        if longest > self.config.max_len:
            needed = f"but max_len={self.config.max_len}: use --set max_len={longest}, or end sentences by empty lines"
            raise DataError(
                f"{' and '.join(map(str, paths.values()))}: the longest sentence of val and test has {longest:,} words, {needed}"
            )
        return self.texts

    def words_of(self, line: str) -> list[str]:
        """Split a line at its spaces: what a word is, the file decides."""
        return line.split()

    def describe_data(self) -> list[str]:
        sizes = {name: len(part) for name, part in self.texts._asdict().items()}
        counts = Counter(tag for part in self.texts for x in part for tag in x.tags)
        shown = [f"{tag} ({count:,})" for tag, count in counts.most_common(LABELS_SHOWN)]
        more = f" and {len(counts) - len(shown):,} more" if len(counts) > len(shown) else ""
        floors = " and ".join(f"{self._floor(name):.1f} % of {name}" for name in ("val", "test"))
        new = Counter(
            tag for name in ("val", "test") for x in getattr(self.texts, name) for tag in x.tags if tag not in self.tags
        )
        wrong = [f"not in train, and never right: {', '.join(f'{tag} ({count:,})' for tag, count in new.items())}"] if new else []
        return [
            self.files.describe(sizes, f"sentences, {counts.total():,} words", "by a hash of each sentence"),
            *self.files.repeats(self.repeated, "sentences"),
            *wrong,
            f"{len(counts):,} tags: {', '.join(shown)}{more}",
            f"floor: each word's most frequent tag is right for {floors}",
        ]

    def _floor(self, split: str) -> float:
        """Return the accuracy of each word's most frequent tag in train, in percent; of new words, that of words seen once."""
        seen: dict[str, Counter[str]] = defaultdict(Counter)
        for x in self.texts.train:
            for word, tag in zip(x.words, x.tags, strict=True):
                seen[word][tag] += 1
        best = {word: tags.most_common(1)[0][0] for word, tags in seen.items()}
        once = Counter(best[word] for word, tags in seen.items() if tags.total() == 1)
        new = (once or Counter(best.values())).most_common(1)[0][0]
        part = self.texts._asdict()[split]
        return accuracy([best.get(word, new) for x in part for word in x.words], [tag for x in part for tag in x.tags])

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        return {**super().score(model, split), "floor": self._floor(split)}

    def assets(self) -> dict[str, str]:
        return {**super().assets(), **self.files.assets()}

    def restore(self, assets: Mapping[str, str]) -> None:
        super().restore(assets)
        self.files.restore(assets)
