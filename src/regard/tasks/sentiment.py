"""One label for a whole text, of any number of labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.blocks.feedforward import check_fraction
from regard.checks import need
from regard.data import synthetic
from regard.data.batch import BEGIN, MASK, Batch, padded
from regard.data.datasets import LabelledText, read_imdb
from regard.data.locate import find
from regard.data.text_files import DataError
from regard.data.token_labels import token_labels
from regard.data.vocabulary import Bytes, Characters, Subwords, Vocabulary, Words, vocabulary
from regard.models.build import encoder, tokens
from regard.models.encoder_head import Reader
from regard.models.heads import POOLS, PerSequence
from regard.options import check_choice
from regard.tasks.init_from import encoder_run, put_encoder
from regard.tasks.sentiment_config import Sentiment
from regard.tasks.support import check_vocab, device_under, evaluating, in_order, kept_labels, learned
from regard.tasks.task import Task
from regard.tasks.text_attention import StackTokens, TextAttention, text_attention
from regard.text import unknown
from regard.training.checkpoints import SavedRun
from regard.training.learnable import Step
from regard.training.losses import Loss, cross_entropy

INFERENCE_TOKENS = 100_000  # tokens of a batch when nothing is kept for a backward pass
REVIEW_UNITS = ("subwords", "words", "characters", "bytes")

ReviewExample = tuple[list[int], int]


class SentimentTask(Task):
    """One of any number of labels for every text; scored by the share that is right.

    Labels are those of the training part: names, or integers. An integer without a name in `names` is answered in digits.
    """

    best = ("accuracy", "max")
    steady = True
    names: ClassVar[Mapping[int | str, str]] = {}
    config: Sentiment

    def __init__(self, config: Sentiment) -> None:
        super().__init__(config)
        check_choice("units", config.units, REVIEW_UNITS)
        check_choice("pool", config.pool, POOLS)
        need("cut", config.cut, 3)
        check_vocab(config.units, config.vocab)
        check_fraction("forget", config.forget)
        self.vocabulary: Vocabulary | None = None
        self.begun: SavedRun | None = None  # the run that it starts from
        self.labels: list[int | str] = []

    def examples(self, folder: Path | None) -> Any:
        """Read the labelled texts of train, val and test."""
        raise NotImplementedError

    def read(self, folder: Path | None = None) -> None:
        parts = dict(zip(("train", "val", "test"), self.examples(folder), strict=True))
        if self.vocabulary is None:
            self.vocabulary = self._first_vocabulary([x.text for x in parts["train"]])
            self.labels = _sorted({x.label for x in parts["train"]})
        self.splits = {name: self._coded(part) for name, part in parts.items()}
        self.sample = parts["val"][0].text if parts["val"] else ""

    def _first_vocabulary(self, texts: list[str]) -> Vocabulary:
        """Take the vocabulary of the run that it starts from, or learn one."""
        if not self.config.init_from:
            return self._learn(texts)
        self.begun = None if self.begun_assets else encoder_run(self.config, ["vocabulary.json"], ("units", "lower"))
        return vocabulary((self.begun.assets if self.begun else self.begun_assets)["vocabulary.json"])

    def unused(self) -> dict[str, str]:
        found = super().unused() | {"share": "models that predict tokens"}
        if self.config.units not in ("subwords", "words"):
            found["vocab"] = "units=subwords or words"
        return found | ({"vocab": "a vocabulary that is learned: init_from has one"} if self.config.init_from else {})

    def _learn(self, texts: list[str]) -> Vocabulary:
        texts = [text.lower() for text in texts] if self.config.lower else texts
        if self.config.units == "bytes":
            return Bytes()
        if self.config.units == "characters":
            return Characters.of(texts)
        if self.config.units == "words":
            return Words.of(texts, size=self.config.vocab)
        return Subwords.of(texts, size=self.config.vocab)

    def _coded(self, part: Sequence[LabelledText]) -> list[ReviewExample]:
        places = {label: place for place, label in enumerate(self.labels)}
        for x in part:
            if x.label not in places:
                raise DataError(unknown("no training text has the label", str(x.label), map(str, self.labels)))
        return list(zip(self._rows([x.text for x in part]), (places[x.label] for x in part), strict=True))

    def _rows(self, texts: Sequence[str]) -> list[list[int]]:
        known = self._units()
        texts = [text.lower() for text in texts] if self.config.lower else texts
        rows = known.encode_all(texts) if isinstance(known, Subwords) else [known.encode(text) for text in texts]
        half = (min(self.config.cut, self.config.max_len) - 1) // 2
        return [[BEGIN, *(row if len(row) <= 2 * half else row[:half] + row[-half:])] for row in rows]

    def _units(self) -> Vocabulary:
        return learned(self.vocabulary)

    def assets(self) -> dict[str, str]:
        return {"vocabulary.json": self._units().to_json(), "labels.json": json.dumps(self.labels)}

    def restore(self, assets: Mapping[str, str]) -> None:
        self.vocabulary, self.labels = vocabulary(assets["vocabulary.json"]), kept_labels(assets, "labels.json")

    def size(self, example: ReviewExample) -> int:
        return len(example[0])

    def batch(self, examples: Sequence[ReviewExample]) -> Batch:
        source, valid = padded([row for row, _ in examples], multiple=self.multiple)
        return Batch(source, valid, torch.tensor([label for _, label in examples]))

    def model(self) -> nn.Module:
        """Build an encoder and a head; the first token is BEGIN, which pool="token" takes."""
        config = self.config
        head = PerSequence(config.width, len(self.labels), pool=config.pool, dropout=config.dropout)
        made = Reader(encoder(config, tokens(config, len(self._units()))), head)
        if self.begun is not None:
            put_encoder(made, self.begun, config.init_from)
        return made

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        assert batch.target is not None
        return cross_entropy(model(self._hidden(batch.source), batch.source_valid), batch.target, smoothing=self.config.smoothing)

    def _hidden(self, source: Tensor) -> Tensor:
        """Mask some units, so that no single one decides."""
        if not self.config.forget:
            return source
        return source.masked_fill((torch.rand(source.shape, device=source.device) < self.config.forget) & (source > MASK), MASK)

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        examples = self.splits[split]
        right = sum(label == found for (_, label), found in zip(examples, self._labelled(model, examples), strict=True))
        return {"accuracy": 100 * right / max(1, len(examples)), "texts": float(len(examples))}

    def _labelled(self, model: nn.Module, examples: Sequence[ReviewExample]) -> list[int]:
        def answer(part: list[ReviewExample]) -> list[int]:
            batch = self.batch(part).to(device_under(model))
            return model(batch.source, batch.source_valid).argmax(-1).tolist()

        with evaluating(model):
            return in_order(examples, self.size, INFERENCE_TOKENS, answer)

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        coded_lines = [(line, (row, 0)) for line, row in zip(lines, self._rows(lines), strict=True)]
        found = iter(self._labelled(model, [coded for line, coded in coded_lines if line.strip()]))
        named = [self.names.get(label, str(label)) for label in self.labels]
        return [named[next(found)] if line.strip() else "" for line, _ in coded_lines]

    def attention(self, model: nn.Module, line: str) -> TextAttention:
        row = self._rows([line])[0]
        batch = self.batch([(row, 0)]).to(device_under(model))
        read = StackTokens(token_labels(self._units(), row))
        answer = self.predict(model, [line])[0]
        with evaluating(model):
            return text_attention(model, lambda: model(batch.source, batch.source_valid), [read], line, answer)


def _sorted(labels: set[int | str]) -> list[int | str]:
    """Sort labels, which must be of one type."""
    if len({type(label) for label in labels}) > 1:
        raise DataError("labels are all integers or all texts, not some of each")
    return sorted(labels)


class ReviewTask(SentimentTask):
    """Film reviews, good or bad."""

    names: ClassVar[Mapping[int | str, str]] = {0: "bad", 1: "good"}

    def examples(self, folder: Path | None) -> Any:
        return read_imdb(find("imdb", folder))


class PolarityTask(ReviewTask):
    def examples(self, folder: Path | None) -> Any:  # noqa: ARG002 - made, not read
        return synthetic.opinion_sentences()
