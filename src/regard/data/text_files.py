"""Files of text, read strictly: what cannot be right is a sentence with the file and the line in it, never a guess.

Text is UTF-8; a byte order mark in front is dropped, and `\\r\\n` is `\\n`. Only `\\n` ends a line: str.splitlines would also
cut at U+2028, \\x0b, \\x1c and others that stand inside sentences, and parallel files would no longer be parallel.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from regard.data.strict_json import JsonError, read_value

OPEN = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
COMPRESSED_SUFFIXES = ("", *OPEN)  # in this order where a file is there more than once
BOM = b"\xef\xbb\xbf"
JSON_TYPES: dict[type, str] = {str: "a text", int: "an integer", dict: "an object", list: "a list"}


class DataError(ValueError):
    """Data that is not there, or not what it should be: a sentence that says where."""


class Pair(NamedTuple):
    """What is read, and what should be said."""

    source: str
    target: str


class ParallelText(NamedTuple):
    """Lines of two files, side by side."""

    pairs: list[Pair]
    dropped: int  # lines that are empty in both files


def read_lines(path: Path | str) -> Iterator[str]:
    """The lines of a plain, .gz, .xz or .bz2 file, without their ends, one at a time: it may be larger than memory."""
    return (line.removesuffix("\n") for line in _decoded(Path(path)))


def read_text(path: Path | str) -> str:
    """All of a file at once."""
    slowly = _decoded(Path(path))
    with _reading(Path(path)) as file:
        raw = file.read().removeprefix(BOM)
    try:
        whole = raw.decode()
    except UnicodeDecodeError:
        return "".join(slowly)  # which says where
    return "".join(slowly) if "\0" in whole else whole.replace("\r\n", "\n")


def read_parallel(source: Path | str, target: Path | str) -> ParallelText:
    """Line i of one file with line i of the other. Lines that are empty in both are dropped and counted in `dropped`.

    Files of different length are refused, and so is a line that is empty in one alone: from there on they would not match.
    """
    left, right = list(read_lines(source)), list(read_lines(target))
    if len(left) != len(right):
        raise DataError(
            f"{source} has {len(left):,} lines and {target} has {len(right):,}: line i of one belongs to line i of the other"
        )
    pairs = []
    for number, (a, b) in enumerate(zip(left, right, strict=True), 1):
        said, answered = not a.isspace() and a != "", not b.isspace() and b != ""
        if said != answered:
            empty, full = (target, source) if said else (source, target)
            raise DataError(f"{empty}, line {number}: empty, while this line of {full} is not")
        if said:
            pairs.append(Pair(a, b))
    return ParallelText(pairs, len(left) - len(pairs))


def read_records(path: Path | str, keys: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """JSON objects, one a line, each with at least these keys, of these types. Blank lines are skipped: they hold no record."""
    return (record for _, record in placed_records(path, keys))


def placed_records(path: Path | str, keys: Mapping[str, type]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same, each with its place, for a sentence about it: "train.jsonl, line 17"."""
    for number, line in enumerate(read_lines(path), 1):
        if line and not line.isspace():
            where = f"{path}, line {number}"
            yield where, _record(line, keys, where)


def _record(line: str, keys: Mapping[str, type], where: str) -> dict[str, Any]:
    try:
        record = read_value(line)
    except JsonError as error:
        raise DataError(f"{where}: not JSON that can be read: {error.msg} at character {error.column}") from None
    if not isinstance(record, dict):
        wanted = ", ".join(f'"{key}": …' for key in keys)
        raise DataError(f"{where}: a record is an object such as {{{wanted}}}, not {_elided(line)}")
    for key, kind in keys.items():
        if key not in record:
            raise DataError(f"{where}: no {key!r} in this record; it has {', '.join(map(repr, record)) or 'nothing'}")
        if type(record[key]) is not kind:  # true is no integer
            raise DataError(f"{where}: {key!r} must be {JSON_TYPES[kind]}, not {_described(record[key])}")
        if kind is str and not check_unicode(record[key]):
            raise DataError(f"{where}: {key!r} has half of a surrogate pair in it, which is not text")
    return record


def check_unicode(text: str) -> bool:
    """Whether this is text: a Python string may hold halves of surrogate pairs, which no UTF-8 can."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decoded(path: Path) -> Iterator[str]:
    """The lines, each with the `\\n` it may have. A missing file is refused here, not when the first line is asked for."""
    try:
        if not path.is_file():
            raise DataError(f"there is no file {path}" if not path.exists() else f"{path} is a folder, not a file")
        empty = path.stat().st_size == 0
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if empty and path.suffix in OPEN:  # gzip would take it for an empty text
        raise DataError(f"{path} is cut off: it has no bytes at all")
    return _lines_of(path)


def _lines_of(path: Path) -> Iterator[str]:
    with _reading(path) as file:
        for number, raw in enumerate(file, 1):
            if number == 1:
                raw = raw.removeprefix(BOM)
                if not raw:
                    return
            if b"\0" in raw:
                raise DataError(f"{path}, line {number}: a NUL character at byte {raw.index(0) + 1}: this is not text")
            if raw.endswith(b"\r\n"):
                raw = raw[:-2] + b"\n"
            try:
                yield raw.decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not UTF-8 at byte {error.start + 1}") from None


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """The file, open; what goes wrong inside a compressed one is a sentence."""
    try:
        with OPEN.get(path.suffix, open)(path, "rb") as file:  # type: ignore[operator]
            yield file
    except EOFError:
        raise DataError(f"{path} is cut off: it ends before its compressed data does; fetch it again") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is not a whole {path.suffix} file: {error}") from None
    except OSError as error:
        why = error.strerror or f"not a whole {path.suffix} file: {error}"  # bz2 has no error of its own
        raise DataError(f"{path} cannot be read: {why}") from None


def _described(value: Any) -> str:
    try:
        return _elided(json.dumps(value))
    except RecursionError:
        return f"a {type(value).__name__} that is nested deeply"


def _elided(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[:most] + "…"
