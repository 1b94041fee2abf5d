"""Bracket scores of parsers, by the rules of evalb with the parameters of Collins (COLLINS.prm). Sekine, Collins 1997.

A constituent is a label over a span of words. Before they are compared:

- words whose tag in the reference is punctuation (, : `` '' .) are taken out of both trees, and spans count the words that stay;
- the outermost label (TOP, S1, ROOT) and constituents without a word left are left out; parts of speech are no constituents;
- functions of labels are left out (NP-SBJ is NP), and ADVP and PRT are one label.

What is left are two multisets. Precision and recall are the share of each that is in both, summed over all sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from regard.data.treebank import Constituent, Tree, constituents, plain_label, words_of_tree

PUNCTUATION = frozenset([",", ":", "``", "''", "."])  # tags of words that do not count
OUTERMOST = frozenset(["TOP", "S1", "ROOT"])  # labels of the tree as a whole
EQUAL_LABELS = {"PRT": "ADVP"}


class BracketScore(NamedTuple):
    """Scores of parsed sentences, in percent."""

    f1: float
    precision: float
    recall: float
    complete: float  # sentences whose constituents are all right
    tagged: float  # words that count, with the right part of speech

    @classmethod
    def of(cls, right: int, said: int, true: int, complete: float, tagged: float) -> BracketScore:
        """Score by counts of constituents that are right, of those of the answers and of the references, and by two shares."""
        f1 = 200 * right / max(1, said + true)
        return cls(f1, 100 * right / max(1, said), 100 * right / max(1, true), 100 * complete, 100 * tagged)


def counted(tree: Tree, keep: Sequence[bool]) -> Counter[Constituent]:
    """Count the constituents that are compared; `keep` is true for the words that count."""
    before = [0, *accumulate(keep)]
    found: Counter[Constituent] = Counter()
    for label, start, end in constituents(tree):
        name = plain_label(label)
        if name not in OUTERMOST and before[start] < before[end]:
            found[Constituent(EQUAL_LABELS.get(name, name), before[start], before[end])] += 1
    return found


def bracket_score(answers: Sequence[Tree], references: Sequence[Tree]) -> BracketScore:
    """Score trees against references over the same words."""
    if len(answers) != len(references) or not references:
        raise ValueError(f"a score needs a reference for every tree, and one at least: {len(answers)} and {len(references)}")
    right = said = true = complete = tagged = total = 0
    for number, (answer, reference) in enumerate(zip(answers, references, strict=True), 1):
        ours, theirs = words_of_tree(answer), words_of_tree(reference)
        if [leaf.word for leaf in ours] != [leaf.word for leaf in theirs]:
            raise ValueError(f"tree {number} is not over the words of its reference")
        keep = [leaf.tag not in PUNCTUATION for leaf in theirs]
        found, expected = counted(answer, keep), counted(reference, keep)
        right += (found & expected).total()
        said, true = said + found.total(), true + expected.total()
        complete += found == expected
        tagged += sum(a.tag == b.tag for a, b, kept in zip(ours, theirs, keep, strict=True) if kept)
        total += sum(keep)
    return BracketScore.of(right, said, true, complete / len(answers), tagged / max(1, total))
