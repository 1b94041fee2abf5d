"""A label for every word: part-of-speech tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from regard.blocks.feedforward import check_fraction
from regard.checks import need
from regard.data import synthetic
from regard.data.batch import NO_LABEL, Batch, padded
from regard.data.datasets import Tagged, read_ewt
from regard.data.locate import find
from regard.data.masked_units import spelled_vocabularies
from regard.data.spelled_words import normalized_words, spelled_batch, spelled_words, words_of_line
from regard.data.vocabulary import Characters, Words
from regard.models.build import added, encoder
from regard.models.embedding import Spelled
from regard.models.encoder_head import Reader
from regard.models.heads import PerVector
from regard.tasks.init_from import encoder_run, put_encoder, short_enough
from regard.tasks.support import check_lengths, device_under, evaluating, in_order, kept_labels
from regard.tasks.tagging_config import Tagging
from regard.tasks.task import Task
from regard.tasks.text_attention import StackTokens, TextAttention, text_attention
from regard.training.checkpoints import SavedRun
from regard.training.learnable import Step
from regard.training.losses import Loss, cross_entropy

TAGGING_TOKENS = 20_000  # tokens of a batch when nothing is kept for a backward pass


class TaggedExample(NamedTuple):
    """A sentence."""

    words: list[list[int]]  # of every word its number and those of its letters
    labels: list[int]
    fine: list[int]


class TaggingTask(Task):
    """A tag for every word; scored by the share that is right. The floor is each word's most frequent tag."""

    best = ("accuracy", "max")
    config: Tagging

    def __init__(self, config: Tagging) -> None:
        super().__init__(config)
        need("letters", config.letters, 2)
        need("spelling", config.spelling)
        need("min_count", config.min_count)
        check_fraction("forget", config.forget)
        if config.fine < 0:
            raise ValueError(f"fine is a weight, at least 0, not {config.fine!r}")
        self.words, self.characters, self.tags = Words([]), Characters([]), list[str]()
        self.fine: list[str] = []
        self.begun: SavedRun | None = None  # the run that it starts from

    def sentences(self, folder: Path | None) -> Any:
        return read_ewt(find("ud_english_ewt", folder))

    def read(self, folder: Path | None = None) -> None:
        parts = dict(zip(("train", "val", "test"), self.sentences(folder), strict=True))
        if not self.tags:
            self.words, self.characters = self._vocabularies(parts["train"])
            self.tags = sorted({tag for x in parts["train"] for tag in x.tags})
            fine = {tag for x in parts["train"] for tag in x.fine}
            self.fine = sorted(fine) if self.config.fine else []
        self.splits = {name: [self._coded(x) for x in part] for name, part in parts.items()}
        self.splits["train"] = short_enough(self.splits["train"], self.size, self.config)
        self.sample = " ".join(parts["val"][0].words) if parts["val"] else ""

    def _vocabularies(self, train: Sequence[Tagged]) -> tuple[Words, Characters]:
        """Take the words and letters of the run that it starts from, or those of the training part."""
        if self.config.init_from:
            names = ["words.json", "characters.json"]
            self.begun = None if self.begun_assets else encoder_run(self.config, names, ("letters", "spelling"))
            return spelled_vocabularies(self.begun.assets if self.begun else self.begun_assets)
        words = Words.of((normalized_words(x.words) for x in train), min_count=self.config.min_count)
        return words, Characters.of(word for x in train for word in x.words)

    def unused(self) -> dict[str, str]:
        found = super().unused() | {"share": "models that predict tokens"}
        return found | ({"min_count": "words that are learned: init_from has them"} if self.config.init_from else {})

    def assets(self) -> dict[str, str]:
        tags = json.dumps({"tags": self.tags, "fine": self.fine})
        return {"words.json": self.words.to_json(), "characters.json": self.characters.to_json(), "tags.json": tags}

    def restore(self, assets: Mapping[str, str]) -> None:
        self.words, self.characters = spelled_vocabularies(assets)
        self.tags, self.fine = (kept_labels(assets, "tags.json", key) for key in ("tags", "fine"))

    def _coded(self, x: Tagged) -> TaggedExample:
        known = {tag: number for number, tag in enumerate(self.tags)}
        finer = {tag: number for number, tag in enumerate(self.fine)}
        labels = [known.get(tag, NO_LABEL) for tag in x.tags]
        return TaggedExample(self._spelled(x.words), labels, [finer.get(tag, NO_LABEL) for tag in x.fine] if finer else [])

    def _spelled(self, words: Sequence[str]) -> list[list[int]]:
        return spelled_words(words, self.words, self.characters, self.config.letters)

    def size(self, example: TaggedExample) -> int:
        return len(example.words)

    def batch(self, examples: Sequence[TaggedExample]) -> Batch:
        labels, valid = padded([x.labels for x in examples], NO_LABEL)
        spelled = spelled_batch([x.words for x in examples], self.config.letters)
        extra = {"fine": padded([x.fine for x in examples], NO_LABEL)[0]} if self.fine else {}
        return Batch(spelled, valid, labels, valid, extra)

    def model(self) -> nn.Module:
        config = self.config
        embed = Spelled(
            len(self.words),
            len(self.characters),
            config.width,
            spelling=config.spelling,
            positions=added(config),
            dropout=config.dropout,
            forget=config.forget,
        )
        head = PerVector(config.width, len(self.tags) + len(self.fine), dropout=config.dropout)
        made = Reader(encoder(config, embed), head)
        if self.begun is not None:
            put_encoder(made, self.begun, config.init_from)
        return made

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        assert batch.target is not None
        scores, config = model(batch.source, batch.source_valid), self.config
        loss = cross_entropy(scores[..., : len(self.tags)], batch.target, smoothing=config.smoothing)
        if not self.fine:
            return loss
        more = cross_entropy(scores[..., len(self.tags) :], batch.extra["fine"], smoothing=config.smoothing)
        return Loss(loss.total + config.fine * more.total, loss.over, {**loss.parts, "fine": more.parts["nll"]})

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        examples = self.splits[split]
        found = self._tagged(model, examples)
        pairs = [pair for x, tags in zip(examples, found, strict=True) for pair in zip(x.labels, tags, strict=True)]
        return {"accuracy": 100 * sum(a == b for a, b in pairs) / max(1, len(pairs)), "words": float(len(pairs))}

    def _tagged(self, model: nn.Module, examples: Sequence[TaggedExample]) -> list[list[int]]:
        def answer(part: list[TaggedExample]) -> list[list[int]]:
            batch = self.batch(part).to(device_under(model))
            best = model(batch.source, batch.source_valid)[..., : len(self.tags)].argmax(-1).tolist()
            return [row[: self.size(x)] for row, x in zip(best, part, strict=True)]

        with evaluating(model):
            return in_order(examples, self.size, TAGGING_TOKENS, answer)

    def words_of(self, line: str) -> list[str]:
        """Split a line into words."""
        return words_of_line(line)

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        texts = [self.words_of(line) for line in lines]
        check_lengths(texts, self.config.max_len)
        full = [(words, TaggedExample(self._spelled(words), [0] * len(words), [NO_LABEL] * len(words))) for words in texts]
        found = iter(self._tagged(model, [coded for words, coded in full if words]))
        tagged = [zip(words, next(found), strict=True) if words else () for words, _ in full]
        return [" ".join(f"{word}/{self.tags[tag]}" for word, tag in row) for row in tagged]

    def attention(self, model: nn.Module, line: str) -> TextAttention:
        words = self.words_of(line)
        answer = self.predict(model, [line])[0]
        example = TaggedExample(self._spelled(words), [0] * len(words), [NO_LABEL] * len(words))
        batch = self.batch([example]).to(device_under(model))
        with evaluating(model):
            return text_attention(model, lambda: model(batch.source, batch.source_valid), [StackTokens(words)], line, answer)


class SawTask(TaggingTask):
    def sentences(self, folder: Path | None) -> Any:  # noqa: ARG002 - made, not read
        return synthetic.tagging_sentences()
