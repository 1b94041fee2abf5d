"""What needs no network: the floor that every trained model is reported with. python benchmarks/floors.py

The splits and scores are those of `regard evaluate`. A floor learns from train alone, and nothing of it was chosen on test.
Needs REGARD_DATA. Writes results/floors.json; about a minute on one core.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from common import Progress, only_words, save
from regard import scores, tasks
from regard.data import datasets
from regard.data.datasets import LabelledText, Splits, Tagged
from regard.data.extended_vocab import extended_words
from regard.data.locate import find
from regard.data.naive_bayes import NaiveBayes
from regard.data.text_files import Pair
from regard.data.tree_floors import branching_labels, branching_scores
from regard.data.treebank import Tree, read_gum
from regard.data.wikisql import split_words
from regard.tasks.copying import CopyTask, oov_recall
from regard.tasks.go_task import GoTask

ORDER = 5  # characters of an n-gram, the predicted one counted

Row = dict[str, Any]
T = TypeVar("T")


def row(task: str, floor: str, found: dict[str, float], split: str = "test") -> Row:
    return {"task": task, "split": split, "floor": floor, "scores": found}


def commonest(things: Iterable[T]) -> T:
    """The most frequent one; of several, the one that came first."""
    return Counter(things).most_common(1)[0][0]


def nearest(known: Sequence[Sequence[str]], asked: Sequence[Sequence[str]]) -> list[int]:
    """For each asked text the known one with the largest cosine; of several, the first.

    A word weighs its count * log(known texts / those with it), tf-idf. Every word has a list of the known texts it is in, so that
    only the words of what is asked are looked at.
    """
    lists: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place, text in enumerate(known):
        for word, count in Counter(text).items():
            lists[word].append((place, count))
    rare = {word: math.log(len(known) / len(there)) for word, there in lists.items()}
    columns = {word: np.array(there).T for word, there in lists.items()}
    lengths = np.zeros(len(known))
    for word, (places, counts) in columns.items():
        lengths[places] += (counts * rare[word]) ** 2
    lengths = np.sqrt(np.maximum(lengths, 1e-12))
    found = []
    for text in asked:
        near = np.zeros(len(known))
        for word, count in Counter(text).items():
            if word in columns:
                places, counts = columns[word]
                near[places] += count * rare[word] ** 2 * counts
        found.append(int((near / lengths).argmax()))
    return found


def multi30k(parts: Splits[list[Pair]]) -> list[Row]:
    wanted = [pair.target for pair in parts.test]
    places = nearest([split_words(pair.source) for pair in parts.train], [split_words(pair.source) for pair in parts.test])
    floors = {
        "the English source, said again": [pair.source for pair in parts.test],
        "the German of the nearest English in train (tf-idf cosine)": [parts.train[place].target for place in places],
    }
    return [row("multi30k", name, translated(said, wanted)) for name, said in floors.items()]


def translated(said: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    return {"exact": scores.exact_match(said, wanted, lower=True), "bleu": scores.bleu(said, wanted, lower=True).value}


def tagger(train: Sequence[Tagged]) -> Callable[[str], str]:
    """The most frequent tag of a word as it is written; of a new one, the most frequent tag of words that train has once."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for sentence in train:
        for word, tag in zip(sentence.words, sentence.tags, strict=True):
            seen[word][tag] += 1
    best = {word: tags.most_common(1)[0][0] for word, tags in seen.items()}
    once = [best[word] for word, tags in seen.items() if tags.total() == 1]
    new = commonest(once or best.values())
    return lambda word: best.get(word, new)


def ewt(parts: Splits[list[Tagged]]) -> list[Row]:
    """All words of the split count, as in the task."""
    tag_of, most = tagger(parts.train), commonest(tag for x in parts.train for tag in x.tags)
    wanted = [tag for x in parts.test for tag in x.tags]
    floors = {
        f"{most} for every word": [most] * len(wanted),
        "each word's most frequent tag": [tag_of(word) for x in parts.test for word in x.words],
    }
    return [
        row("ewt", name, {"accuracy": scores.accuracy(said, wanted), "words": float(len(wanted))})
        for name, said in floors.items()
    ]


def imdb(parts: Splits[list[LabelledText]]) -> list[Row]:
    label_of, most = NaiveBayes(parts.train), commonest(x.label for x in parts.train)
    wanted = [x.label for x in parts.test]
    floors = {
        "one label for all": [most] * len(wanted),
        "naive Bayes of the words in it": [label_of(x.text) for x in parts.test],
    }
    return [
        row("imdb", name, {"accuracy": scores.accuracy(said, wanted), "texts": float(len(wanted))})
        for name, said in floors.items()
    ]


class WittenBell:
    """p(c | h) = (count(h c) + kinds(h) p(c | h')) / (count(h) + kinds(h)), where h' is h without its first character and
    kinds(h) counts the characters that are seen behind h. Below the unigram all characters, and one for what is new, are alike.
    Witten, Bell 1991.
    """

    def __init__(self, text: str, order: int) -> None:
        self.grams = [Counter(text[i : i + n] for i in range(len(text) - n + 1)) for n in range(1, order + 1)]
        self.totals: list[Counter[str]] = [Counter() for _ in self.grams]
        self.kinds = [Counter(gram[:-1] for gram in grams) for grams in self.grams]
        for grams, totals in zip(self.grams, self.totals, strict=True):
            for gram, count in grams.items():
                totals[gram[:-1]] += count
        self.lowest = 1 / (len(self.grams[0]) + 1)

    def __call__(self, before: str, character: str) -> float:
        p = self.lowest
        for n, (grams, totals, kinds) in enumerate(zip(self.grams, self.totals, self.kinds, strict=True)):
            context = before[len(before) - n :]
            if len(before) < n or context not in kinds:
                break
            p = (grams[context + character] + kinds[context] * p) / (totals[context] + kinds[context])
        return p


def surprise(train: str, text: str, order: int, window: int) -> float:
    """Nats a character, from the second on. Nothing is known of what stands before a window, as for the model."""
    likely, total = WittenBell(train, order), 0.0
    for i in range(1, len(text)):
        known = min(order - 1, (i - 1) % window + 1)
        total -= math.log(likely(text[i - known : i], text[i]))
    return total / (len(text) - 1)


def shakespeare(parts: Splits[str], window: int) -> list[Row]:
    floors = {"characters alone (unigram)": 1, f"n-grams of 1 to {ORDER} characters (Witten-Bell)": ORDER}
    rows = []
    for name, order in floors.items():
        nats = surprise(parts.train, parts.val, order, window)
        rows.append(row("shakespeare", name, {"loss": nats, "bits": nats / math.log(2)}, "val"))
    return rows


def copied(task: CopyTask, said: Sequence[Sequence[str]]) -> dict[str, float]:
    """The scores that the task gives to what is said to its test examples, but for the loss: a floor has no probabilities."""
    wanted = task.wanted["test"]
    texts = [" ".join(answer) for answer in said], [" ".join(target) for target in wanted]
    found = {"exact": scores.exact_match(*texts), "rouge_l": scores.rouge_l(*texts)}
    if (share := oov_recall([example.oov for example in task.splits["test"]], said, wanted)) is not None:
        found["oov_recall"] = share
    return found


def sources(task: CopyTask, split: str) -> list[list[str]]:
    """What the model reads: words of a text, up to where it is cut."""
    assert task.vocabulary is not None
    return [extended_words(example.source, task.vocabulary, example.oov) for example in task.splits[split]]


def acl_titles(task: CopyTask) -> list[Row]:
    lengths = [len(title) for title in task.wanted["train"]]
    k = round(sum(lengths) / len(lengths))
    name = f"the first {k} words of the abstract, as many as titles of train have on average"
    return [row("acl_titles", name, copied(task, [source[:k] for source in sources(task, "test")]))]


def wikisql(task: CopyTask) -> list[Row]:
    train, asked = task.wanted["train"], sources(task, "test")
    most = commonest(map(tuple, train))
    floors = {
        "the most frequent query of train": [list(most)] * len(asked),
        "the query of the nearest question in train (tf-idf cosine)": [train[i] for i in nearest(sources(task, "train"), asked)],
    }
    return [row("wikisql", name, copied(task, said)) for name, said in floors.items()]


def gum(parts: Splits[list[Tree]]) -> list[Row]:
    """Trees that branch to the right, with the true tags: by the most frequent label, and by the best one on train."""
    labels = branching_labels(parts.train)
    floors = {f"right branching, {labels.frequent} everywhere (the most frequent label)": labels.frequent}
    if labels.best != labels.frequent:
        floors[f"right branching, {labels.best} everywhere (the best label on train)"] = labels.best
    found = branching_scores(parts.test, floors.values())
    lines = {name: {**found[label]._asdict(), "sentences": float(len(parts.test))} for name, label in floors.items()}
    for line in lines.values():
        del line["tagged"]  # tags are given
    return [row("gum", name, line) for name, line in lines.items()]


def go(task: GoTask) -> list[Row]:
    """Moves drawn among the allowed ones, and the allowed point whose offset from the last move is the most frequent in train."""
    found, positions = task.floors("test"), float(len(task.splits["test"]))
    names = {"drawn among the allowed points": "floor_drawn", "the most frequent offset from the last move (train)": "floor"}
    return [
        row("go", name, {"top1": found[key], "top5": found[f"{key}_top5"], "positions": positions}) for name, key in names.items()
    ]


def ready(name: str) -> Any:
    """A task with its settings as they are, and its data."""
    task = tasks.make_task(tasks.config(name))
    task.read()
    return task


FLOORS: dict[str, Callable[[], list[Row]]] = {
    "multi30k": lambda: multi30k(datasets.read_multi30k(find("multi30k"))),
    "ewt": lambda: ewt(datasets.read_ewt(find("ud_english_ewt"))),
    "imdb": lambda: imdb(datasets.read_imdb(find("imdb"))),
    "shakespeare": lambda: shakespeare(datasets.read_shakespeare(find("tinyshakespeare")), tasks.shakespeare_config().window),
    "acl_titles": lambda: acl_titles(ready("acl_titles")),
    "wikisql": lambda: wikisql(ready("wikisql")),
    "gum": lambda: gum(read_gum(find("gum"))),
    "go": lambda: go(ready("go")),
}


def main() -> None:
    only_words(__doc__)
    rows, shown = list[Row](), Progress(len(FLOORS))
    for name, made in FLOORS.items():
        rows += made()
        shown.step(name)
    print(f"{len(rows)} floors are in {save('floors', {'order': ORDER}, rows)}; the tables: make tables")


if __name__ == "__main__":
    main()
