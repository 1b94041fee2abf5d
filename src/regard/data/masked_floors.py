"""Guesses of a masked token without a network: by the frequency of tokens, and by the two neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from regard.data.vocabulary import FIRST_TEXT_ID

STRENGTH = 2.0  # of the frequencies of all tokens within those behind one token, in occurrences
Counts = tuple[np.ndarray, np.ndarray]  # tokens, and how often each of them was there


class MaskedPlace(NamedTuple):
    """A token to guess, and what is read on its sides; -1 where nothing is."""

    left: int
    right: int
    token: int


class GuessScores(NamedTuple):
    """Accuracy of a guess, in percent, and perplexity."""

    accuracy: float
    perplexity: float


class NeighbourCounts:
    """Counts of tokens and of pairs of neighbours in training rows."""

    def __init__(self, rows: Iterable[Sequence[int]], size: int) -> None:
        lists = [np.asarray(row, np.int64) for row in rows]
        tokens = np.concatenate([*lists, np.empty(0, np.int64)])
        counts = np.bincount(tokens, minlength=size).astype(np.float64)
        self.totals = counts.copy()
        counts[:FIRST_TEXT_ID] = 0
        counts[FIRST_TEXT_ID:] += 1
        self.shares = counts / counts.sum()
        pairs = np.concatenate([row[:-1] * size + row[1:] for row in lists] or [np.empty(0, np.int64)])
        found, often = np.unique(pairs, return_counts=True)
        first, second = found // size, found % size
        self.behind = _Grouped(first, second, often, size)
        order = np.argsort(second, kind="stable")
        self.before = _Grouped(second[order], first[order], often[order], size)

    def unigram(self, places: Sequence[MaskedPlace]) -> GuessScores:
        """Score the most frequent token as every guess."""
        best = int(self.shares.argmax())
        return _scores(np.array([(x.token == best, self.shares[x.token]) for x in places]))

    def bigram(self, places: Sequence[MaskedPlace]) -> GuessScores:
        """Score p(token | left) p(right | token), normalised over all tokens."""
        found = []
        for x in places:
            chance = self.chances(x.left, x.right)
            found.append((chance.argmax() == x.token, chance[x.token]))
        return _scores(np.array(found))

    def chances(self, left: int, right: int) -> np.ndarray:
        """Compute the probability of every token between two neighbours, -1 for one that is not known."""
        chance = STRENGTH * self.shares
        if left >= 0:
            tokens, often = self.behind[left]
            chance[tokens] += often
        if right >= 0:
            tokens, often = self.before[right]
            follows = np.full(len(chance), STRENGTH * max(self.shares[right], 1e-12))
            follows[tokens] += often
            chance = chance * follows / (self.totals + STRENGTH)
        chance[:FIRST_TEXT_ID] = 0
        return chance / chance.sum()


class _Grouped:
    """Counts of pairs by their first token, which are sorted."""

    def __init__(self, keys: np.ndarray, others: np.ndarray, often: np.ndarray, size: int) -> None:
        self.starts = np.searchsorted(keys, np.arange(size + 1))
        self.others, self.often = others, often

    def __getitem__(self, key: int) -> Counts:
        part = slice(self.starts[key], self.starts[key + 1])
        return self.others[part], self.often[part]


def _scores(found: np.ndarray) -> GuessScores:
    if not len(found):
        return GuessScores(0.0, float("nan"))
    return GuessScores(100 * float(found[:, 0].mean()), float(np.exp(-np.log(np.maximum(found[:, 1], 1e-300)).mean())))
