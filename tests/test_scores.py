"""Scores of texts: those of others as others compute them, our own as slowly as they are defined."""

import sys
from functools import cache

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from regard.scores import accuracy, bleu, chrf, exact_match, lcs, rouge_l

SAID = ["the cat sat on the mat .", "A dog!", "", "it is  raining again today"]
WANTED = ["The cat sat on a mat.", "A dog!", "something", "it is raining again today"]

words = st.lists(st.sampled_from("abcd"), max_size=9)
both = [bleu, chrf, rouge_l, exact_match, accuracy]


def test_bleu_is_sacrebleus_and_says_how_it_was_computed():
    for lower in (False, True):
        score = bleu(SAID, WANTED, lower=lower)
        assert score.value == sacrebleu.corpus_bleu(SAID, [WANTED], lowercase=lower).score > 0
        assert f"case:{'lc' if lower else 'mixed'}" in score.signature and "tok:13a" in score.signature
        assert f"version:{sacrebleu.__version__}" in score.signature
    assert "tok:char" in bleu(SAID, WANTED, tokenize="char").signature


def test_chrf_is_sacrebleus():
    assert chrf(SAID, WANTED).value == sacrebleu.corpus_chrf(SAID, [WANTED]).score > 0
    plus = chrf(SAID, WANTED, lower=True, words=2)
    assert plus.value == sacrebleu.corpus_chrf([s.lower() for s in SAID], [[w.lower() for w in WANTED]], word_order=2).score
    assert "nw:2" in plus.signature and "case:lc" in plus.signature


def slow_lcs(a, b):
    @cache
    def longest(i, j):
        if i == len(a) or j == len(b):
            return 0
        return 1 + longest(i + 1, j + 1) if a[i] == b[j] else max(longest(i + 1, j), longest(i, j + 1))

    return longest(0, 0)


@given(words, words)
def test_the_longest_common_subsequence_is_that_of_its_definition(a, b):
    assert lcs(a, b) == lcs(b, a) == slow_lcs(a, b)


def test_a_long_one_is_found_as_well():
    a, b = [str(i % 37) for i in range(400)], [str(i * i % 41) for i in range(300)]
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    assert lcs(a, b) == table[-1][-1]


@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_rouge_l_is_the_mean_of_f1(pairs):
    f1 = []
    for a, b in pairs:
        common = slow_lcs(a, b)
        precision, recall = common / len(a) if a else float(not b), common / len(b) if b else float(not a)
        f1.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    found = rouge_l([" ".join(a) for a, _ in pairs], [" ".join(b) for _, b in pairs])
    assert found == pytest.approx(100 * sum(f1) / len(f1))


def test_case_counts_unless_it_is_lowered():
    assert rouge_l(["The cat"], ["the cat"]) == 50 and rouge_l(["The cat"], ["the cat"], lower=True) == 100
    assert exact_match(["The cat"], ["the cat"]) == 0 and exact_match(["The cat"], ["the cat"], lower=True) == 100


def test_exact_match_counts_texts_with_the_same_words():
    assert exact_match(SAID, WANTED) == 50


def test_accuracy_counts_labels_of_any_kind():
    assert accuracy([1, 2, 3, 4], [1, 2, 0, 4]) == 75
    assert accuracy(["a", None], ["a", "b"]) == 50


@pytest.mark.parametrize("score", both)
def test_answers_that_are_empty_are_only_bad(score):
    found = score(["", ""], ["a b c d", "a"])
    assert getattr(found, "value", found) == 0


@pytest.mark.parametrize("score", both)
def test_unequal_numbers_and_nothing_at_all_are_refused_in_a_sentence(score):
    with pytest.raises(ValueError, match="a reference for every answer: there are 1 and 2"):
        score(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="no references"):
        score([], [])
    with pytest.raises(TypeError, match="put each into a list"):
        score("a", "a")


def test_an_unknown_tokenizer_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean '13a'"):
        bleu(SAID, WANTED, tokenize="13b")


@pytest.mark.parametrize("score", both[:2])
def test_a_missing_library_is_asked_for(score, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'regard\[train\]'"):
        score(SAID, WANTED)
