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


def word_errors(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Compute the word error rate: the fewest words to insert, delete or replace in all answers, per word of the references.

    Errors of all texts are summed, and so are words: long texts count more. It may exceed 100.
    """
    _check_lengths(hypotheses, references)
    return _error_rate([text.split() for text in hypotheses], [text.split() for text in references])


def character_errors(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Compute the character error rate, as `word_errors` but in characters; one space counts between two words."""
    _check_lengths(hypotheses, references)
    return _error_rate([list(" ".join(text.split())) for text in hypotheses], [list(" ".join(x.split())) for x in references])


def _error_rate(found: list[list[str]], expected: list[list[str]]) -> float:
    total = sum(map(len, expected))
    if not total:
        raise ValueError("an error rate is per unit of the references, and they are all empty")
    return 100 * sum(map(edits, found, expected)) / total


def edits(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Count the fewest insertions, deletions and replacements that turn one sequence into the other. Levenshtein 1966."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def equal_error_rate(scores: Sequence[float], same: Sequence[bool]) -> float:
    """Compute the equal error rate of trials: the share of wrong decisions at the threshold where both kinds are equally likely.

    A trial is accepted if its score is above the threshold; `same` are the trials to accept. Between two thresholds the rates
    are on a line, as in a ROC curve with equal scores drawn as one step.
    """
    _check_lengths(scores, same)
    true, false = sum(map(bool, same)), sum(not x for x in same)
    if not true or not false:
        raise ValueError("an equal error rate needs trials of both kinds: of the same and of different labels")
    ordered = sorted(zip(scores, same, strict=True), key=lambda pair: -pair[0])
    missed, accepted, place = 1.0, 0.0, 0
    while place < len(ordered):
        score, hits, alarms = ordered[place][0], 0, 0
        while place < len(ordered) and ordered[place][0] == score:
            hits, alarms, place = hits + bool(ordered[place][1]), alarms + (not ordered[place][1]), place + 1
        lower, higher = missed - hits / true, accepted + alarms / false
        if lower <= higher:
            gap, change = missed - accepted, (missed - lower) + (higher - accepted)
            return 100 * (accepted + gap / change * (higher - accepted))
        missed, accepted = lower, higher
    return 100 * accepted


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
