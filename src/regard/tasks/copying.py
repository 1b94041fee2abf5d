"""A text for a text with words of the source: the title of an abstract, a query for a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from regard.checks import need
from regard.data.batch import BEGIN, END, PAD, UNKNOWN, Batch, padded, shifted
from regard.data.datasets import read_acl_titles as read_titles
from regard.data.extended_vocab import extend_ids, extend_target_ids, extended_words
from regard.data.locate import find
from regard.data.token_labels import token_labels
from regard.data.vocabulary import Words, vocabulary
from regard.data.wikisql import read_wikisql as read_queries
from regard.data.wikisql import split_words
from regard.models.build import translator
from regard.models.pointer_generator import coverage, pointer_generator
from regard.tasks.copying_config import Copying
from regard.tasks.support import check_vocab, device_under, evaluating, generate_answers, in_order, learned
from regard.tasks.task import ENCODER_DECODER, GENERATION_SETTINGS, Task
from regard.tasks.text_attention import LayerAttention, StackTokens, TextAttention, text_attention
from regard.text import unknown
from regard.training.decoder_inputs import needed_mask, sequence
from regard.training.decoder_modes import teacher_forcing
from regard.training.learnable import Step
from regard.training.losses import Loss

COPY_TOKENS = 40_000  # tokens of a batch when nothing is kept for a backward pass
WATCHED = 500  # examples of a validation, spread over the file: it may be in order of difficulty
COPY_READERS: dict[str, Any] = {"acl_titles": read_titles, "wikisql": read_queries}
BEST = {"acl_titles": ("rouge_l", "max"), "wikisql": ("exact", "max")}


class CopyExample(NamedTuple):
    """An example in extended ids."""

    source: list[int]
    target: list[int]  # with its END
    oov: list[str]  # words that only its source has


class CopyTask(Task):
    """A short text for a long one; scored by ROUGE-L, by how many are exactly right, and by `oov_recall`: of the words of the
    target that are not in the vocabulary but in the source, the fraction in the answer.
    """

    config: Copying
    steady = True
    bodies = ENCODER_DECODER
    answering = GENERATION_SETTINGS

    def __init__(self, config: Copying) -> None:
        super().__init__(config)
        if config.task not in COPY_READERS:
            raise ValueError(unknown("copying has no task", config.task, COPY_READERS))
        if config.copy and config.smoothing:
            raise ValueError("smoothing gives some probability to every word, which a copied word has not: use copy=false")
        if not config.copy and (config.coverage or config.pointers != 1):
            raise ValueError("coverage and pointers are for copying, and with copy=false there is none: leave them out")
        check_vocab("words", config.vocab)
        for name in ("pointers", "cut", "max_new_tokens"):
            need(name, getattr(config, name))
        if config.coverage < 0:
            raise ValueError(f"coverage is a weight, at least 0, not {config.coverage!r}")
        self.best = BEST[config.task]
        self.vocabulary: Words | None = None
        self.wanted: dict[str, list[list[str]]] = {}

    def read(self, folder: Path | None = None) -> None:
        config, parts = self.config, COPY_READERS[self.config.task](find(self.config.task, folder))
        longest = min(config.max_new_tokens, config.max_len)
        texts = {
            name: [(self._cut(pair.source), split_words(pair.target)) for pair in pairs]
            for name, pairs in zip(("train", "val", "test"), parts, strict=True)
        }
        if self.vocabulary is None:
            self.vocabulary = Words.of((text for pair in texts["train"] for text in pair), size=config.vocab)
        texts["train"] = [pair for pair in texts["train"] if len(pair[1]) < longest]  # longer targets cannot be generated
        self.wanted = {name: [target for _, target in pairs] for name, pairs in texts.items()}
        self.sample = parts[1][0].source if parts[1] else ""
        self.splits = {name: [self._coded(*pair) for pair in pairs] for name, pairs in texts.items()}

    def _cut(self, text: str) -> list[str]:
        return split_words(text)[: min(self.config.cut, self.config.max_len)]

    def _coded(self, source: list[str], target: list[str]) -> CopyExample:
        vocab = self._words()
        ids, oov = extend_ids(source, vocab)
        ids_out = extend_target_ids(target, vocab, oov) if self.config.copy else vocab.encode_words(target)
        return CopyExample(ids, [*ids_out, END], oov)

    def _words(self) -> Words:
        return learned(self.vocabulary)

    def assets(self) -> dict[str, str]:
        return {"vocabulary.json": self._words().to_json()}

    def restore(self, assets: Mapping[str, str]) -> None:
        found = vocabulary(assets["vocabulary.json"])
        if not isinstance(found, Words):
            raise ValueError(f"copying is by words, but vocabulary.json is of the kind {found.kind!r}")
        self.vocabulary = found

    def size(self, example: CopyExample) -> int:
        return max(len(example.source), len(example.target))

    def batch(self, examples: Sequence[CopyExample]) -> Batch:
        source, source_valid = padded([example.source or [UNKNOWN] for example in examples], multiple=self.multiple)
        target, target_valid = padded([example.target for example in examples], multiple=self.multiple)
        known = source.masked_fill(source >= len(self._words()), UNKNOWN)
        return Batch(known, source_valid, target, target_valid, {"extended": source})

    def model(self) -> nn.Module:
        config, vocab = self.config, len(self._words())
        return pointer_generator(config, vocab, heads=config.pointers) if config.copy else translator(config, vocab)

    def loss(self, model: Any, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every step
        source, source_valid, target, target_valid, extra = batch
        assert target is not None
        if not self.config.copy:
            return teacher_forcing(model, batch, smoothing=self.config.smoothing, behind=True)
        mask = needed_mask(model, target_valid)
        logs, weights = model.likelihood(source, source_valid, shifted(target), mask, extra["extended"], target)
        real = target != PAD if target_valid is None else target_valid
        total = -logs.masked_fill(~real, 0).sum()
        parts = {"nll": total.detach()}
        if self.config.coverage:
            seen = coverage(weights, target_valid)
            total, parts["coverage"] = total + self.config.coverage * seen, seen.detach()
        return Loss(total, real.sum(), parts)

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Score greedy answers to a part of the validation split."""
        return self._scored(model, "val", WATCHED, beams=1)

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        return self._scored(model, split, None, beams=self.config.beam)

    def _scored(self, model: nn.Module, split: str, many: int | None, *, beams: int) -> dict[str, float]:
        from regard.scores import exact_match, rouge_l

        apart = 1 if many is None else max(1, len(self.splits[split]) // many)
        examples, wanted = self.splits[split][::apart][:many], self.wanted[split][::apart][:many]
        answers = self._answers(model, examples, beams)
        texts = [" ".join(row) for row in answers], [" ".join(row) for row in wanted]
        scores = {"loss": self._loss(model, examples), "exact": exact_match(*texts), "rouge_l": float(rouge_l(*texts))}
        if (share := oov_recall([example.oov for example in examples], answers, wanted)) is not None:
            scores["oov_recall"] = share
        return scores

    def _loss(self, model: nn.Module, examples: Sequence[CopyExample]) -> float:
        rows, device = sorted(examples, key=self.size), device_under(model)
        rows = [row for row in rows if len(row.target) <= self.config.max_len]  # longer ones cannot be followed to their end
        with evaluating(model):
            losses = [self.loss(model, self.batch(rows[i : i + 100]).to(device), 0) for i in range(0, len(rows), 100)]
        return sum(float(x.parts["nll"]) for x in losses) / max(1, sum(int(x.over) for x in losses))

    def _answers(self, model: nn.Module, examples: Sequence[CopyExample], beams: int) -> list[list[str]]:
        with evaluating(model):
            ids = in_order(examples, self.size, COPY_TOKENS // beams, lambda rows: self._generate(model, rows, beams))
        return [
            extended_words(row, self._words(), example.oov) if example.source else []  # the answer to an empty source is empty
            for row, example in zip(ids, examples, strict=True)
        ]

    def _generate(self, model: Any, rows: list[CopyExample], beams: int) -> list[list[int]]:
        batch = self.batch(rows).to(device_under(model))
        source, valid, copied = batch.source, batch.source_valid, batch.extra["extended"]
        state = model.start(source, valid, copied) if self.config.copy else model.start(source, valid)
        return generate_answers(model, state, source, config=self.config, most=self.config.max_new_tokens, beams=beams)

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Answer every line; of a longer one the first `cut` words are read, as in training."""
        examples = [self._coded(self._cut(line), []) for line in lines]
        return [" ".join(row) for row in self._answers(model, examples, self.config.beam)]

    def attention(self, model: Any, line: str) -> TextAttention:
        """Compute the attention to a line and to the answer; the weights by which words are copied are a layer of their own."""
        example = self._coded(self._cut(line), [])
        with evaluating(model):
            answer = self._generate(model, [example], self.config.beam)[0]
            target = [*answer, END] if len(answer) < self.config.max_new_tokens else answer
            batch = self.batch([example._replace(target=target)]).to(device_under(model))
            said = StackTokens(self._labels([BEGIN, *target[:-1]], example), self._labels(target, example))
            tokens = StackTokens(self._labels(example.source, example)), said
            source, source_valid, fed = batch.source, batch.source_valid, shifted(sequence(batch))
            text = " ".join(extended_words(answer, self._words(), example.oov))
            found = text_attention(model, lambda: model(source, source_valid, fed), tokens, line, text)
            if not self.config.copy:
                return found
            _, weights = model.likelihood(source, source_valid, fed, None, batch.extra["extended"], batch.target)
        rows, columns = len(target), len(example.source)
        weights = weights[:, :rows, :columns].float().cpu()
        pointer = LayerAttention("copying", "pointer", "softmax", weights, said.answered or [], tokens[0].read)
        return replace(found, layers=[*found.layers, pointer])

    def _labels(self, ids: Sequence[int], example: CopyExample) -> list[str]:
        """Name extended ids."""
        size = len(self._words())
        return [example.oov[x - size] if x >= size else token_labels(self._words(), [x])[0] for x in ids]


def oov_recall(oov: Sequence[Sequence[str]], answers: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> float | None:
    """Compute the percentage of out-of-vocabulary target words of the source that are in the answers; None if there are none."""
    total = found = 0
    for new, answer, target in zip(oov, answers, wanted, strict=True):
        there = set(new) & set(target)
        total, found = total + len(there), found + len(there & set(answer))
    return 100 * found / total if total else None
