"""Input lines of `predict`: of an argument, a file or stdin, each with its place for an error message."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from regard.data.text_files import check_unicode, read_lines

FILE_SUFFIXES = {".txt", ".tsv", ".csv", ".json", ".jsonl", ".gz", ".xz", ".bz2", ".en", ".de", ".fr", ".src", ".tgt", ".wav"}
RECORDINGS = {".wav"}  # files that are one input, by their path
WHOLE_SUFFIXES = {".sgf"}  # of files that are one text, in several lines


class Line(NamedTuple):
    text: str
    where: str  # "test.txt, line 3"


def input_lines(source: str) -> tuple[bool, Iterator[Line]]:
    """Read the lines of a file, of stdin for `-`, or of the text itself; and whether there may be enough of them to batch.

    The line of a recording is its path, that of a game (.sgf) the whole file.
    """
    if source == "-":
        return False, _stdin()
    if os.path.isdir(source):
        raise ValueError(f"{source} is a folder: give a file, a text, or - for stdin")
    if os.path.exists(source) and Path(source).suffix.lower() in WHOLE_SUFFIXES:
        whole = " ".join(read_lines(source))
        if not whole.strip():
            raise ValueError(f"{source} is empty")
        return False, iter([Line(whole, source)])
    if is_recording(source):
        return False, iter([Line(source, "this file")])  # errors of its reader name it
    if os.path.exists(source):
        return True, _file(Path(source))
    if not check_unicode(source):
        raise ValueError("this text is not UTF-8")
    if _like_a_path(source):
        raise ValueError(f"there is no file {source}. If this is a text: echo {source} | regard predict RUN -")
    return False, (Line(text, "this text") for text in source.split("\n"))


def is_recording(source: str) -> bool:
    """Return whether an argument names a recording that is there."""
    return Path(source).suffix.lower() in RECORDINGS and os.path.isfile(source)


def _like_a_path(text: str) -> bool:
    """Decide whether a text is meant as a path: without spaces, and with what names of files begin or end with."""
    if not text or any(c.isspace() for c in text) or len(text) > 4096:
        return False
    begins = text.startswith(("/", "./", "../", "~/")) and len(text) > 1
    return (
        begins
        or Path(text).suffix.lower() in FILE_SUFFIXES | WHOLE_SUFFIXES
        or os.path.isdir(os.path.dirname(text) or "/no folder")
    )


def _file(path: Path) -> Iterator[Line]:
    return (Line(text, f"{path}, line {number}") for number, text in enumerate(read_lines(path), 1))


def _stdin() -> Iterator[Line]:
    """Yield lines as they come: the first is answered before the second is there."""
    if sys.stdin is None:
        raise ValueError("stdin is closed: give a text or a file")
    number = 0
    while raw := sys.stdin.buffer.readline():
        number += 1
        where = f"stdin, line {number}"
        if b"\0" in raw:
            raise ValueError(f"{where}: a NUL character at byte {raw.index(0) + 1}: this is not text")
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 at byte {error.start + 1}") from None
        yield Line(text.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff" if number == 1 else ""), where)
