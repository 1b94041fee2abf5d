"""A tree for a sentence, written as a sequence of brackets by a decoder. Vinyals et al. 2014, arXiv:1412.7449."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.feedforward import check_fraction
from regard.checks import need
from regard.data.batch import END, Batch, padded, shifted
from regard.data.bracket_score import bracket_score
from regard.data.locate import find
from regard.data.spelled_words import normalized_words, spelled_batch, spelled_words, words_of_line
from regard.data.tree_floors import branching_labels, branching_scores
from regard.data.treebank import (
    CLOSING,
    Tree,
    brackets,
    escaped_word,
    read_gum,
    tree_of,
    without_functions,
    words_of_tree,
    write_tree,
)
from regard.data.vocabulary import Characters, Words, vocabulary
from regard.decoding.bracket_grammar import CLOSES, NAMES_WORD, NEITHER, OPENS, BracketGrammar
from regard.models.build import added, tokens, translator_of
from regard.models.embedding import Spelled
from regard.tasks.init_from import short_enough
from regard.tasks.parsing_config import Parsing
from regard.tasks.support import check_lengths, device_under, evaluating, generate_answers, in_order, task_decoder
from regard.tasks.task import ENCODER_DECODER, GENERATION_SETTINGS, Task
from regard.tasks.text_attention import StackTokens, TextAttention, text_attention
from regard.training.decoder_inputs import sequence
from regard.training.decoder_modes import teacher_forcing
from regard.training.learnable import Step
from regard.training.losses import Loss

PARSE_TOKENS = 20_000  # tokens of a batch when nothing is kept for a backward pass
WATCHED_TREES = 300  # sentences of a validation, spread over the file
ANY_TAG = "XX"  # the tag of every word where tags are not predicted
FRAME = 3  # tokens of a tree beside its words at least: two brackets and the end


class ParsedExample(NamedTuple):
    """A sentence and its tree."""

    words: list[list[int]]  # of every word its number and those of its letters
    target: list[int]  # brackets and tags, with END


class ParsingTask(Task):
    """A constituency tree for every sentence; scored by the F1 of brackets as evalb counts them.

    Decoding is constrained (`BracketGrammar`): every answer is a tree over all words of its sentence. The floor is a tree that
    branches to the right, with the best label of train.
    """

    best = ("f1", "max")
    steady = True
    bodies = ENCODER_DECODER
    answering = GENERATION_SETTINGS
    config: Parsing

    def __init__(self, config: Parsing) -> None:
        super().__init__(config)
        need("letters", config.letters, 2)
        for name in ("spelling", "min_count", "chain"):
            need(name, getattr(config, name))
        need("max_new_tokens", config.max_new_tokens, FRAME + 1)
        check_fraction("forget", config.forget)
        self.words, self.characters, self.symbols = Words([]), Characters([]), Words([])
        self.trees: dict[str, list[Tree]] = {}
        self.branching = ""  # the label of the floor, of train

    def read(self, folder: Path | None = None) -> None:
        parts = dict(zip(("train", "val", "test"), read_gum(find(self.config.task, folder)), strict=True))
        if not self.symbols.words:
            texts = [[leaf.word for leaf in words_of_tree(tree)] for tree in parts["train"]]
            self.words = Words.of(map(normalized_words, texts), min_count=self.config.min_count)
            self.characters = Characters.of(word for text in texts for word in text)
            self.symbols = Words.of(map(self._sequence, parts["train"]))
        self.trees, self.branching = parts, branching_labels(parts["train"]).best
        self.splits = {name: [self._coded(tree) for tree in trees] for name, trees in parts.items()}
        self.splits["train"] = short_enough(self.splits["train"], self.size, self.config)
        self.sample = " ".join(leaf.word for leaf in words_of_tree(parts["val"][0])) if parts["val"] else ""

    def describe_data(self) -> list[str]:
        counts = ", ".join(f"{len(trees):,} {name}" for name, trees in self.trees.items())
        floors = " and ".join(f"{self._floor(name):.1f} on {name}" for name in ("val", "test"))
        return [f"trees: {counts}", f"floor: trees that branch to the right, {self.branching} everywhere, have an F1 of {floors}"]

    def _floor(self, split: str) -> float:
        return branching_scores(self.trees[split], [self.branching])[self.branching].f1

    def _sequence(self, tree: Tree) -> list[str]:
        """Write a tree as the symbols that are predicted."""
        found = brackets(tree if self.config.functions else without_functions(tree))
        return found if self.config.tags else [token if token[0] == "(" or token == CLOSING else ANY_TAG for token in found]

    def _coded(self, tree: Tree) -> ParsedExample:
        words = self._spelled([leaf.word for leaf in words_of_tree(tree)])
        return ParsedExample(words, [*self.symbols.encode_words(self._sequence(tree)), END])

    def _spelled(self, words: Sequence[str]) -> list[list[int]]:
        return spelled_words(words, self.words, self.characters, self.config.letters)

    def assets(self) -> dict[str, str]:
        kept: dict[str, Words | Characters] = {"words": self.words, "characters": self.characters, "symbols": self.symbols}
        return {f"{name}.json": entries.to_json() for name, entries in kept.items()}

    def restore(self, assets: Mapping[str, str]) -> None:
        words, characters, symbols = (vocabulary(assets[f"{name}.json"]) for name in ("words", "characters", "symbols"))
        if not isinstance(words, Words) or not isinstance(characters, Characters) or not isinstance(symbols, Words):
            kinds = f"{words.kind}, {characters.kind} and {symbols.kind}"
            raise ValueError(f"words.json, characters.json and symbols.json hold {kinds}: restore them")
        self.words, self.characters, self.symbols = words, characters, symbols

    def size(self, example: ParsedExample) -> int:
        return max(len(example.words), len(example.target))

    def batch(self, examples: Sequence[ParsedExample]) -> Batch:
        _, source_valid = padded([[0] * len(x.words) for x in examples], multiple=self.multiple)
        source = spelled_batch([x.words for x in examples], self.config.letters, multiple=self.multiple)
        target, target_valid = padded([x.target for x in examples], multiple=self.multiple)
        return Batch(source, source_valid, target, target_valid)

    def model(self) -> nn.Module:
        config = self.config
        source = Spelled(
            len(self.words),
            len(self.characters),
            config.width,
            spelling=config.spelling,
            positions=added(config),
            dropout=config.dropout,
            forget=config.forget,
        )
        return translator_of(config, source, tokens(config, len(self.symbols)))

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        return teacher_forcing(model, batch, smoothing=self.config.smoothing, behind=True)

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Score greedy answers to a part of the validation split."""
        apart = max(1, len(self.splits["val"]) // WATCHED_TREES)
        return self._scored(model, self.splits["val"][::apart], self.trees["val"][::apart], beams=1)

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        found = self._scored(model, self.splits[split], self.trees[split], beams=self.config.beam)
        return {**found, "floor": self._floor(split)}

    def _scored(
        self, model: nn.Module, examples: Sequence[ParsedExample], trees: Sequence[Tree], *, beams: int
    ) -> dict[str, float]:
        texts = [[leaf.word for leaf in words_of_tree(tree)] for tree in trees]
        check_lengths(texts, self._longest())
        answers = self._answers(model, [x.words for x in examples], beams)
        found = [tree_of(self.symbols.decode_words(row), words) for row, words in zip(answers, texts, strict=True)]
        scores = bracket_score(found, trees)._asdict()
        if not self.config.tags:
            del scores["tagged"]
        return {**scores, "sentences": float(len(trees))}

    def _longest(self) -> int:
        """Count the words of the longest sentence whose tree can be written."""
        return min(self.config.max_new_tokens, self.config.max_len) - FRAME

    def _answers(self, model: nn.Module, sentences: Sequence[list[list[int]]], beams: int) -> list[list[int]]:
        with evaluating(model):
            fast = task_decoder(model, self.config.max_new_tokens)
            kinds = torch.tensor(self._kinds(), device=device_under(model))
            return in_order(
                sentences, len, PARSE_TOKENS // (8 * beams), lambda rows: self._generate(fast, rows, kinds, beams)
            )  # a tree has several tokens a word

    def _kinds(self) -> list[int]:
        """Tell for every symbol what it does in a tree."""
        special = [NEITHER] * (len(self.symbols) - len(self.symbols.words))
        return special + [OPENS if x[0] == "(" else CLOSES if x == CLOSING else NAMES_WORD for x in self.symbols.words]

    def _generate(self, model: Any, rows: list[list[list[int]]], kinds: Tensor, beams: int) -> list[list[int]]:
        batch = self.batch([ParsedExample(row, [END]) for row in rows]).to(kinds.device)
        room = min(self.config.max_new_tokens, self.config.max_len)
        words = torch.tensor([len(row) for row in rows], device=kinds.device)
        grammar = BracketGrammar(kinds, words, END, room, self.config.chain)
        state = model.start(batch.source, batch.source_valid)
        return generate_answers(model, state, words, config=self.config, most=room, beams=beams, grammar=grammar)

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Write the tree of every line in Penn brackets; a line without a word has none."""
        texts = [[escaped_word(word) for word in words_of_line(line)] for line in lines]
        check_lengths(texts, self._longest())
        full = [text for text in texts if text]
        answers = self._answers(model, [self._spelled(text) for text in full], self.config.beam)
        trees = iter([tree_of(self.symbols.decode_words(row), text) for row, text in zip(answers, full, strict=True)])
        return [write_tree(next(trees)) if text else "" for text in texts]

    def attention(self, model: Any, line: str) -> TextAttention:
        """Compute the attention to a line and to its tree."""
        words = [escaped_word(word) for word in words_of_line(line)]
        check_lengths([words], self._longest())
        if not words:
            raise ValueError("a line without a word has no tree")
        target = [*self._answers(model, [self._spelled(words)], self.config.beam)[0], END]
        batch = self.batch([ParsedExample(self._spelled(words), target)]).to(device_under(model))
        names = self.symbols.decode_words(target)
        said = StackTokens(["<begin>", *names], [*names, "<end>"])
        with evaluating(model):
            return text_attention(
                model,
                lambda: model(batch.source, batch.source_valid, shifted(sequence(batch))),
                (StackTokens(words), said),
                line,
                write_tree(tree_of(names, words)),
            )
