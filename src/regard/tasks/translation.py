"""A text from a text: translation, number words in another language, strings turned around."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.checks import need
from regard.data import synthetic
from regard.data.batch import END, UNKNOWN, Batch, padded
from regard.data.bpe_dropout import BpeDropout
from regard.data.datasets import read_multi30k
from regard.data.locate import find
from regard.data.text_files import Pair, read_lines
from regard.data.vocabulary import Characters, Subwords, Vocabulary, Words, vocabulary
from regard.decoding.nat_decoding import generate_nat
from regard.models.build import translator
from regard.models.nat import COPIES, nat_translator
from regard.scores import bleu, exact_match
from regard.tasks.init_from import check_slots, initialized_from, short_enough, slots_of
from regard.tasks.support import (
    check_lengths,
    check_part,
    check_vocab,
    choice_of,
    constraints_of,
    device_under,
    in_order,
    learned,
    resting,
    speaker,
    spoken_by,
)
from regard.tasks.task import ENCODER_DECODER, ENCODER_NAT_DECODER, Task
from regard.tasks.translation_config import Translation
from regard.training.checkpoints import SavedRun, put_weights
from regard.training.decoder_modes import MODES, SAMPLED, rdrop, teacher_forcing
from regard.training.learnable import Step
from regard.training.losses import Loss
from regard.training.nat_loss import glancing
from regard.training.nat_loss import nat_loss as loss_at_once
from regard.training.reinforce import minimum_risk, self_critical, sentence_bleu
from regard.training.scheduled_sampling import OWN_FORMS, SAMPLING_SCHEDULES, OwnTokens
from regard.training.scheduled_sampling import truth_probability as share_of_truth

DECODING, IN_CACHE = 20_000, 5000  # tokens of a batch when nothing is kept for a backward pass; on a CPU
SPELLINGS = 8  # of every training text, where subwords waver
SOURCES_PER_CHUNK = 1000  # sources that are answered before their answers are kept
TEXT_UNITS = ("subwords", "words", "characters")
REWARDED = ("self_critical", "minimum_risk")  # trained on BLEU itself
DECODERS = ("autoregressive", "ctc", "masked", "length", "fixed")

PairExample = tuple[list[int], list[int]]  # source, and target with its END


class TranslationTask(Task):
    """A target text for every source text; scored by BLEU and by how many answers are exactly right."""

    best = ("bleu", "max")
    answering: tuple[str, ...] = ("beam", "penalty", "most")
    config: Translation

    def __init__(self, config: Translation) -> None:
        super().__init__(config)
        choice_of("units", config.units, TEXT_UNITS)
        choice_of("decoder", config.decoder, DECODERS)
        choice_of("mode", config.mode, [*MODES, *REWARDED])
        choice_of("truth", config.truth, list(SAMPLING_SCHEDULES))
        choice_of("own", config.own, OWN_FORMS)
        choice_of("slots", config.slots, COPIES)
        self.own = OwnTokens(config.own, alpha=config.alpha, through=config.through)
        check_vocab(config.units, config.vocab)
        if config.waver and config.units != "subwords":
            raise ValueError(f"waver is for units='subwords': {config.units} are not merged")
        for name in ("floor", "glance", "waver"):
            check_part(name, getattr(config, name))
        if config.agree <= 0:
            raise ValueError(f"agree must be above 0, not {config.agree!r}")
        for name in ("most", "samples", "upsample", "iterations", "lengths"):
            need(name, getattr(config, name))
        if config.mode not in ("teacher", "agree") and config.decoder != "autoregressive":
            raise ValueError(f"mode={config.mode!r} is for a decoder that hears what it said: use decoder='autoregressive'")
        self.bodies = ENCODER_DECODER if config.decoder == "autoregressive" else ENCODER_NAT_DECODER
        if config.decoder != "autoregressive":
            self.answering = {"masked": ("lengths", "iterations"), "length": ("lengths",)}.get(config.decoder, ())
        self.steady = config.mode in ("teacher", "agree") and config.decoder != "fixed"  # that one looks how long targets are
        self.vocabulary: Vocabulary | None = None
        self.finished = False  # restored from a run: it has learned all it will
        self.begun: SavedRun | None = None  # the run that it starts from
        self.texts: dict[str, list[Pair]] = {}

    def pairs(self, folder: Path | None) -> Any:
        """The texts of all splits."""
        return read_multi30k(find("multi30k", folder))

    def read(self, folder: Path | None = None) -> None:
        train, val, test = self.pairs(folder)
        if self.config.begin_from and not self.finished:
            self.begun = initialized_from(self.config)
            self.vocabulary = vocabulary(self.begun.assets["vocabulary.json"])
        self.texts = {"train": self._taught(train), "val": val, "test": test}
        if self.vocabulary is None:
            self.vocabulary = self._learn([text for pair in train for text in pair])
        wavers = bool(self.config.waver) and not self.finished
        coded = (self._spellings() if name == "train" and wavers else list(map(self._coded, x)) for name, x in self.texts.items())
        self.splits = dict(zip(self.texts, coded, strict=True))
        if not self.finished:
            self.splits["train"] = short_enough(self.splits["train"], self.size, self.config)
        if self.config.decoder == "ctc" and not self.finished:
            check_slots(self.splits["train"], self.config.upsample)
        self.sample = val[0].source if val else ""

    def _spellings(self) -> list[PairExample]:
        """The training texts in other subwords, again and again."""
        words, pairs = self._words(), self.texts["train"]
        assert isinstance(words, Subwords)
        texts = [self._cased(text) for pair in pairs for text in pair]
        rounds = BpeDropout(words, self.config.waver, self.config.seed).rounds(texts, SPELLINGS)
        return [(found[i], [*found[i + 1], END]) for found in rounds for i in range(0, len(found), 2)]

    def _learn(self, texts: list[str]) -> Vocabulary:
        config = self.config
        texts = [self._cased(text) for text in texts]
        if config.units == "subwords":
            return Subwords.of(texts, size=config.vocab)
        return Words.of(texts, size=config.vocab) if config.units == "words" else Characters.of(texts)

    def _taught(self, train: Sequence[Pair]) -> list[Pair]:
        """What is learned from: the targets of the data, or those of a teacher."""
        if not self.config.teacher or self.finished:
            return list(train)
        answers = list(read_lines(Path(self.config.teacher)))
        if len(answers) != len(train):
            raise ValueError(
                f"{self.config.teacher} has {len(answers):,} lines, but there are {len(train):,} training sources: "
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
        made: nn.Module
        if config.decoder == "autoregressive":
            made = translator(config, vocab)
        else:
            kind = f"length(copy={config.slots!r})" if config.decoder == "length" else config.decoder
            made = nat_translator(config, vocab, kind=kind, upsample=config.upsample)
        if self.begun is not None:
            put_weights(made, {**slots_of(made), **self.begun.weights}, config.begin_from)
        return made

    def loss(self, model: Any, batch: Batch, step: Step) -> Loss:
        config = self.config
        if config.decoder == "autoregressive":
            return self._spoken(model, batch, step)
        shown = glancing(step, config.steps, config.glance, 0.6 * config.glance)  # 0.5 -> 0.3, as in the paper
        if config.decoder == "masked" or not config.glance:
            shown = 0.0  # tokens are shown by chance already, or not at all
        agree = config.agree if config.mode == "agree" else 0.0
        return loss_at_once(model, batch, smoothing=config.smoothing, glance=shown, agree=agree)

    def _spoken(self, model: Any, batch: Batch, step: Step) -> Loss:
        """The loss of a decoder that goes from word to word, in the mode that was asked for."""
        config = self.config
        if config.mode == "agree":
            return rdrop(model, batch, smoothing=config.smoothing, weight=config.agree, behind=True)
        if config.mode == "teacher":
            return teacher_forcing(model, batch, smoothing=config.smoothing, behind=True)
        if config.mode == "self_critical":
            return self_critical(model, batch, sentence_bleu, constraints=constraints_of(config, config.most))
        if config.mode == "minimum_risk":
            return minimum_risk(
                model, batch, sentence_bleu, constraints=constraints_of(config, config.most), samples=config.samples
            )
        assert isinstance(step, int)  # these are not steady
        share = share_of_truth(config.truth, step, config.steps, config.floor)
        if config.mode in SAMPLED:
            return SAMPLED[config.mode](model, batch, share, own=self.own, smoothing=config.smoothing)
        return MODES[config.mode](model, batch, share, config.smoothing)

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Greedily, and how well it would have followed the truth."""
        with resting(model):
            losses = [self._told(model, self.batch(part).to(device_under(model))) for part in self._parts("val")]
        total = sum(float(x.parts.get("nll", x.total)) for x in losses) / max(1, sum(int(x.over) for x in losses))
        return {"loss": total, **self._scored(model, "val", beams=1)}

    def _told(self, model: Any, batch: Batch) -> Loss:
        if self.config.decoder == "autoregressive":
            return teacher_forcing(model, batch, behind=True)
        return loss_at_once(model, batch)

    def _parts(self, split: str) -> list[list[PairExample]]:
        rows = sorted((row for row in self.splits[split] if self.size(row) <= self.config.max_len), key=self.size)
        return [rows[i : i + 200] for i in range(0, len(rows), 200)]

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        return self._scored(model, split)

    def _scored(self, model: nn.Module, split: str, beams: int | None = None) -> dict[str, float]:
        answers = self.answers(model, [source for source, _ in self.splits[split]], beams=beams)
        said, wanted = [self._words().decode(answer) for answer in answers], [pair.target for pair in self.texts[split]]
        scores = {"exact": exact_match(said, wanted, lower=self.config.lower)}
        if self.best[0] == "bleu":
            scores["bleu"] = bleu(said, wanted, lower=True).value
            if not self.config.lower:
                scores["bleu_cased"] = bleu(said, wanted).value
        return scores

    def signatures(self) -> dict[str, str]:
        if self.best[0] != "bleu":
            return {}
        known = {"bleu": bleu(["a"], ["a"], lower=True).signature}
        return known if self.config.lower else {**known, "bleu_cased": bleu(["a"], ["a"]).signature}

    def answers(
        self, model: nn.Module, sources: Sequence[list[int]], *, beams: int | None = None, early: bool = False
    ) -> list[list[int]]:
        """What it says to each source, by `beams` beams unless it says everything at once."""
        beams = self.config.beam if beams is None else beams
        with resting(model):
            sources = [row if len(row) <= self.config.max_len else [] for row in sources]  # it cannot read what is too long
            fast, device = speaker(model, self.config.most), device_under(model)
            most = (IN_CACHE if device.type == "cpu" else DECODING) // max(1, beams)
            return in_order(sources, len, most, lambda rows: self._say(fast, rows, beams, device, early))

    def _say(self, model: Any, rows: list[list[int]], beams: int, device: torch.device, early: bool) -> list[list[int]]:
        empty = [i for i, row in enumerate(rows) if not row]  # nothing is said to nothing
        source, valid = padded([row or [UNKNOWN] for row in rows])
        source, valid = source.to(device), None if valid is None else valid.to(device)
        if self.config.decoder == "autoregressive":
            state, most = model.start(source, valid), self.config.most
            answers = spoken_by(model, state, source, config=self.config, most=most, beams=beams, early=early)
        else:
            lengths = self.config.lengths if self.config.decoder in ("length", "masked") else 1
            iterations = self.config.iterations if self.config.decoder == "masked" else 1
            answers = generate_nat(model, source, valid, lengths=lengths, iterations=iterations)
        return [[] if i in empty else answer for i, answer in enumerate(answers)]

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        rows = [self._code(line) for line in lines]
        check_lengths(rows, self.config.max_len)
        return [self._words().decode(answer) for answer in self.answers(model, rows)]

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
