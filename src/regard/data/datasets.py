"""Readers of data sets: from the folder that `find` returns to lists of examples."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from regard.data.locate import file
from regard.data.text_files import DataError, Pair, placed_records, read_lines, read_parallel, read_records, read_text
from regard.text import unknown

SplitPart = TypeVar("SplitPart")

UPOS_COLUMN = 4  # of the ten of CoNLL-U, counted from 1
UPOS = tuple(
    [
        "ADJ",
        "ADP",
        "ADV",
        "AUX",
        "CCONJ",
        "DET",
        "INTJ",
        "NOUN",
        "NUM",
        "PART",
        "PRON",
        "PROPN",
        "PUNCT",
        "SCONJ",
        "SYM",
        "VERB",
        "X",
    ]
)
HELD_OUT = 2500  # IMDB reviews for validation
HELD_OUT_SEED = b"1"


class Splits(NamedTuple, Generic[SplitPart]):
    """Hold the train, validation and test parts of a data set."""

    train: SplitPart
    val: SplitPart
    test: SplitPart


class Tagged(NamedTuple):
    """Hold a sentence with a tag for every word, and a finer tag where the data has one."""

    words: list[str]
    tags: list[str]
    fine: list[str] = []  # noqa: RUF012 - never changed


class LabelledText(NamedTuple):
    """Hold a text with one label."""

    text: str
    label: int | str


def read_multi30k(folder: Path) -> Splits[list[Pair]]:
    """Read English and German captions: 29,000 / 1,014 / 1,000 (Elliott et al. 2016, arXiv:1605.00459). Warns of empty lines."""
    parts = ("train", "val", "test_2016_flickr")
    return Splits(*(_captions(file(folder, f"{part}.en"), file(folder, f"{part}.de")) for part in parts))


def _captions(source: Path, target: Path) -> list[Pair]:
    pairs, dropped = read_parallel(source, target)
    if dropped:
        warnings.warn(f"{dropped:,} lines that are empty both in {source} and in {target} are left out", stacklevel=4)
    return pairs


def read_ewt(folder: Path) -> Splits[list[Tagged]]:
    """Read English sentences with universal parts of speech: 12,544 / 2,001 / 2,077 in UD 2.16 (Silveira et al. 2014)."""
    return Splits(*(conllu(file(folder, f"en_ewt-ud-{part}.conllu")) for part in ("train", "dev", "test")))


def conllu(path: Path, tag_set: Sequence[str] = UPOS, column: int = UPOS_COLUMN) -> list[Tagged]:
    """Read words and UPOS tags from a CoNLL-U file, or the tags of another `column`, counted from 1.

    The finer tags are the others of UPOS, XPOS and FEATS. Multiword ranges (1-2) and empty nodes (1.1) are skipped. With an empty
    `tag_set` every tag but none (_) is accepted.
    """
    finer = [place for place in (3, 4, 5) if place != column - 1]
    found: list[Tagged] = []
    words: list[str] = []
    tags: list[str] = []
    fine: list[str] = []
    for number, line in enumerate(read_lines(path), 1):
        if not line:
            if words:
                found.append(Tagged(words, tags, fine))
                words, tags, fine = [], [], []
            continue
        if line[0] == "#":
            continue
        where = f"{path}, line {number}"
        columns = line.split("\t")
        if len(columns) != 10:
            raise DataError(f"{where}: {len(columns)} columns instead of the 10 of CoNLL-U, with a tab between them")
        index, word, tag = columns[0], columns[1], columns[column - 1]
        if "-" in index or "." in index:
            continue
        if index != str(len(words) + 1):
            raise DataError(f"{where}: word {index!r} of a sentence is where word {len(words) + 1} should be")
        if tag_set and tag not in tag_set:
            raise DataError(unknown(f"{where}: no universal part of speech is called", tag, tag_set))
        if tag in ("", "_"):
            which = "the fourth column (UPOS)" if column == UPOS_COLUMN else f"column {column}"
            raise DataError(f"{where}: the word {word!r} has no tag, which is {which}")
        if not word:
            raise DataError(f"{where}: the word is empty")
        words.append(word)
        tags.append(tag)
        fine.append(" ".join(columns[place] for place in finer))
    if words:
        found.append(Tagged(words, tags, fine))
    return found


def read_imdb(folder: Path) -> Splits[list[LabelledText]]:
    """Read film reviews, label 1 for a positive one: 22,500 / 2,500 / 25,000 (Maas et al. 2011).

    There is no official validation split. It is held out of train here: for each label the 1,250 reviews whose text has the
    smallest hash with a fixed seed. It does not depend on the order of the file, and copies of a review stay on one side.
    """
    train, test = (_reviews(file(folder, f"{part}.jsonl")) for part in ("train", "test"))
    held_out = _held_out(train, folder)
    kept = [review for review in train if review.text not in held_out]
    validation = [review for review in train if review.text in held_out]
    return Splits(kept, validation, test)


def _held_out(train: list[LabelledText], folder: Path) -> set[str]:
    """Select HELD_OUT reviews by hash, half of each label; texts with both labels are never selected."""
    copies = Counter(train)
    selected: set[str] = set()
    for label in (0, 1):
        texts = [text for text, its in copies if its == label and not copies[LabelledText(text, 1 - label)]]
        room = HELD_OUT // 2
        for text in sorted(texts, key=_seeded_hash):
            count = copies[LabelledText(text, label)]
            if count <= room:
                selected.add(text)
                room -= count
        if room or selected.issuperset(texts):
            have = f"{len(texts):,} reviews with label {label}"
            raise DataError(f"{folder}: train has {have}; {HELD_OUT // 2:,} are for validation alone")
    return selected


def _seeded_hash(text: str) -> bytes:
    return hashlib.sha256(HELD_OUT_SEED + text.encode()).digest()


def _reviews(path: Path) -> list[LabelledText]:
    found = []
    for where, record in placed_records(path, {"text": str, "label": int}):
        if record["label"] not in (0, 1):
            raise DataError(f"{where}: the label must be 0 or 1, not {record['label']}")
        found.append(LabelledText(record["text"], record["label"]))
    return found


def read_shakespeare(folder: Path) -> Splits[str]:
    """Read one text of 1,115,394 characters: the first 90 % for training, the rest for validation; no test part ("")."""
    whole = read_text(file(folder, "input.txt"))
    cut = int(0.9 * len(whole))
    return Splits(whole[:cut], whole[cut:], "")


def read_acl_titles(folder: Path) -> Splits[list[Pair]]:
    """Read abstracts of papers and their titles, most words of which occur in the abstract: 24,000 / 1,500 / 1,500."""
    return Splits(*(_papers(file(folder, f"{part}.jsonl")) for part in ("train", "val", "test")))


def _papers(path: Path) -> list[Pair]:
    return [Pair(record["abstract"], record["title"]) for record in read_records(path, {"abstract": str, "title": str})]
