"""A text for a text: translation, number words in another language, reversed strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.checks import need
from regard.config import Config
from regard.data import synthetic
from regard.data.batch import BEGIN, END, UNKNOWN, Batch, padded, shifted
from regard.data.bpe_dropout import BpeDropout
from regard.data.datasets import read_multi30k
from regard.data.locate import find
from regard.data.text_files import Pair, read_lines
from regard.data.token_labels import token_labels
from regard.data.vocabulary import Characters, Subwords, Vocabulary, Words, vocabulary
from regard.decoding.nat_decoding import generate_nat
from regard.models.build import translator
from regard.models.nat import BLANK, nat_translator
from regard.options import check_choice, check_probability
from regard.scores import bleu, exact_match
from regard.tasks.decoder_options import Ctc, Decoder
from regard.tasks.init_from import check_slots, initialized_from, short_enough, slots_of
from regard.tasks.support import (
    check_lengths,
    check_vocab,
    constraints_of,
    device_under,
    evaluating,
    generate_answers,
    in_order,
    learned,
    task_decoder,
)
from regard.tasks.task import ENCODER_DECODER, ENCODER_NAT_DECODER, GENERATION_SETTINGS, Task
from regard.tasks.text_attention import StackTokens, TextAttention, text_attention
from regard.tasks.translation_config import Translation
from regard.training.checkpoints import SavedRun, put_weights
from regard.training.decoder_inputs import sequence
from regard.training.decoder_modes import mode_loss, teacher_forcing
from regard.training.learnable import Step
from regard.training.losses import Loss
from regard.training.mode_options import MinimumRisk, Mode, RDrop, SelfCritical
from regard.training.nat_loss import glancing, nat_loss
from regard.training.reinforce import minimum_risk, self_critical, sentence_bleu

DECODE_TOKENS, CPU_DECODE_TOKENS = 20_000, 5000  # tokens of a batch when nothing is kept for a backward pass; on a CPU
SPELLINGS = 8  # of every training text, with BPE dropout
SOURCES_PER_CHUNK = 1000  # sources that are answered before their answers are kept
TEXT_UNITS = ("subwords", "words", "characters")

PairExample = tuple[list[int], list[int]]  # source, and target with its END


class TranslationTask(Task):
    """A target text for every source text; scored by BLEU and by how many answers are exactly right."""

    best = ("bleu", "max")
    answering: tuple[str, ...] = GENERATION_SETTINGS
    config: Translation

    def __init__(self, config: Translation) -> None:
        super().__init__(config)
        check_choice("units", config.units, TEXT_UNITS)
        check_vocab(config.units, config.vocab)
        check_probability("bpe_dropout", config.bpe_dropout)
        need("max_new_tokens", config.max_new_tokens)
        if config.bpe_dropout and config.units != "subwords":
            raise ValueError(f"bpe_dropout is for units='subwords': {config.units} are not merged")
        decoder, mode = config.options("decoder"), config.options("mode")
        assert isinstance(decoder, Decoder) and isinstance(mode, Mode)
        self.decoder, self.mode = decoder, mode
        if mode.autoregressive and not decoder.autoregressive:
            raise ValueError(f"mode={mode.name!r} is for a decoder that is fed its own tokens: use decoder='autoregressive'")
        self.bodies = ENCODER_DECODER if decoder.autoregressive else ENCODER_NAT_DECODER
        if not decoder.autoregressive:
            self.answering = ("decoder",) if decoder.inference else ()
        self.steady = mode.steady and decoder.steady
        self.vocabulary: Vocabulary | None = None
        self.finished = False  # restored from a run: it is not trained any further
        self.begun: SavedRun | None = None  # the run that it starts from
        self.texts: dict[str, list[Pair]] = {}

    def check_answering(self, trained: Config) -> None:
        """Refuse another decoder, or other options of it that its weights were trained for."""
        before = trained.options("decoder")
        assert isinstance(before, Decoder)
        can = f"only {', '.join(before.inference)} can"
        if type(before) is not type(self.decoder):
            raise ValueError(f"decoder={before.name} cannot become {self.decoder.name} after training: {can} change")
        for name in before.built:
            kept = getattr(before, name)
            if getattr(self.decoder, name) != kept:
                raise ValueError(f"{name} of {before.name} cannot change after training, {can}: write {name}={kept!r}")

    def unused(self) -> dict[str, str]:
        found, config = super().unused(), self.config
        if isinstance(self.mode, SelfCritical | MinimumRisk):
            found["smoothing"] = "modes that learn true tokens"
        if config.units == "characters":
            found["vocab"] = "units=subwords or words"
        return found

    def pairs(self, folder: Path | None) -> Any:
        """Read the texts of all splits."""
        return read_multi30k(find("multi30k", folder))

    def read(self, folder: Path | None = None) -> None:
        train, val, test = self.pairs(folder)
        if self.config.init_from and not self.finished:
            self.begun = None if self.begun_assets else initialized_from(self.config)
            self.vocabulary = vocabulary((self.begun.assets if self.begun else self.begun_assets)["vocabulary.json"])
        self.texts = {"train": self._targets(train), "val": val, "test": test}
        if self.vocabulary is None:
            self.vocabulary = self._learn([text for pair in train for text in pair])
        drops = bool(self.config.bpe_dropout) and not self.finished
        coded = (self._spellings() if name == "train" and drops else list(map(self._coded, x)) for name, x in self.texts.items())
        self.splits = dict(zip(self.texts, coded, strict=True))
        if not self.finished:
            self.splits["train"] = short_enough(self.splits["train"], self.size, self.config)
        if isinstance(self.decoder, Ctc) and not self.finished:
            check_slots(self.splits["train"], self.decoder.upsample)
        self.sample = val[0].source if val else ""

    def _spellings(self) -> list[PairExample]:
        """Encode the training texts several times, each time with other subwords."""
        words, pairs = self._words(), self.texts["train"]
        assert isinstance(words, Subwords)
        texts = [self._cased(text) for pair in pairs for text in pair]
        rounds = BpeDropout(words, self.config.bpe_dropout, self.config.seed).rounds(texts, SPELLINGS)
        return [(found[i], [*found[i + 1], END]) for found in rounds for i in range(0, len(found), 2)]

    def _learn(self, texts: list[str]) -> Vocabulary:
        config = self.config
        texts = [self._cased(text) for text in texts]
        if config.units == "subwords":
            return Subwords.of(texts, size=config.vocab)
        return Words.of(texts, size=config.vocab) if config.units == "words" else Characters.of(texts)

    def _targets(self, train: Sequence[Pair]) -> list[Pair]:
        """Take the targets of the data, or distilled ones."""
        if not self.config.distilled or self.finished:
            return list(train)
        answers = list(read_lines(Path(self.config.distilled)))
        if len(answers) != len(train):
            raise ValueError(
                f"{self.config.distilled} has {len(answers):,} lines, but there are {len(train):,} training sources: "
                "make it with `regard distil`"
            )
        return [Pair(pair.source, answer) for pair, answer in zip(train, answers, strict=True) if answer]

    def _coded(self, pair: Pair) -> PairExample:
        return self._code(pair.source), [*self._code(pair.target), END]

    def _code(self, text: str) -> list[int]:
        return self._words().encode(self._cased(text))

    def _cased(self, text: str) -> str:
        return text.lower() if self.config.lower else text

    def _words(self) -> Vocabulary:
        return learned(self.vocabulary)

    def assets(self) -> dict[str, str]:
        return {"vocabulary.json": self._words().to_json()}

    def restore(self, assets: Mapping[str, str]) -> None:
        self.vocabulary, self.finished = vocabulary(assets["vocabulary.json"]), True

    def size(self, example: PairExample) -> int:
        return max(len(example[0]), len(example[1]))

    def batch(self, examples: Sequence[PairExample]) -> Batch:
        source, source_valid = padded([source for source, _ in examples], multiple=self.multiple)
        target, target_valid = padded([target for _, target in examples], multiple=self.multiple)
        return Batch(source, source_valid, target, target_valid)

    def model(self) -> nn.Module:
        config, vocab = self.config, len(self._words())
        kind = None if self.decoder.autoregressive else self.decoder.kind
        made: nn.Module = translator(config, vocab) if kind is None else nat_translator(config, vocab, kind=kind)
        if self.begun is not None:
            put_weights(made, {**slots_of(made), **self.begun.weights}, config.init_from)
        return made

    def loss(self, model: Any, batch: Batch, step: Step) -> Loss:
        config, mode = self.config, self.mode
        if self.decoder.autoregressive:
            return self._autoregressive_loss(model, batch, step)
        first = self.decoder.glancing
        glance = glancing(step, config.steps, first, 0.6 * first) if first else 0.0  # 0.5 -> 0.3, as in the paper
        alpha = mode.alpha if isinstance(mode, RDrop) else 0.0
        return nat_loss(model, batch, smoothing=config.smoothing, glance=glance, rdrop=alpha)

    def _autoregressive_loss(self, model: Any, batch: Batch, step: Step) -> Loss:
        """Compute the loss of an autoregressive decoder, in the mode of the settings."""
        config, mode = self.config, self.mode
        constraints = constraints_of(config, config.max_new_tokens)
        if isinstance(mode, SelfCritical):
            return self_critical(model, batch, sentence_bleu, constraints=constraints)
        if isinstance(mode, MinimumRisk):
            return minimum_risk(model, batch, sentence_bleu, constraints=constraints, samples=mode.samples)
        at = step if isinstance(step, int) else 0  # a captured pass has a steady mode, the same at every update
        return mode_loss(mode, model, batch, step=at, steps=config.steps, smoothing=config.smoothing, behind=True)

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Compute the loss of teacher forcing, and the scores of greedy answers."""
        with evaluating(model):
            losses = [self._nll(model, self.batch(part).to(device_under(model))) for part in self._parts("val")]
        total = sum(float(x.parts.get("nll", x.total)) for x in losses) / max(1, sum(int(x.over) for x in losses))
        return {"loss": total, **self._scored(model, "val", beams=1)}

    def _nll(self, model: Any, batch: Batch) -> Loss:
        if self.decoder.autoregressive:
            return teacher_forcing(model, batch, behind=True)
        return nat_loss(model, batch)

    def _parts(self, split: str) -> list[list[PairExample]]:
        rows = sorted((row for row in self.splits[split] if self.size(row) <= self.config.max_len), key=self.size)
        return [rows[i : i + 200] for i in range(0, len(rows), 200)]

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        return self._scored(model, split)

    def _scored(self, model: nn.Module, split: str, beams: int | None = None) -> dict[str, float]:
        answers = self.answers(model, [source for source, _ in self.splits[split]], beams=beams)
        texts, targets = [self._words().decode(answer) for answer in answers], [pair.target for pair in self.texts[split]]
        scores = {"exact": exact_match(texts, targets, lower=self.config.lower)}
        if self.best[0] == "bleu":
            scores["bleu"] = bleu(texts, targets, lower=True).value
            if not self.config.lower:
                scores["bleu_cased"] = bleu(texts, targets).value
        return scores

    def signatures(self) -> dict[str, str]:
        if self.best[0] != "bleu":
            return {}
        known = {"bleu": bleu(["a"], ["a"], lower=True).signature}
        return known if self.config.lower else {**known, "bleu_cased": bleu(["a"], ["a"]).signature}

    def answers(
        self, model: nn.Module, sources: Sequence[list[int]], *, beams: int | None = None, early: bool = False
    ) -> list[list[int]]:
        """Answer each source: by beam search of width `beams`, or all tokens at once where the decoder is non-autoregressive."""
        beams = self.config.beam if beams is None else beams
        with evaluating(model):
            sources = [row if len(row) <= self.config.max_len else [] for row in sources]  # too long for its positions
            fast, device = task_decoder(model, self.config.max_new_tokens), device_under(model)
            room = (CPU_DECODE_TOKENS if device.type == "cpu" else DECODE_TOKENS) // max(1, beams)
            return in_order(sources, len, room, lambda rows: self._generate(fast, rows, beams, device, early))

    def _generate(self, model: Any, rows: list[list[int]], beams: int, device: torch.device, early: bool) -> list[list[int]]:
        empty = [i for i, row in enumerate(rows) if not row]  # the answer to an empty source is empty
        source, valid = padded([row or [UNKNOWN] for row in rows])
        source, valid = source.to(device), None if valid is None else valid.to(device)
        if self.decoder.autoregressive:
            state, most = model.start(source, valid), self.config.max_new_tokens
            answers = generate_answers(model, state, source, config=self.config, most=most, beams=beams, early=early)
        else:
            answers = generate_nat(model, source, valid, **self.decoder.decoding())
        return [[] if i in empty else answer for i, answer in enumerate(answers)]

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        rows = [self._code(line) for line in lines]
        check_lengths(rows, self.config.max_len)
        return [self._words().decode(answer) for answer in self.answers(model, rows)]

    def attention(self, model: Any, line: str) -> TextAttention:
        """Compute the attention to a line and to the answer that is generated, which the decoder is then fed.

        Slots of a non-autoregressive decoder are called by the token that a first pass fills them with.
        """
        row = self._code(line)
        check_lengths([row], self.config.max_len)
        answer, words = self.answers(model, [row])[0], self._words()
        most = min(self.config.max_new_tokens, self.config.max_len)
        target = [*answer, END] if len(answer) < most else answer
        batch, read = self.batch([(row, target)]).to(device_under(model)), StackTokens(token_labels(words, row))
        source, source_valid = batch.source, batch.source_valid
        with evaluating(model):
            if not self.decoder.autoregressive:
                filled = model(source, source_valid)[0][0].argmax(-1).tolist()
                slots = ["<blank>" if token == BLANK else token_labels(words, [token])[0] for token in filled]
                said = StackTokens(slots, slots)
                return text_attention(model, lambda: model(source, source_valid), (read, said), line, words.decode(answer))
            said = StackTokens(token_labels(words, [BEGIN, *target[:-1]]), token_labels(words, target))
            fed = shifted(sequence(batch))
            return text_attention(model, lambda: model(source, source_valid, fed), (read, said), line, words.decode(answer))

    def distil(self, model: nn.Module, done: int = 0) -> Iterator[list[str]]:
        """Yield its answers to all training sources but the first `done`, some at a time; none to those too long.

        Beams end early: about two answers in a hundred are others then, and more than half of the time is saved.
        """
        for i in range(done, len(self.texts["train"]), SOURCES_PER_CHUNK):
            rows = [self._code(pair.source) for pair in self.texts["train"][i : i + SOURCES_PER_CHUNK]]
            yield [self._words().decode(answer) for answer in self.answers(model, rows, early=True)]


class NumbersTask(TranslationTask):
    best = ("exact", "max")

    def pairs(self, folder: Path | None) -> Any:  # noqa: ARG002 - made, not read
        return synthetic.number_words_pairs()


class ReverseTask(TranslationTask):
    best = ("exact", "max")

    def pairs(self, folder: Path | None) -> Any:  # noqa: ARG002
        return synthetic.string_pairs("reverse")


class RepeatTask(TranslationTask):
    best = ("exact", "max")

    def pairs(self, folder: Path | None) -> Any:  # noqa: ARG002
        return synthetic.string_pairs("copy")
