"""Naive Bayes of the words of a text: what a classifier without a network reaches."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from regard.data.datasets import LabelledText
from regard.data.wikisql import split_words


class NaiveBayes:
    """Find the likeliest label of a text, from log p(label) + sum of log (training texts with the word + 1) / (all + v).

    A word counts once a text; `all` is the sum of those counts for the label and v the number of words. A word that no training
    text has is left out. Of equally likely labels the first in training is taken.
    """

    def __init__(self, train: Sequence[LabelledText]) -> None:
        texts = Counter(x.label for x in train)
        self.labels = list(texts)
        places = {label: place for place, label in enumerate(self.labels)}
        counts: dict[str, Counter[int]] = defaultdict(Counter)
        totals = [0] * len(self.labels)
        for x in train:
            words = set(split_words(x.text))
            totals[places[x.label]] += len(words)
            for word in words:
                counts[word][places[x.label]] += 1
        self.prior = [math.log(texts[label] / len(train)) for label in self.labels]
        self.missing = [-math.log(total + len(counts)) for total in totals]  # of a word that no text of the label has
        self.gains = {word: [(place, math.log(n + 1)) for place, n in its.items()] for word, its in counts.items()}

    def __call__(self, text: str) -> int | str:
        known = [self.gains[word] for word in set(split_words(text)) if word in self.gains]
        scores: list[list[float]] = [[before, len(known) * each] for before, each in zip(self.prior, self.missing, strict=True)]
        for gains in known:
            for place, gain in gains:
                scores[place].append(gain)
        sums = [math.fsum(parts) for parts in scores]  # exact: sets have no order
        return self.labels[sums.index(max(sums))]

    def accuracy(self, texts: Sequence[LabelledText]) -> float:
        """Return the share of texts that get their label, in percent."""
        return 100 * sum(self(x.text) == x.label for x in texts) / max(1, len(texts))
