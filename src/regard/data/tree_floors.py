"""Trees without a parser: branches to the right under one label. Counted per sentence, so that no tree is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from regard.data.bracket_score import EQUAL_LABELS, OUTERMOST, PUNCTUATION, BracketScore, counted
from regard.data.treebank import Constituent, Tree, constituents, plain_label, words_of_tree

FREQUENT_LABELS = 5  # most frequent labels of train, among which the best one is


class BranchingLabels(NamedTuple):
    """Two labels of a training part."""

    frequent: str  # of most constituents
    best: str  # with the highest F1 on train, of the most frequent ones


def branching_labels(train: Sequence[Tree]) -> BranchingLabels:
    """Choose labels for trees that branch to the right; of equal ones, the more frequent one, then the first."""
    counts = Counter(plain_label(x.label) for tree in train for x in constituents(tree) if x.label not in OUTERMOST)
    frequent = [label for label, _ in counts.most_common(FREQUENT_LABELS)] or ["X"]  # which no tree has
    scores = branching_scores(train, frequent)
    return BranchingLabels(frequent[0], max(frequent, key=lambda label: scores[label].f1))


def branching_scores(trees: Sequence[Tree], labels: Iterable[str]) -> Mapping[str, BracketScore]:
    """Score `right_branching` by each of the labels, as `bracket_score` does; words have their true tags."""
    names = {label: EQUAL_LABELS.get(label, label) for label in labels}
    right, complete, said, true = Counter[str](), Counter[str](), 0, 0
    for tree in trees:
        keep = [leaf.tag not in PUNCTUATION for leaf in words_of_tree(tree)]
        expected, spans = counted(tree, keep), _branches(keep)
        said, true = said + spans.total(), true + expected.total()
        for label, name in names.items():
            common = sum(min(count, expected[Constituent(name, *span)]) for span, count in spans.items())
            right[label] += common
            complete[label] += common == spans.total() == expected.total()
    return {label: BracketScore.of(right[label], said, true, complete[label] / max(1, len(trees)), 1.0) for label in names}


def _branches(keep: Sequence[bool]) -> Counter[tuple[int, int]]:
    """Count the spans of a tree that branches to the right, over the words that count."""
    end, start, found = sum(keep), 0, Counter[tuple[int, int]]()
    for kept in keep[: max(1, len(keep) - 1)]:
        if start < end:
            found[start, end] += 1
        start += kept
    return found
