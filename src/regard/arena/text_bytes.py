"""Byte-level sentiment of film reviews. Maas et al. 2011; as a long sequence: Tay et al. 2020, arXiv:2011.04006."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from regard.arena.arena_task import ArenaBudget, Examples, ExamplesPart
from regard.arena.read_task import BYTE_IDS, MaskableBytes, byte_rows, check_masked, power_of_two, text_bytes
from regard.arena.trivial_floors import most_frequent, ridge, token_bayes, token_histogram
from regard.data.datasets import LabelledText, Splits, read_imdb
from regard.data.locate import find
from regard.options import check_positive

Labelled = list[tuple[bytes, int]]


@dataclass(frozen=True)
class TextBytes(MaskableBytes):
    """Classify reviews, good or bad, from their first bytes. What test has too is left out of train and validation."""

    name: ClassVar[str] = "text"
    title: ClassVar[str] = "sentiment of film reviews, byte by byte"
    source: ClassVar[str] = "Maas et al. 2011; lengths of Tay et al. 2020, arXiv:2011.04006"
    techniques: ClassVar[tuple[str, ...]] = ("masked",)
    needs: ClassVar[str] = "imdb"

    length: int = 4096  # bytes of a review that are read
    masked: float = 0.0  # share of bytes that training hides and asks for, 0.3 as published; 0: none

    def check(self) -> None:
        """Refuse a length below 1 and shares that hide nothing or all."""
        super().check()
        check_positive("length", self.length)
        check_masked(self.masked)

    @property
    def classes(self) -> int:
        """Return the number of labels: bad, good."""
        return 2

    def read_examples(self, part: ExamplesPart) -> Examples:
        """Return one split; validation is held out of train by a hash of each text."""
        return self._examples(part, self._reviews())

    def _examples(self, part: ExamplesPart, reviews: Splits[Labelled]) -> Examples:
        own = getattr(reviews, part)
        kept = [own[row] for row in self.selection(part, len(own))]
        tokens, lengths = byte_rows([text for text, _ in kept], self.length)
        targets = torch.tensor([label for _, label in kept])
        return Examples(tokens, targets, lengths, {"bytes": power_of_two(lengths)})

    def _reviews(self) -> Splits[Labelled]:
        """Read the bytes of all reviews; of equal ones in two splits, the later split of test, val, train loses them."""
        found = read_imdb(find("imdb"))
        train, val, test = (self._encoded(part) for part in found)
        tested = {text for text, _ in test}
        val = [review for review in val if review[0] not in tested]
        held_out = tested | {text for text, _ in val}
        return Splits([review for review in train if review[0] not in held_out], val, test)

    def _encoded(self, reviews: list[LabelledText]) -> Labelled:
        return [(text_bytes(review.text, self.length, "imdb"), int(review.label)) for review in reviews]

    def floors(self) -> dict[str, float]:
        """Score the most frequent label, a ridge regression of byte counts, and naive Bayes of bytes and of 4-grams."""
        reviews = self._reviews()
        train, test = self._examples("train", reviews), self._examples("test", reviews)
        counts = [token_histogram(x.tokens, BYTE_IDS)[:, 1:] for x in (train, test)]
        shares = [(x / x.sum(1, keepdim=True).clamp(min=1)).sqrt() for x in counts]
        return {
            "most frequent label": most_frequent(train.targets, test.targets),
            "bytes counted, ridge regression": ridge(shares[0], train.targets, shares[1], test.targets),
            "bytes in it, naive Bayes": token_bayes(train, test, 1),
            "4-grams of bytes in it, naive Bayes": token_bayes(train, test, 4),
        }

    def budget(self) -> ArenaBudget:
        """Return the budget of the published re-run: 20,000 steps of 32."""
        return ArenaBudget(steps=20000, batch=32)
