"""Convert data sets as they are downloaded to the files that their readers read: a table of them, and two of texts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.bibtex import bib_entries
from regard.data.prepared_files import PreparedFile, json_lines
from regard.data.source_files import source_files, utf8_text
from regard.data.text_files import DataError

REVIEW = re.compile(r"(?:^|/)(train|test)/(neg|pos)/(\d+)_(\d+)\.txt$")
TITLE_WORDS, ABSTRACT_WORDS = range(3, 31), range(25, 451)  # of papers that are taken
TRAIN_PAPERS, HELD_PAPERS, PAPERS_PER_HELD = 24_000, 1500, 18  # at most; one paper in so many is held out for val, and for test


class Download(NamedTuple):
    """Describe what is downloaded, and how it is converted."""

    what: str
    convert: str  # to files by their names; "module:function", imported where it is called
    folder: str  # where its files are, in the folder of all data sets
    tasks: tuple[str, ...]  # that read it

    def files(self, source: Path) -> Mapping[str, PreparedFile]:
        """Read what was downloaded, and return the files to write."""
        module, _, name = self.convert.partition(":")
        convert: Callable[[Path], Mapping[str, PreparedFile]] = getattr(import_module(module), name)
        return convert(source)


def imdb_lines(source: Path) -> dict[str, PreparedFile]:
    """Read the reviews of aclImdb, a folder or a .tar.gz file: `train/pos/0_9.txt` is a good one with 9 of 10 points.

    Reviews without a label (`train/unsup`) are left out. The order is neg, pos, each by number.
    """
    found: dict[str, list[tuple[int, int, int, str]]] = {"train": [], "test": []}
    for name, raw in source_files(source, REVIEW):
        if (parts := REVIEW.search(name)) is not None:
            text = utf8_text(raw, f"{source}, {name}")
            found[parts[1]].append((int(parts[2] == "pos"), int(parts[3]), int(parts[4]), text))
    for part, reviews in found.items():
        if not reviews:
            raise DataError(f"{source} has no reviews of {part}: files such as {part}/pos/0_9.txt are needed")
    return {
        f"{part}.jsonl": json_lines(
            [
                {"id": f"{'pos' if label else 'neg'}/{number}", "rating": rating, "label": label, "text": text}
                for label, number, rating, text in sorted(reviews)
            ]
        )
        for part, reviews in found.items()
    }


def acl_lines(source: Path) -> dict[str, PreparedFile]:
    """Read the papers of a BibTeX file with abstracts, and split them by a hash of each title.

    Papers whose title or abstract is missing, very short or very long are left out; of papers with the same title the first is
    taken. Val and test have 1,500 papers at most, train 24,000.
    """
    papers: dict[str, dict[str, Any]] = {}
    for entry in bib_entries(source):
        title, abstract = entry.get("title", ""), entry.get("abstract", "")
        if len(title.split()) in TITLE_WORDS and len(abstract.split()) in ABSTRACT_WORDS:
            paper = {"id": entry["key"], "year": entry.get("year", ""), "abstract": abstract, "title": title}
            papers.setdefault(title.lower(), paper)
    count = min(HELD_PAPERS, len(papers) // PAPERS_PER_HELD)
    if not count:
        few = f"{len(papers)} papers with a title and an abstract"
        raise DataError(f"{source} has {few}, but {PAPERS_PER_HELD} are needed: is it the bibliography with abstracts?")
    ranked = sorted(papers.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())
    ordered = [paper for _, paper in ranked]
    cuts: Sequence[tuple[str, int, int]] = [
        ("train", 2 * count, 2 * count + TRAIN_PAPERS),
        ("val", count, 2 * count),
        ("test", 0, count),
    ]
    return {f"{part}.jsonl": json_lines(ordered[first:last]) for part, first, last in cuts}


_TEXTS = "regard.data.downloads"
DOWNLOADS = {
    "imdb": Download("aclImdb_v1.tar.gz, or the folder aclImdb in it", f"{_TEXTS}:imdb_lines", "imdb", ("imdb",)),
    "acl_titles": Download(
        "anthology+abstracts.bib.gz, or another .bib file with abstracts", f"{_TEXTS}:acl_lines", "acl_titles", ("acl_titles",)
    ),
    "cifar10": Download(
        "cifar-10-binary.tar.gz, or the folder cifar-10-batches-bin in it",
        "regard.data.cifar_download:cifar_arrays",
        "cifar10",
        ("cifar10", "cifar10_gray"),
    ),
    "gum": Download(
        "a clone of https://github.com/amir-zeldes/gum, or its .zip file", "regard.data.gum_download:gum_trees", "gum", ("gum",)
    ),
    "cora": Download(
        "a clone of https://github.com/kimiyoung/planetoid, its .zip file, or its folder data",
        "regard.data.cora_download:cora_arrays",
        "planetoid",
        ("cora",),
    ),
    "go": Download(
        "a folder or a .zip file of games in SGF, such as Pro of https://github.com/featurecat/go-dataset, unpacked by 7-Zip",
        "regard.data.go_download:go_lines",
        "go_fox_pro",
        ("go",),
    ),
    "fsdd": Download(
        "a clone of https://github.com/Jakobovski/free-spoken-digit-dataset, its .zip file, or its folder recordings",
        "regard.data.fsdd_download:fsdd_tar",
        "fsdd",
        ("fsdd", "fsdd_speaker", "fsdd_strings", "fsdd_tts"),
    ),
    "an4": Download(
        "an4_sphere.tar.gz, or the folder an4 in it; feat/*.mfc or wav files in its layout do too",
        "regard.data.an4_download:an4_arrays",
        "an4",
        ("an4",),
    ),
}
