"""Scores of texts and labels against references, from 0 to 100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.text import unknown


class Score(NamedTuple):
    """Hold a score and the signature needed to reproduce it."""

    value: float
    signature: str


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, lower: bool = False, tokenize: str = "13a") -> Score:
    """Compute corpus BLEU (Papineni et al. 2002) by sacrebleu (Post 2018, arXiv:1804.08771)."""
    metrics = _sacrebleu(hypotheses, references)
    if tokenize not in metrics.BLEU.TOKENIZERS:
        raise ValueError(unknown("sacrebleu has no tokenizer", tokenize, metrics.BLEU.TOKENIZERS))
    metric = metrics.BLEU(lowercase=lower, tokenize=tokenize)
    return _score(metric, hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str], *, lower: bool = False, words: int = 0) -> Score:
    """Compute chrF, the F-score of character n-grams (Popović 2015), by sacrebleu; words=2 adds word n-grams: chrF++."""
    metrics = _sacrebleu(hypotheses, references)
    metric = metrics.CHRF(lowercase=lower, word_order=words)
    return _score(metric, hypotheses, references)


def rouge_l(hypotheses: Sequence[str], references: Sequence[str], *, lower: bool = False) -> float:
    """Compute the mean F1 of the longest common subsequence of words: 2 lcs / (words of one + words of the other). Lin 2004.

    Words are separated by spaces; two empty texts have a score of 100.
    """
    _check_lengths(hypotheses, references)
    found = [_words(text, lower) for text in hypotheses]
    expected = [_words(text, lower) for text in references]
    scores = [_lcs_f1(a, b) for a, b in zip(found, expected, strict=True)]
    total = sum(scores)
    return 100 * total / len(scores)


def _lcs_f1(a: list[str], b: list[str]) -> float:
    if not a and not b:
        return 1.0
    common = lcs(a, b)
    return 2 * common / (len(a) + len(b))


def exact_match(hypotheses: Sequence[str], references: Sequence[str], *, lower: bool = False) -> float:
    """Compute the share of texts that have the words of their reference in the same order, whatever the spaces."""
    _check_lengths(hypotheses, references)
    found = [_words(text, lower) for text in hypotheses]
    expected = [_words(text, lower) for text in references]
    return accuracy(found, expected)


def accuracy(predicted: Sequence[Any], true: Sequence[Any]) -> float:
    """Compute the share of equal labels, of any type."""
    _check_lengths(predicted, true)
    right = sum(a == b for a, b in zip(predicted, true, strict=True))
    return 100 * right / len(true)


def roc_auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Compute the area under the ROC curve: how often a label of 1 has a higher score than one of 0, ties counted as half.

    None where all labels are the same.
    """
    ones = int(labels.sum())
    zeros = len(labels) - ones
    if not ones or not zeros:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    ranks = ends - (counts - 1) / 2  # the mean of the ranks of equal scores
    total = ranks[place][labels == 1].sum()
    return float(100 * (total - ones * (ones + 1) / 2) / (ones * zeros))


def mean_roc_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Average the areas of the columns of scores (n c); labels (n c) are 0 or 1, and all others are left out.

    A column with one label alone has no area and is not counted; without any that has, the mean is 50.
    """
    found = []
    for own, truth in zip(scores.T, labels.T, strict=True):
        known = (truth == 0) | (truth == 1)
        found.append(roc_auc(own[known], truth[known]))
    areas = [area for area in found if area is not None]
    return sum(areas) / len(areas) if areas else 50.0


def lcs(a: Sequence[str], b: Sequence[str]) -> int:
    """Compute the length of the longest common subsequence, with each row of the table as the bits of an integer. Hyyrö 2004."""
    where: dict[str, int] = {}
    for i, word in enumerate(a):
        bits = where.get(word, 0)
        where[word] = bits | 1 << i
    all_ones = (1 << len(a)) - 1
    row = all_ones  # a bit is 0 where the length grows
    for word in b:
        kept = row & where.get(word, 0)
        row = (row + kept | row - kept) & all_ones
    return len(a) - row.bit_count()


def _words(text: str, lower: bool) -> list[str]:
    if lower:
        text = text.lower()
    return text.split()


def _score(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    found = metric.corpus_score(list(hypotheses), [list(references)])
    signature = str(metric.get_signature())
    return Score(float(found.score), signature)


def _sacrebleu(hypotheses: Sequence[str], references: Sequence[str]) -> Any:
    _check_lengths(hypotheses, references)
    try:
        from sacrebleu import metrics
    except ModuleNotFoundError:
        raise ModuleNotFoundError("BLEU and chrF need sacrebleu: pip install 'regard[train]'") from None
    return metrics


def _check_lengths(hypotheses: Sequence[Any], references: Sequence[Any]) -> None:
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise TypeError("a score compares lists of texts, not two texts: put each into a list")
    if len(hypotheses) != len(references):
        raise ValueError(f"a score needs a reference for every answer: there are {len(hypotheses):,} and {len(references):,}")
    if not len(references):
        raise ValueError("a score needs at least one reference: there are no references")
