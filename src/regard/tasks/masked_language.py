"""Masked-language pre-training: some tokens of a text are masked, and predicted from both sides. A first stage for others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard import tasks
from regard.checks import need
from regard.data.batch import MASK, NO_LABEL, Batch
from regard.data.datasets import Splits
from regard.data.masked_floors import GuessScores, MaskedPlace, NeighbourCounts
from regard.data.masked_units import BLANK_SIGN, MASKED_UNITS, MaskedUnits, PlainUnits, SpelledUnits, TokenRow, kept_units
from regard.data.own_files import split_lines, split_text
from regard.data.spelled_words import words_of_line
from regard.data.text_files import DataError, read_lines
from regard.data.vocabulary import FIRST_TEXT_ID
from regard.models.build import added, encoder, tokens
from regard.models.embedding import Embedding, Spelled
from regard.models.encoder_head import Reader
from regard.models.heads import MaskedToken
from regard.models.pointer import check_each
from regard.options import check_choice, check_probability
from regard.tasks.masked_config import CORPORA, MaskedLanguage
from regard.tasks.own_file import OwnFiles
from regard.tasks.sentiment import SentimentTask
from regard.tasks.support import check_lengths, check_vocab, device_under, evaluating, in_order, learned
from regard.tasks.tagging import TaggingTask
from regard.tasks.task import Task
from regard.tasks.text_attention import StackTokens, TextAttention, text_attention
from regard.training.learnable import Step
from regard.training.losses import Loss, cross_entropy
from regard.training.token_masking import MaskedTokens, Masking, mask_tokens

MASKED_BATCH_TOKENS = 50_000  # tokens of a batch when nothing is kept for a backward pass
SCORING_SEED = 1  # of the places that are scored: the same for all runs
FLOOR_PLACES = 20_000  # places that floors are computed of, at most
SPELLED_ONLY = ("min_count", "letters", "spelling")


class ScoredExample(NamedTuple):
    """An example whose masks are drawn once."""

    inputs: Tensor  # (n) or (n, 1 + letters)
    places: list[int]
    targets: list[int]


class MaskedLanguageTask(Task):
    """Tokens that are masked in a text; scored by perplexity and accuracy of those alone, on places that never change.

    In training they are drawn anew at every update. Floors are the most frequent token, and the likeliest one between its two
    neighbours by counts of pairs.
    """

    best = ("loss", "min")
    answering = ("top",)
    config: MaskedLanguage

    def __init__(self, config: MaskedLanguage) -> None:
        super().__init__(config)
        check_choice("units", config.units, MASKED_UNITS)
        check_vocab(config.units, config.vocab)
        for name, least in (("letters", 2), ("spelling", 1), ("min_count", 1), ("top", 1), ("window", 2)):
            need(name, getattr(config, name), least)
        for name in ("predicted", "masked", "random"):
            check_probability(name, getattr(config, name))
        if not config.predicted or config.masked + config.random > 1:
            raise ValueError("predicted must be above 0, and masked and random together at most 1: the rest of them is kept")
        if config.window > config.max_len:
            raise ValueError(f"window must be at most max_len={config.max_len}, not {config.window}")
        if config.corpus:
            check_choice("corpus", config.corpus, CORPORA)
        if config.corpus and (config.file or config.valid or config.test):
            raise ValueError("the texts are in one place: give --file or --set corpus=..., not both")
        self.masking = Masking(config.predicted, config.masked, config.random)
        self.steady = config.units != "spelled"
        self.units: MaskedUnits | None = None
        self.files = OwnFiles([config.file] if config.file else [], config.valid, config.test)
        self.scored: dict[str, list[ScoredExample]] = {}
        self.floors: dict[str, tuple[GuessScores, GuessScores]] = {}

    def unused(self) -> dict[str, str]:
        units, found = self.config.units, super().unused()
        if units != "spelled":
            found |= dict.fromkeys(SPELLED_ONLY, "units=spelled")
        if units not in ("subwords", "words"):
            found["vocab"] = "units=subwords or words"
        if units == "spelled":
            found["lower"] = "other units than spelled, whose words are in lower case and whose letters are not"
        return found | ({"join": "--file"} if self.config.corpus else {})

    def texts(self, folder: Path | None) -> Splits[list[str]]:
        """Read the texts of train, val and test."""
        if self.config.corpus:
            return _corpus_texts(self.config.corpus, folder)
        if not self.config.file:
            raise DataError(f"which texts? Give --file FILE, or --set corpus=..., one of {', '.join(CORPORA)}")
        paths = {split: path for split, (path,) in self.files.find(folder).items()}
        lines = {split: [line.strip() for line in read_lines(path) if line.strip()] for split, path in paths.items()}
        if empty := [paths[split] for split, part in lines.items() if not part]:
            raise DataError(f"{empty[0]} has no text in it")
        if not self.config.join:
            return split_lines(lines.pop("train"), paths["train"], self.files.held)._replace(**lines)
        whole = {split: " ".join(part) for split, part in lines.items()}
        parts = split_text(whole.pop("train"), self.files.held)._replace(**whole)
        return Splits(*([text.strip()] if text.strip() else [] for text in parts))

    def read(self, folder: Path | None = None) -> None:
        parts, config = self.texts(folder), self.config
        if config.units == "spelled" and config.corpus not in ("ewt", "saw"):
            parts = Splits(*([" ".join(words_of_line(text)) for text in part] for part in parts))
        if self.units is None:
            self.units = (
                SpelledUnits.learn(parts.train, config.min_count, config.letters)
                if config.units == "spelled"
                else PlainUnits.learn(parts.train, config.units, config.vocab, lower=config.lower)
            )
        self.splits = {name: self._examples(part) for name, part in parts._asdict().items()}
        for name, part in self.splits.items():
            if not part:
                raise DataError(f"the texts of {name} have no token to predict: more of them are needed")
        self.scored, self.floors = {}, {}
        self.sample = _with_blank(parts.val[0])

    def _examples(self, texts: Sequence[str]) -> list[TokenRow]:
        """Encode texts, cut into windows; one without a token of text teaches nothing."""
        units = self._units()
        room = self.config.window - len(units.front)
        rows = (row[at : at + room] for row in units.encode_all(texts) for at in range(0, len(row), room))
        return [[*units.front, *row] for row in rows if max(units.ids(row)) >= FIRST_TEXT_ID]

    def _units(self) -> MaskedUnits:
        return learned(self.units)

    def describe_data(self) -> list[str]:
        counts = {name: sum(map(len, part)) for name, part in self.splits.items()}
        shown = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        how = "from its beginning to its end" if self.config.join else "by a hash of each line"
        described = f"{self.config.corpus}: {shown}" if self.config.corpus else self.files.describe(counts, "tokens", how)
        floors = {name: self._floors(name) for name in ("val", "test")}
        one = " and ".join(f"{found[0].accuracy:.1f} % of {name}" for name, found in floors.items())
        two = " and ".join(f"{found[1].accuracy:.1f} % of {name}" for name, found in floors.items())
        return [
            f"{described}; {len(self._units()):,} different ones",
            f"floor: the most frequent token is right for {one}",
            f"floor: the likeliest token between its neighbours, by counts of pairs, is right for {two}",
        ]

    def assets(self) -> dict[str, str]:
        return {**self._units().assets(), **self.files.assets()}

    def restore(self, assets: Mapping[str, str]) -> None:
        self.units = kept_units(assets, self.config.units, lower=self.config.lower, letters=self.config.letters)
        self.files.restore(assets)

    def size(self, example: TokenRow) -> int:
        return len(example)

    def batch(self, examples: Sequence[TokenRow]) -> Batch:
        source, valid = self._units().tensor(examples, self.multiple)
        return Batch(source, valid)

    def model(self) -> nn.Module:
        """Build an encoder and BERT's head; a shared table is that of the tokens, or of the words."""
        config, size = self.config, len(self._units())
        embed: Embedding
        if isinstance(self.units, SpelledUnits):
            letters, positions = len(self.units.characters), added(config)
            embed = Spelled(size, letters, config.width, spelling=config.spelling, positions=positions, dropout=config.dropout)
            table = embed.words
        else:
            embed = tokens(config, size)
            table = embed.table
        made = encoder(config, embed)
        check_each(made, "predicts")
        return Reader(made, MaskedToken(config.width, size, table=table if config.share else None))

    @cached_property
    def _forms(self) -> dict[torch.device, Tensor]:
        """Inputs of all tokens, by device: copied there once."""
        return {torch.device("cpu"): self._units().forms()}

    def _forms_on(self, device: torch.device) -> Tensor:
        if device not in self._forms:
            self._forms[device] = self._forms[torch.device("cpu")].to(device)
        return self._forms[device]

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        """Compute the cross-entropy of predicted tokens, at places that are drawn here, on the device."""
        drawn = mask_tokens(batch.source, batch.source_valid, self.masking, self._forms_on(batch.source.device))
        scores = masked_scores(model, drawn.inputs, batch.source_valid, drawn.places)
        return cross_entropy(scores, drawn.targets, smoothing=self.config.smoothing)

    def _scored(self, split: str) -> list[ScoredExample]:
        """Draw the masks of a split, once, each example by itself."""
        if split not in self.scored:
            dice = torch.Generator().manual_seed(SCORING_SEED)
            forms, units = self._forms_on(torch.device("cpu")), self._units()
            drawn = (mask_tokens(units.tensor([row], 1)[0], None, self.masking, forms, dice) for row in self.splits[split])
            self.scored[split] = [_scored_example(x) for x in drawn]
        return self.scored[split]

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        device = device_under(model)

        def answer(part: list[ScoredExample]) -> list[tuple[int, float]]:
            inputs, valid, places, targets = (x.to(device) for x in _scored_batch(part))
            scores = masked_scores(model, inputs, valid, places).float()
            known = targets != NO_LABEL
            chance = scores.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
            right = ((scores.argmax(-1) == targets) & known).sum(1)
            return list(zip(right.tolist(), (chance * known).sum(1).tolist(), strict=True))

        examples = self._scored(split)
        with evaluating(model):
            found = in_order(examples, lambda x: len(x.inputs), MASKED_BATCH_TOKENS, answer)
        count = sum(len(x.places) for x in examples)
        loss = -sum(chance for _, chance in found) / count
        one, two = self._floors(split)
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700)),
            "accuracy": 100 * sum(right for right, _ in found) / count,
            "floor": one.accuracy,
            "floor_perplexity": one.perplexity,
            "bigram": two.accuracy,
            "bigram_perplexity": two.perplexity,
            "tokens": float(count),
        }

    def _floors(self, split: str) -> tuple[GuessScores, GuessScores]:
        """Score the guesses without a network, at FLOOR_PLACES places of a split, evenly spaced where it has more."""
        if split not in self.floors:
            units = self._units()
            counts = NeighbourCounts((units.ids(row) for row in self.splits["train"]), len(units))
            every = [place for x in self._scored(split) for place in _neighbours(x)]
            chosen = [every[i * len(every) // FLOOR_PLACES] for i in range(FLOOR_PLACES)] if len(every) > FLOOR_PLACES else every
            self.floors[split] = counts.unigram(chosen), counts.bigram(chosen)
        return self.floors[split]

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Fill the blanks of every line, [MASK], each with its likeliest token; or list the `top` candidates of each."""
        return [self._filled(model, line, number) if line.strip() else "" for number, line in enumerate(lines, 1)]

    def _filled(self, model: nn.Module, line: str, number: int) -> str:
        if BLANK_SIGN not in line:
            raise ValueError(f"line {number} has no {BLANK_SIGN}: write it where a token is to be filled in")
        units = self._units()
        row = [*units.front, *units.encode_blanks(line)]
        check_lengths([*([[]] * (number - 1)), row], self.config.max_len)
        source, valid = units.tensor([row], 1)
        places = torch.tensor([[at for at, token in enumerate(units.ids(row)) if token == MASK]])
        device = device_under(model)
        with evaluating(model):
            scores = masked_scores(model, source.to(device), valid, places.to(device))[0, :, FIRST_TEXT_ID:].float()
        chances, best = scores.softmax(-1).topk(min(self.config.top, scores.shape[-1]))
        named = [[text.strip(" ") or text for text in self._names(tokens)] for tokens in (best + FIRST_TEXT_ID).tolist()]
        if self.config.top == 1:
            first, *others = line.split(BLANK_SIGN)
            return first + "".join(names[0] + part for names, part in zip(named, others, strict=True))
        rows = zip(named, chances.tolist(), strict=True)
        return "; ".join(", ".join(f"{x} {100 * p:.1f} %" for x, p in zip(*pair, strict=True)) for pair in rows)

    def _names(self, ids: Sequence[int]) -> list[str]:
        units = self._units()
        return units.labels([[number] for number in ids] if isinstance(units, SpelledUnits) else list(ids))

    def attention(self, model: Any, line: str) -> TextAttention:
        units = self._units()
        row = [*units.front, *units.encode_blanks(line)]
        check_lengths([row], self.config.max_len)
        source, valid = units.tensor([row], 1)
        source = source.to(device_under(model))
        answer = self.predict(model, [line])[0] if BLANK_SIGN in line else ""
        with evaluating(model):
            return text_attention(model, lambda: model.encoder(source, valid), [StackTokens(units.labels(row))], line, answer)


def masked_scores(model: Any, inputs: Tensor, valid: Tensor | None, places: Tensor) -> Tensor:
    """Compute the scores (b k v) of the tokens at places (b k) alone."""
    vectors = model.encoder(inputs, valid).x
    index = places[..., None].expand(-1, -1, vectors.shape[-1])
    return model.head(vectors.gather(1, index))


def _corpus_texts(name: str, folder: Path | None) -> Splits[list[str]]:
    """Read the texts of another task without their labels, in its own splits."""
    task = tasks.make_task(tasks.config(name))
    if isinstance(task, TaggingTask):
        return Splits(*([" ".join(x.words) for x in part] for part in task.sentences(folder)))
    assert isinstance(task, SentimentTask)
    return Splits(*([x.text for x in part] for part in task.examples(folder)))


def _scored_example(drawn: MaskedTokens) -> ScoredExample:
    real = (drawn.targets[0] != NO_LABEL).tolist()
    places = [place for place, kept in zip(drawn.places[0].tolist(), real, strict=True) if kept]
    return ScoredExample(drawn.inputs[0], places, [x for x in drawn.targets[0].tolist() if x != NO_LABEL])


def _scored_batch(part: Sequence[ScoredExample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pad examples: their inputs, which of those are real, the places, and the tokens that were there."""
    inputs = nn.utils.rnn.pad_sequence([x.inputs for x in part], batch_first=True)
    lengths = torch.tensor([len(x.inputs) for x in part])
    valid = torch.arange(inputs.shape[1]) < lengths[:, None]
    most = max(len(x.places) for x in part)
    places = torch.tensor([x.places + [0] * (most - len(x.places)) for x in part])
    targets = torch.tensor([x.targets + [NO_LABEL] * (most - len(x.targets)) for x in part])
    return inputs, valid, places, targets


def _neighbours(x: ScoredExample) -> list[MaskedPlace]:
    """List the predicted tokens of an example with what is read on both sides; a mask there is not known."""
    ids = [-1, *(x.inputs if x.inputs.dim() == 1 else x.inputs[:, 0]).tolist(), -1]
    ids = [-1 if token == MASK else token for token in ids]
    return [MaskedPlace(ids[at], ids[at + 2], token) for at, token in zip(x.places, x.targets, strict=True)]


def _with_blank(text: str) -> str:
    """Replace a word in the middle of the first words of a text."""
    words = text.split()[:8]
    words[len(words) // 2] = BLANK_SIGN
    return " ".join(words)
