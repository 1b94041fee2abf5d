"""Data sets as lists of examples. Each reader takes the folder that `find` gives."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from regard.data.locate import file
from regard.data.text_files import DataError, Pair, placed_records, read_lines, read_parallel, read_records, read_text
from regard.text import unknown

SplitPart = TypeVar("SplitPart")

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
HELD_OUT = 2500  # reviews of imdb, for validation
DRAW = b"1"  # the seed of that draw


class Splits(NamedTuple, Generic[SplitPart]):
    """To learn from, to choose by, and to look at once."""

    train: SplitPart
    val: SplitPart
    test: SplitPart


class Tagged(NamedTuple):
    """A tag for every word, and a finer one where there are such."""

    words: list[str]
    tags: list[str]
    fine: list[str] = []  # noqa: RUF012 - never changed


class LabelledText(NamedTuple):
    """One label for all of it."""

    text: str
    label: int | str


def read_multi30k(folder: Path) -> Splits[list[Pair]]:
    """Captions in English and German: 29,000 / 1,014 / 1,000 (Elliott et al. 2016, arXiv:1605.00459). Warns of empty lines."""
    return Splits(
        *(_captions(file(folder, f"{part}.en"), file(folder, f"{part}.de")) for part in ("train", "val", "test_2016_flickr"))
    )


def _captions(source: Path, target: Path) -> list[Pair]:
    pairs, dropped = read_parallel(source, target)
    if dropped:
        warnings.warn(f"{dropped:,} lines that are empty both in {source} and in {target} are left out", stacklevel=4)
    return pairs


def read_ewt(folder: Path) -> Splits[list[Tagged]]:
    """Sentences of English with universal parts of speech: 12,544 / 2,001 / 2,077 in UD 2.16 (Silveira et al. 2014)."""
    return Splits(*(conllu(file(folder, f"en_ewt-ud-{part}.conllu")) for part in ("train", "dev", "test")))


def conllu(path: Path) -> list[Tagged]:
    """Words and their UPOS tags of a CoNLL-U file; the finer tags are XPOS and FEATS.

    Ranges (1-2) and empty nodes (1.1) are no words of their own: not taken.
    """
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
        where, columns = f"{path}, line {number}", line.split("\t")
        if len(columns) != 10:
            raise DataError(f"{where}: {len(columns)} columns instead of the 10 of CoNLL-U, with a tab between them")
        index, word, tag = columns[0], columns[1], columns[3]
        if "-" in index or "." in index:
            continue
        if index != str(len(words) + 1):
            raise DataError(f"{where}: word {index!r} of a sentence stands where word {len(words) + 1} should")
        if tag not in UPOS:
            raise DataError(unknown(f"{where}: no universal part of speech is called", tag, UPOS))
        if not word:
            raise DataError(f"{where}: the word is empty")
        words.append(word)
        tags.append(tag)
        fine.append(f"{columns[4]} {columns[5]}")
    if words:
        found.append(Tagged(words, tags, fine))
    return found


def read_imdb(folder: Path) -> Splits[list[LabelledText]]:
    """Reviews of films, 1 for a good one: 22,500 / 2,500 / 25,000 (Maas et al. 2011).

    There is no official validation split. Ours is held out of train: of each label those 1,250 whose text has the smallest
    hash with a fixed seed. So it does not depend on the order of the file, and the same review is never on both sides.
    """
    train, test = (_reviews(file(folder, f"{part}.jsonl")) for part in ("train", "test"))
    copies = Counter(train)
    held: set[str] = set()
    for label in (0, 1):
        texts = [said for said, its in copies if its == label and not copies[LabelledText(said, 1 - label)]]
        room = HELD_OUT // 2
        for said in sorted(texts, key=lambda said: hashlib.sha256(DRAW + said.encode()).digest()):
            if copies[LabelledText(said, label)] <= room:
                held.add(said)
                room -= copies[LabelledText(said, label)]
        if room or held.issuperset(texts):
            raise DataError(
                f"{folder}: train has {len(texts):,} reviews with label {label}; {HELD_OUT // 2:,} are for validation alone"
            )
    return Splits([r for r in train if r.text not in held], [r for r in train if r.text in held], test)


def _reviews(path: Path) -> list[LabelledText]:
    found = []
    for where, record in placed_records(path, {"text": str, "label": int}):
        if record["label"] not in (0, 1):
            raise DataError(f"{where}: the label must be 0 or 1, not {record['label']}")
        found.append(LabelledText(record["text"], record["label"]))
    return found


def read_shakespeare(folder: Path) -> Splits[str]:
    """All of it as one text, 1,115,394 characters: the first 90 % to learn from, the rest to validate; no test part ("")."""
    whole = read_text(file(folder, "input.txt"))
    cut = int(0.9 * len(whole))
    return Splits(whole[:cut], whole[cut:], "")


def read_acl_titles(folder: Path) -> Splits[list[Pair]]:
    """Abstracts of papers and their titles, most words of which stand in the abstract: 24,000 / 1,500 / 1,500."""
    return Splits(*(_papers(file(folder, f"{part}.jsonl")) for part in ("train", "val", "test")))


def _papers(path: Path) -> list[Pair]:
    return [Pair(record["abstract"], record["title"]) for record in read_records(path, {"abstract": str, "title": str})]
