"""Strict readers of text files: every error names the file and the line, nothing is guessed.

Text is UTF-8; a leading byte order mark is dropped, and `\\r\\n` becomes `\\n`. Only `\\n` ends a line: str.splitlines would also
split at U+2028, \\x0b, \\x1c and others that occur inside sentences, and parallel files would no longer be parallel.
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
    """Report data that is missing or malformed; the message names the place."""


class NotTextError(DataError):
    """Report a file that is not text: bytes that are not UTF-8, or NUL."""


class Pair(NamedTuple):
    """Hold a source text and its target text."""

    source: str
    target: str


class ParallelText(NamedTuple):
    """Hold the paired lines of two files."""

    pairs: list[Pair]
    dropped: int  # lines that are empty in both files


def read_lines(path: Path | str) -> Iterator[str]:
    """Iterate over the lines of a plain, .gz, .xz or .bz2 file, without their ends; the file may be larger than memory."""
    return (line.removesuffix("\n") for line in _decoded(Path(path)))


def read_text(path: Path | str) -> str:
    """Return the whole text of a file."""
    lines = _decoded(Path(path))
    with _reading(Path(path)) as file:
        raw = file.read().removeprefix(BOM)
    try:
        whole = raw.decode()
    except UnicodeDecodeError:
        return "".join(lines)  # raises with the place
    return "".join(lines) if "\0" in whole else whole.replace("\r\n", "\n")


def read_binary(path: Path | str) -> bytes:
    """Return the bytes of a plain or compressed file, decompressed."""
    if not Path(path).is_file():
        raise DataError(f"there is no file {path}")
    with _reading(Path(path)) as file:
        return file.read()


def why_no_archive(error: Exception) -> str:
    """Return why an archive cannot be read: the first line of an error, which tarfile follows by one for each compression."""
    return (str(error).splitlines() or ["it is cut off"])[0].rstrip(":")


def why_no_array(error: Exception) -> object:
    """Return why NumPy cannot load an array: its own words, unless they propose to load a pickle."""
    return "it holds no plain numbers" if "pickle" in str(error) else error


def read_any_file(path: Path | str) -> str:
    """Return the text of a file as `read_text` does; of a file that is not text, all bytes as they are.

    A byte that is not UTF-8 is half of a surrogate pair: `encode(errors="surrogateescape")` restores it.
    """
    try:
        return read_text(path)
    except NotTextError:
        return read_binary(path).decode(errors="surrogateescape")


def read_parallel(source: Path | str, target: Path | str) -> ParallelText:
    """Pair line i of one file with line i of the other. Lines that are empty in both are dropped and counted in `dropped`.

    Files of different length are refused, and so is a line that is empty in one file alone: the rest would not match.
    """
    left, right = list(read_lines(source)), list(read_lines(target))
    if len(left) != len(right):
        raise DataError(
            f"{source} has {len(left):,} lines and {target} has {len(right):,}: line i of one belongs to line i of the other, "
            f"and line {min(len(left), len(right)) + 1:,} has none"
        )
    pairs = []
    for number, (a, b) in enumerate(zip(left, right, strict=True), 1):
        if _blank(a) != _blank(b):
            empty, full = (source, target) if _blank(a) else (target, source)
            raise DataError(f"{empty}, line {number}: empty, while this line of {full} is not")
        if not _blank(a):
            pairs.append(Pair(a, b))
    return ParallelText(pairs, len(left) - len(pairs))


def _blank(line: str) -> bool:
    return line == "" or line.isspace()


def read_records(path: Path | str, keys: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """Iterate over JSON objects, one a line, each with at least these keys of these types. Blank lines are skipped."""
    return (record for _, record in placed_records(path, keys))


def placed_records(
    path: Path | str, keys: Mapping[str, type], advice: Mapping[str, str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the same records, each with its place for error messages: "train.jsonl, line 17".

    `advice` has what to do where a key is missing, by key.
    """
    for number, line in enumerate(read_lines(path), 1):
        if not _blank(line):
            where = f"{path}, line {number}"
            yield where, _record(line, keys, where, advice or {})


def _record(line: str, keys: Mapping[str, type], where: str, advice: Mapping[str, str]) -> dict[str, Any]:
    try:
        record = read_value(line)
    except JsonError as error:
        raise DataError(f"{where}: not JSON that can be read: {error.msg} at character {error.column}") from None
    if not isinstance(record, dict):
        example = ", ".join(f'"{key}": …' for key in keys)
        raise DataError(f"{where}: a record is an object such as {{{example}}}, not {_elided(line)}")
    for key, kind in keys.items():
        if key not in record:
            raise DataError(missing_key(where, key, record, advice.get(key, "")))
        if type(record[key]) is not kind:  # isinstance would accept true as an integer
            raise DataError(f"{where}: {key!r} must be {JSON_TYPES[kind]}, not {_described(record[key])}")
        if kind is str and not check_unicode(record[key]):
            raise DataError(f"{where}: {key!r} has half of a surrogate pair in it, which is not text")
    return record


def missing_key(where: str, key: str, record: Mapping[str, Any], advice: str = "") -> str:
    """Return an error message for a record without a key: the keys that it has, and what to do."""
    return f"{where}: no {key!r} in this record; it has {', '.join(map(repr, record)) or 'nothing'}{advice and f'. {advice}'}"


def check_unicode(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8: a Python string may hold halves of surrogate pairs."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decoded(path: Path) -> Iterator[str]:
    """Iterate over lines, each with its `\\n` if it has one. A missing file is refused by the call, not by the first line."""
    try:
        if not path.is_file():
            raise DataError(f"there is no file {path}" if not path.exists() else f"{path} is a folder, not a file")
        empty = path.stat().st_size == 0
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if empty and path.suffix in OPEN:  # gzip would accept it as an empty text
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
                raise NotTextError(f"{path}, line {number}: a NUL character at byte {raw.index(0) + 1}: this is not text")
            if raw.endswith(b"\r\n"):
                raw = raw[:-2] + b"\n"
            try:
                yield raw.decode()
            except UnicodeDecodeError as error:
                raise NotTextError(f"{path}, line {number}: not UTF-8 at byte {error.start + 1}") from None


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a file; errors of decompression become DataErrors."""
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
