"""Tasks without data: right by definition, the same for the same seed, with nothing in two splits, and not to be had cheaply."""

import random
import re
from collections import Counter, defaultdict
from itertools import product

import pytest

from regard.data.datasets import UPOS, Tagged
from regard.data.synthetic import number_words_pairs, opinion_sentences, string_pairs, tagging_floor, tagging_sentences

SMALL = {"train": 300, "val": 50, "test": 40}
TASKS = {"numbers": number_words_pairs, "tagging": tagging_sentences, "copying": string_pairs, "sentiment": opinion_sentences}
each = pytest.mark.parametrize("name", TASKS)


def key(example):
    return repr(example[0])


@each
def test_the_seed_decides_and_nothing_else(name):
    made = TASKS[name](**SMALL, seed=3)
    random.seed(17)
    state = random.getstate()
    assert TASKS[name](**SMALL, seed=3) == made
    assert random.getstate() == state
    assert TASKS[name](**SMALL, seed=4) != made


@each
def test_splits_are_as_large_as_asked_for_and_share_nothing(name):
    made = TASKS[name](**SMALL)
    assert [len(part) for part in made] == [300, 50, 40]
    assert len({key(example) for part in made for example in part}) == 390


@each
def test_a_split_may_be_empty_but_not_less(name):
    assert [len(part) for part in TASKS[name](train=3, val=0, test=0)] == [3, 0, 0]
    with pytest.raises(ValueError, match="a split cannot have -1 examples"):
        TASKS[name](train=3, val=-1, test=0)


def test_numbers_are_said_in_both_languages():
    everything = number_words_pairs("en", "de", most=25, train=20, val=3, test=2)
    said = dict(pair for part in everything for pair in part)
    assert len(said) == 25 and said["twenty-one"] == "einundzwanzig" and said["zero"] == "null"
    assert (
        dict(pair for part in number_words_pairs("en", "fr", most=25, train=25, val=0, test=0) for pair in part)["sixteen"]
        == "seize"
    )
    lengths = [len(pair.target) for pair in number_words_pairs(**SMALL).train]
    assert min(lengths) < 10 and max(lengths) > 50


def test_numbers_that_are_too_many_or_in_no_known_language_are_refused():
    with pytest.raises(ValueError, match=r"26 different numbers below 25 were requested, but only 25 could"):
        number_words_pairs(most=25, train=20, val=3, test=3)
    with pytest.raises(ValueError, match="no number words in 'klingon'"):
        number_words_pairs(target="klingon")
    with pytest.raises(ValueError, match="most must be at least 1, not 0"):
        number_words_pairs(most=0)


def test_tags_cannot_be_told_from_words_alone():
    made = tagging_sentences()
    assert 0.7 < tagging_floor(made.train, made.test) < 0.9
    tags = defaultdict(set)
    for words, its, _ in made.train:
        for word, tag in zip(words, its, strict=True):
            tags[word].add(tag)
    assert tags["can"] == tags["will"] == {"NOUN", "VERB", "AUX"}
    assert tags["saw"] == tags["fish"] == tags["watches"] == {"NOUN", "VERB"}
    assert tags["to"] == {"PART", "ADP"} and tags["clean"] == {"VERB", "ADJ"}
    assert set().union(*tags.values()) <= set(UPOS)


def test_every_sentence_has_one_reading_in_its_grammar():
    """All tags that its words can have are tried against the grammar, written here once more, as a regular expression."""
    thing = "(PRON |DET (ADJ )*NOUN )"
    rest = f"{thing}?(PART VERB {thing}?)?(ADP {thing})?"
    clause = f"{thing}(AUX )?(ADV )?VERB {rest}"
    grammar = {
        ".": re.compile(f"({clause}(CCONJ {clause})?|VERB {rest})PUNCT "),
        "?": re.compile(f"AUX {thing}VERB {rest}PUNCT "),
    }
    made = [example for part in tagging_sentences(train=1000, val=0, test=0) for example in part]
    tags = defaultdict(set)
    for words, its, _ in [example for part in tagging_sentences() for example in part]:
        for word, tag in zip(words, its, strict=True):
            tags[word].add(tag)
    for words, its, _ in made:
        ways = ("".join(f"{tag} " for tag in way) for way in product(*(sorted(tags[word]) for word in words)))
        assert [way.split() for way in ways if grammar[words[-1]].fullmatch(way)] == [its], words


def test_the_floor_is_the_most_frequent_tag_of_a_word_and_of_all_for_a_new_one():
    train = [Tagged(["a", "b", "a", "a"], ["X", "Y", "X", "Y"]), Tagged(["c"], ["Y"])]
    assert tagging_floor(train, [Tagged(["a", "a", "b", "new"], ["X", "Y", "Y", "Y"])]) == 3 / 4
    with pytest.raises(ValueError, match="no word"):
        tagging_floor([], train)
    with pytest.raises(ValueError, match="no word"):
        tagging_floor(train, [])


@pytest.mark.parametrize(("kind", "change"), [("copy", list), ("reverse", lambda x: x[::-1]), ("sort", sorted)])
def test_strings_are_copied_reversed_or_sorted(kind, change):
    for source, target in string_pairs(kind, letters="abc", shortest=2, longest=9, **SMALL).train:
        assert target.split() == change(source.split()) and 2 <= len(source.split()) <= 9 and set(source) <= set("abc ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "revers"}, "'revers': did you mean 'reverse'"),
        ({"letters": ""}, "letters must be different"),
        ({"letters": "aa"}, "letters must be different"),
        ({"letters": "a b"}, "other than spaces"),
        ({"shortest": 0}, "1 <= shortest <= longest"),
        ({"shortest": 3, "longest": 2}, "1 <= shortest <= longest"),
        ({"letters": "ab", "longest": 3, "train": 15, "val": 0, "test": 0}, "15 different strings of 1 to 3 of 2 letters"),
    ],
)
def test_strings_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        string_pairs(**options)


def test_an_opinion_turns_around_with_every_denial():
    denials = re.compile(r"\b(not|never|hardly|nobody)\b")
    good = "good great charming moving clever brilliant funny wonderful honest lovely"
    for text, label in opinion_sentences(**SMALL).train:
        assert label == ((text.split()[-1] in good.split()) + len(denials.findall(text))) % 2, text


def test_no_word_and_no_number_of_words_tells_the_label():
    made = opinion_sentences(train=20_000, val=0, test=0).train
    assert abs(sum(label for _, label in made) / len(made) - 0.5) < 0.02
    counts = defaultdict(Counter)
    for text, label in made:
        for word in set(text.split()):
            counts[word][label] += 1
        counts[text.count("not")][label] += 1
    for word, seen in counts.items():
        if seen.total() > 500:
            assert 0.4 < seen[1] / seen.total() < 0.6, word
