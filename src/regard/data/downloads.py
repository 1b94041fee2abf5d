"""Convert data sets as they are downloaded to the files that their readers read: IMDB's folders, the bibliography of the ACL."""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.bibtex import bib_entries
from regard.data.text_files import DataError

Records = list[dict[str, Any]]

REVIEW = re.compile(r"(?:^|/)(train|test)/(neg|pos)/(\d+)_(\d+)\.txt$")
TITLE_WORDS, ABSTRACT_WORDS = range(3, 31), range(25, 451)  # of papers that are taken
TRAIN_PAPERS, HELD_PAPERS, PAPERS_PER_HELD = 24_000, 1500, 18  # at most; one paper in so many is held out for val, and for test


class Download(NamedTuple):
    """Describe what is downloaded, and how it is converted."""

    what: str
    convert: Callable[[Path], dict[str, Records]]  # to records by file name


def imdb_records(source: Path) -> dict[str, Records]:
    """Read the reviews of aclImdb, a folder or a .tar.gz file: `train/pos/0_9.txt` is a good one with 9 of 10 points.

    Reviews without a label (`train/unsup`) are left out. The order is neg, pos, each by number.
    """
    found: dict[str, list[tuple[int, int, int, str]]] = {"train": [], "test": []}
    for name, read in _members(source):
        if (parts := REVIEW.search(name)) is not None:
            text = _utf8(read(), f"{source}, {name}")
            found[parts[1]].append((int(parts[2] == "pos"), int(parts[3]), int(parts[4]), text))
    for part, reviews in found.items():
        if not reviews:
            raise DataError(f"{source} has no reviews of {part}: files such as {part}/pos/0_9.txt are needed")
    return {
        f"{part}.jsonl": [
            {"id": f"{'pos' if label else 'neg'}/{number}", "rating": rating, "label": label, "text": text}
            for label, number, rating, text in sorted(reviews)
        ]
        for part, reviews in found.items()
    }


def _members(source: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Iterate over the files of a folder or of a tar file: the path of each, and a function that reads it."""
    if source.is_dir():
        for path in sorted(source.rglob("*.txt")):
            yield path.relative_to(source.parent).as_posix(), path.read_bytes
        return
    if not source.is_file():
        raise DataError(f"there is no file or folder {source}")
    try:
        with tarfile.open(source) as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{source} is not a whole .tar or .tar.gz file: {error}") from None


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start + 1}") from None


def acl_records(source: Path) -> dict[str, Records]:
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
    return {f"{part}.jsonl": ordered[first:last] for part, first, last in cuts}


DOWNLOADS = {
    "imdb": Download("aclImdb_v1.tar.gz, or the folder aclImdb in it", imdb_records),
    "acl_titles": Download("anthology+abstracts.bib.gz, or another .bib file with abstracts", acl_records),
}
