"""Where a data set lies on this machine, and what to do when it does not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from regard.data.text_files import COMPRESSED_SUFFIXES, DataError
from regard.text import unknown


class Known(NamedTuple):
    """A data set that we can read."""

    what: str
    address: str  # where people get it
    files: Sequence[str]  # each as it is, or with .gz, .xz or .bz2 behind it
    note: str = ""  # on what stands inside, where the files are not as they come


KNOWN = {
    "multi30k": Known(
        "Multi30k, captions of images in English and German",
        "https://github.com/multi30k/dataset/tree/master/data/task1/raw",
        [f"{part}.{language}" for part in ("train", "val", "test_2016_flickr") for language in ("en", "de")],
    ),
    "ud_english_ewt": Known(
        "Universal Dependencies English Web Treebank",
        "https://github.com/UniversalDependencies/UD_English-EWT",
        [f"en_ewt-ud-{part}.conllu" for part in ("train", "dev", "test")],
    ),
    "imdb": Known(
        "IMDB reviews (Maas et al. 2011)",
        "https://ai.stanford.edu/~amaas/data/sentiment or https://huggingface.co/datasets/stanfordnlp/imdb",
        ["train.jsonl", "test.jsonl"],
        'A line is a review: {"text": "…", "label": 0 or 1}, where 1 is a good one.',
    ),
    "tinyshakespeare": Known(
        "Tiny Shakespeare",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        ["input.txt"],
    ),
    "acl_titles": Known(
        "abstracts and titles of the ACL Anthology",
        "https://aclanthology.org/anthology+abstracts.bib.gz",
        ["train.jsonl", "val.jsonl", "test.jsonl"],
        'A line is a paper: {"abstract": "…", "title": "…"}.',
    ),
    "wikisql": Known(
        "WikiSQL, as text2sql-data has it",
        "https://github.com/jkkummerfeld/text2sql-data/tree/master/data",
        ["wikisql.json"],
    ),
}


def find(name: str, folder: Path | str | None = None) -> Path:
    """The folder of a data set: `folder`, which is its own or has it as a child, else `$REGARD_DATA/<name>`.

    All of its files are there, or there is a sentence that says what to fetch and where to put it.
    """
    if name not in KNOWN:
        raise DataError(unknown("no data set is called", name, KNOWN))
    known, place = KNOWN[name], folder if folder is not None else os.environ.get("REGARD_DATA") or None
    if place is None:
        raise DataError(f"{_wanted(name)} into a folder {name}, and name the folder above it by REGARD_DATA or --data")
    child = Path(place).expanduser() / name
    places = [child] if folder is None else [Path(place).expanduser(), child]
    for at in places:
        if not _missing(at, known.files):
            return at
    at = max(
        places, key=lambda at: (len(known.files) - len(_missing(at, known.files)), at == child)
    )  # most of it, or where to put it
    have = f"{at} has no {', '.join(_missing(at, known.files))}" if at.is_dir() else f"there is no folder {at}"
    raise DataError(f"{have}. {_wanted(name)} into {at}, or name another place by REGARD_DATA or --data")


def file(folder: Path, name: str) -> Path:
    """The file of this name in a folder, plain or compressed."""
    for ending in COMPRESSED_SUFFIXES:
        if (found := folder / (name + ending)).is_file():
            return found
    raise DataError(f"{folder} has no {name}, nor one with {', '.join(filter(None, COMPRESSED_SUFFIXES))} behind its name")


def _missing(folder: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not any((folder / (name + ending)).is_file() for ending in COMPRESSED_SUFFIXES)]


def _wanted(name: str) -> str:
    known = KNOWN[name]
    note = f" {known.note}" if known.note else ""
    files = ", ".join(known.files)
    return (
        f"{name} is {known.what}, from {known.address}.{note} "
        f"Put {files} (as {'it is' if len(known.files) == 1 else 'they are'}, or with .gz, .xz or .bz2 behind the name)"
    )
