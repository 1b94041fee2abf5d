"""Pairs of papers, byte by byte: does one cite the other? As a task: Tay et al. 2020, arXiv:2011.04006."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.arena.arena_task import ArenaBudget, Examples, ExamplesPart, TaskForm
from regard.arena.read_task import MaskableBytes, byte_rows, check_masked, text_bytes
from regard.arena.trivial_floors import most_frequent, threshold
from regard.data.datasets import Splits
from regard.data.locate import find
from regard.data.paper_pairs import LabelledPair, read_pairs, read_papers
from regard.options import check_choice, check_positive

PAPER_SHARES = (0.6, 0.2)  # of papers, in train and validation; the rest is test
PAPER_SEED = b"1"
PairSplits = Splits[list[LabelledPair]]


@dataclass(frozen=True)
class Retrieval(MaskableBytes):
    """Decide whether one of two papers cites the other.

    The pairs of the data set are split at random, so that most papers of test are in train too, in other pairs. With
    `split="documents"` papers are split, and pairs across splits are left out. No pair is in two splits, in either order.
    """

    name: ClassVar[str] = "retrieval"
    form: ClassVar[TaskForm] = "pair"
    title: ClassVar[str] = "citations between papers, byte by byte"
    source: ClassVar[str] = "AAN, Radev et al. 2009, texts of scisumm-corpus; as a task: Tay et al. 2020, arXiv:2011.04006"
    techniques: ClassVar[tuple[str, ...]] = ("masked",)
    needs: ClassVar[str] = "aan_scisumm"

    length: int = 4096  # bytes of each paper that are read
    split: str = "pairs"  # what is in one split alone: "pairs" or "documents"
    masked: float = 0.0  # share of bytes that training hides and asks for, 0.3 as published; 0: none

    def check(self) -> None:
        """Refuse a length below 1, unknown splits, and shares that hide nothing or all."""
        super().check()
        check_positive("length", self.length)
        check_choice("split", self.split, ("pairs", "documents"))
        check_masked(self.masked)

    @property
    def classes(self) -> int:
        """Return the number of labels: no citation, citation."""
        return 2

    def read_examples(self, part: ExamplesPart) -> Examples:
        """Return one split."""
        papers = read_papers(find("aan_scisumm"))
        return self._examples(part, papers, self._splits(papers))

    def _examples(self, part: ExamplesPart, papers: dict[str, str], splits: PairSplits) -> Examples:
        kept = getattr(splits, part)
        number = {name: row for row, name in enumerate(papers)}
        texts = [text_bytes(text, self.length, f"paper {name}") for name, text in papers.items()]
        tokens, lengths = byte_rows(texts, self.length)
        rows = torch.tensor([[number[pair.first], number[pair.second]] for pair in kept]).view(-1, 2)
        trained = {name for pair in splits.train for name in pair[1:]}
        seen = torch.tensor([sum(name in trained for name in pair[1:]) for pair in kept], dtype=torch.int32)
        targets = torch.tensor([pair.label for pair in kept])
        return Examples(tokens[rows], targets, lengths[rows], {"papers in train": seen})

    def _splits(self, papers: dict[str, str]) -> PairSplits:
        """Read the pairs of all splits, cut to their number of examples."""
        found = read_pairs(find("aan_scisumm"), papers)
        if self.split == "documents":
            found = split_papers(found)
        train, val, test = found
        tested = {frozenset(pair[1:]) for pair in test}
        val = [pair for pair in val if frozenset(pair[1:]) not in tested]
        held_out = tested | {frozenset(pair[1:]) for pair in val}
        train = [pair for pair in train if frozenset(pair[1:]) not in held_out]
        return Splits(self._cut("train", train), self._cut("val", val), self._cut("test", test))

    def _cut(self, part: ExamplesPart, pairs: list[LabelledPair]) -> list[LabelledPair]:
        return [pairs[row] for row in self.selection(part, len(pairs))]

    def floors(self) -> dict[str, float]:
        """Score the most frequent label, words in common, and the labels that the same papers have in train."""
        papers = read_papers(find("aan_scisumm"))
        splits = self._splits(papers)
        labels, test_labels = (torch.tensor([pair.label for pair in part]) for part in (splits.train, splits.test))
        vectors = word_vectors({name: text_bytes(text, self.length, f"paper {name}") for name, text in papers.items()})
        overlap = [word_cosine(vectors, part) for part in (splits.train, splits.test)]
        odds = [paper_odds(splits.train, part) for part in (splits.train, splits.test)]
        return {
            "most frequent label": most_frequent(labels, test_labels),
            "words in common, tf-idf cosine": threshold(overlap[0], labels, overlap[1], test_labels),
            "labels of the same papers in train": threshold(odds[0], labels, odds[1], test_labels),
        }

    def budget(self) -> ArenaBudget:
        """Return the budget of the published re-run: 30,000 steps of 32."""
        return ArenaBudget(steps=30000, batch=32)


def split_papers(found: PairSplits) -> PairSplits:
    """Give each paper to one split by a hash of its id, and keep the pairs inside a split."""
    parts: tuple[list[LabelledPair], ...] = ([], [], [])
    for pair in (pair for part in found for pair in part):
        first, second = (_paper_part(name) for name in pair[1:])
        if first == second:
            parts[first].append(pair)
    return Splits(*parts)


def _paper_part(name: str) -> int:
    share = int.from_bytes(hashlib.sha256(PAPER_SEED + name.encode()).digest()[:6], "big") / 2**48
    return int(np.searchsorted(np.cumsum(PAPER_SHARES), share, "right"))


def word_vectors(texts: dict[str, bytes]) -> dict[str, dict[bytes, float]]:
    """Return the words of each text with their weights: log(1 + count) * log(texts / texts with it), of unit norm."""
    counts = {name: Counter(re.findall(rb"[a-z]+", text.lower())) for name, text in texts.items()}
    spread = Counter(word for found in counts.values() for word in found)
    vectors = {}
    for name, found in counts.items():
        weights = {word: math.log1p(count) * math.log(len(texts) / spread[word]) for word, count in found.items()}
        norm = math.sqrt(sum(x * x for x in weights.values())) or 1.0
        vectors[name] = {word: x / norm for word, x in weights.items()}
    return vectors


def word_cosine(vectors: dict[str, dict[bytes, float]], pairs: list[LabelledPair]) -> Tensor:
    """Return the cosine of the words of each pair."""
    found = []
    for pair in pairs:
        first, second = vectors[pair.first], vectors[pair.second]
        found.append(sum(first[word] * second[word] for word in first.keys() & second.keys()))
    return torch.tensor(found)


def paper_odds(train: list[LabelledPair], pairs: list[LabelledPair]) -> Tensor:
    """Return the log odds of a citation by how often each paper has one in train; a pair of train itself does not count."""
    with_one = Counter(name for pair in train if pair.label for name in pair[1:])
    total = Counter(name for pair in train for name in pair[1:])
    inside = pairs is train
    odds = []
    for pair in pairs:
        own = 0.0
        for name in pair[1:]:
            ones = with_one[name] - inside * pair.label
            zeros = total[name] - with_one[name] - inside * (1 - pair.label)
            own += math.log((ones + 1) / (zeros + 1))
        odds.append(own)
    return torch.tensor(odds)
