"""What needs no network, on data small enough to count by hand."""

import json
import math
import sys
from pathlib import Path

import pytest

from regard import tasks
from regard.data.datasets import LabelledText, Splits, Tagged
from regard.data.naive_bayes import NaiveBayes
from regard.data.text_files import Pair
from regard.tasks.copying import CopyTask

ROOT = Path(__file__).resolve().parents[1]
_PATH = list(sys.path)
sys.path.insert(0, str(ROOT / "benchmarks"))
import floors  # noqa: E402

sys.path[:] = _PATH  # benchmarks have names that are not theirs alone


def scores(rows):
    return [row["scores"] for row in rows]


def test_the_nearest_text_shares_the_rare_words_and_the_first_wins_a_tie():
    known = [["a", "man"], ["a", "dog", "runs"], ["a", "dog"], ["a", "dog"]]
    assert floors.nearest(known, [["dog"], ["a", "man", "runs"], ["nothing", "known"], [], ["runs", "dog"]]) == [2, 0, 0, 0, 1]


def test_the_nearest_text_is_that_of_the_cosine_written_out():
    letters = "abcdefg"
    known = [[letters[(i * j) % 7] for j in range(1, 2 + i % 5)] for i in range(1, 30)]
    rare = {x: math.log(len(known) / max(1, sum(x in text for text in known))) for x in letters}

    def cosine(a, b):
        dot = sum(a.count(x) * b.count(x) * rare[x] ** 2 for x in letters)
        return dot / math.sqrt(max(1e-12, sum((b.count(x) * rare[x]) ** 2 for x in letters)))

    for asked in known:
        found = known[floors.nearest(known, [asked])[0]]
        assert cosine(asked, found) == pytest.approx(max(cosine(asked, text) for text in known))


def test_a_translation_floor_says_the_source_or_what_was_said_to_the_nearest_one():
    train = [Pair("A dog runs in the snow .", "Ein Hund rennt im Schnee ."), Pair("A man sleeps .", "Ein Mann schläft .")]
    test = [Pair("a DOG runs in snow .", "ein Hund rennt im schnee .")]
    again, near = scores(floors.multi30k(Splits(train, [], test)))
    assert near == {"exact": 100.0, "bleu": pytest.approx(100)}, "case does not count"
    assert again["exact"] == 0 and again["bleu"] < 20


def test_tags_are_those_of_the_word_and_new_words_get_those_of_rare_ones():
    train = [Tagged(["the", "saw", "saw", "the", "saw"], ["DET", "VERB", "VERB", "DET", "NOUN"]), Tagged(["Anna"], ["PROPN"])]
    tag = floors.tagger(train)
    assert [tag(word) for word in ("the", "saw", "Anna", "Berta", "anna")] == ["DET", "VERB", "PROPN", "PROPN", "PROPN"]
    test = [Tagged(["the", "saw", "Berta"], ["DET", "NOUN", "PROPN"])]
    rows = floors.ewt(Splits(train, [], test))
    assert rows[0]["floor"] == "DET for every word"
    assert scores(rows) == [{"accuracy": pytest.approx(100 / 3), "words": 3}, {"accuracy": pytest.approx(200 / 3), "words": 3}]


def test_naive_bayes_counts_a_word_once_a_text_and_knows_how_frequent_a_label_is():
    train = [LabelledText("good good good film", 1), LabelledText("bad film", 0), LabelledText("bad plot", 0)]
    label = NaiveBayes(train)
    assert [label(text) for text in ("a GOOD film", "bad", "good bad", "unheard of", "")] == [1, 0, 0, 0, 0]
    # good: p = 1/3 * (1 + 1) / (2 + 4) against 2/3 * (0 + 1) / (4 + 4); good and bad: 1/3 * 2/6 * 1/6 against 2/3 * 1/8 * 3/8
    rows = floors.imdb(Splits(train, [], [LabelledText("good", 1), LabelledText("plot", 0)]))
    assert scores(rows) == [{"accuracy": 50.0, "texts": 2.0}, {"accuracy": 100.0, "texts": 2.0}]


def test_witten_bell_by_hand_and_its_probabilities_are_one_together():
    likely = floors.WittenBell("abab", 2)
    a = (2 + 2 / 3) / (4 + 2)  # two of four, and two kinds; a new character is a third one
    assert likely("", "a") == pytest.approx(a)
    assert likely("b", "a") == pytest.approx((1 + a) / (1 + 1))
    assert likely("z", "a") == pytest.approx(a), "what was never seen says nothing"
    text = "to be, or not to be: that is the question"
    for order in (1, 2, 5):
        likely = floors.WittenBell(text, order)
        for before in ("", "t", "to b", " to ", "zzzz", "on"):
            assert sum(likely(before, c) for c in {*text, "Z"}) == pytest.approx(1)  # Z stands for all that is new


def test_surprise_begins_with_the_second_character_and_does_not_look_before_its_window():
    train, text = "abcabcabd" * 3, "abcabd"
    likely = floors.WittenBell(train, 3)

    def nats(*pairs):
        return -sum(math.log(likely(before, c)) for before, c in pairs) / len(pairs)

    assert floors.surprise(train, text, 3, 99) == pytest.approx(
        nats(("a", "b"), ("ab", "c"), ("bc", "a"), ("ca", "b"), ("ab", "d"))
    )
    assert floors.surprise(train, text, 3, 1) == pytest.approx(nats(("a", "b"), ("b", "c"), ("c", "a"), ("a", "b"), ("b", "d")))
    assert floors.surprise(train, text, 3, 2) == pytest.approx(nats(("a", "b"), ("ab", "c"), ("c", "a"), ("ca", "b"), ("b", "d")))
    low, high = scores(floors.shakespeare(Splits(train, text, ""), 99))
    assert high["loss"] < low["loss"] and low["bits"] == pytest.approx(low["loss"] / math.log(2))


def papers(folder, **parts):
    for name in ("train", "val", "test"):
        rows = [json.dumps({"abstract": abstract, "title": title}) for abstract, title in parts.get(name, [])]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_the_first_words_of_an_abstract_are_as_many_as_titles_have(tmp_path):
    train = [("We parse. It is fast.", "Fast parse"), ("We tag, and it is good.", "A good tag, or two")]  # 2 and 6 words
    task = CopyTask(tasks.acl_titles_config().replace({"vocab": 16}))
    task.read(papers(tmp_path, train=train, test=[("Zork is good, we say.", "Zork is good"), ("Xyzzy", "A tag")]))
    row = floors.acl_titles(task)[0]
    assert row["floor"].startswith("the first 4 words")
    assert row["scores"] == {"exact": 0.0, "rouge_l": pytest.approx(100 * (6 / 7 + 0) / 2), "oov_recall": 100.0}


def test_queries_are_the_most_frequent_or_those_of_the_nearest_question(tmp_path):
    """Any two texts are a question and a query, so papers will do."""
    train = [("who won", "select winner"), ("who lost", "select loser"), ("did he win", "select winner")]
    task = CopyTask(tasks.acl_titles_config().replace({"vocab": 30}))
    task.read(papers(tmp_path, train=train, test=[("who ever lost", "select loser"), ("who won", "select winner")]))
    most, near = scores(floors.wikisql(task))
    assert most == {"exact": 50.0, "rouge_l": 75.0}, "no word is asked for that only a source has"
    assert near == {"exact": 100.0, "rouge_l": 100.0}


def test_the_floors_of_a_source_are_words_that_the_task_reads(tmp_path):
    task = CopyTask(tasks.acl_titles_config().replace({"vocab": 10, "cut": 5}))
    task.read(papers(tmp_path, train=[("a b c", "a b")], test=[("New words, and many more of them", "a")]))
    assert floors.sources(task, "test") == [["new", "words", ",", "and", "many"]]


def test_the_result_has_floors_for_every_task_that_is_reported():
    made = json.loads((ROOT / "results" / "floors.json").read_text())
    assert {row["task"] for row in made["rows"]} == set(floors.FLOORS)
    assert all(row["split"] == ("val" if row["task"] == "shakespeare" else "test") for row in made["rows"])
