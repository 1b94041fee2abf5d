"""Files of a user: labelled texts, pairs of lines, tagged words, one long text; and their splits, the same every time."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.data.datasets import UPOS_COLUMN, LabelledText, Splits, Tagged, conllu
from regard.data.text_files import DataError, Pair, check_unicode, missing_key, placed_records, read_lines, read_text

DELIMITERS = {"comma": ",", "tab": "\t", "semicolon": ";"}
HELD_SHARE = 10  # one text in so many is for validation, and as many are for the test
HELD = ("test", "val")  # the splits that are held out of a file, where no other file has them
HELD_LINES = 5000  # different lines of validation at most, and of the test
HELD_PAIRS = 1000  # different sources of validation at most, and of the test: each of them is translated


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file as it lies on the disk."""
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def read_labelled_csv(path: Path, text: str, label: str, delimiter: str = "auto") -> list[LabelledText]:
    """Read the columns `text` and `label` of a CSV file with a header. Rows without any field are skipped.

    A field in quotes may hold line breaks; line numbers of errors are those of the beginning of a row. `delimiter` is a key of
    DELIMITERS, or "auto" for the one by which the header has both columns.
    """
    whole = read_text(path)
    sign = DELIMITERS[delimiter] if delimiter in DELIMITERS else _header_delimiter(whole, (text, label))
    rows = iter(_csv_rows(path, whole, sign))
    _, header = next(rows, ("", []))
    names = [name.strip() for name in header]
    if not names:
        raise DataError(f"{path} is empty: its first line must name its columns")
    at = [_column(path, names, name, advice) for name, advice in _column_advice(text, label)]
    found = []
    for where, row in rows:
        if len(row) != len(names):
            raise DataError(f"{where}: {len(row)} fields, but the header has {len(names)}")
        found.append(_labelled(where, row[at[0]], row[at[1]], text, label))
    return found


def _header_delimiter(whole: str, columns: Sequence[str]) -> str:
    """Return the delimiter that finds most of these columns in the first line of a text, then most columns at all, or a comma."""

    def names(sign: str) -> list[str]:
        try:
            return [name.strip() for name in next(csv.reader(io.StringIO(whole, newline=""), delimiter=sign, strict=True), [])]
        except csv.Error:
            return []

    return max(DELIMITERS.values(), key=lambda sign: (len({*columns} & {*names(sign)}), len(names(sign))))


def _csv_rows(path: Path, whole: str, delimiter: str) -> list[tuple[str, list[str]]]:
    """List the rows of a CSV file that have a field, each with its place for error messages."""
    found = []
    limit = csv.field_size_limit(max(len(whole), 1))  # a setting of the module: restored below, before a caller can fail
    try:
        rows, line = csv.reader(io.StringIO(whole, newline=""), delimiter=delimiter, strict=True), 1
        for row in rows:
            if row:
                found.append((f"{path}, line {line}", row))
            line = rows.line_num + 1
        return found
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not CSV that can be read: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _column_advice(text: str, label: str) -> list[tuple[str, str]]:
    """List the columns, or keys, of texts and labels, each with the option that names another one."""
    return [(text, "Name that of the texts by --text"), (label, "Name that of the labels by --label")]


def _column(path: Path, names: Sequence[str], name: str, option: str) -> int:
    """Return the place of a column that the header names once."""
    if names.count(name) == 1:
        return names.index(name)
    if name in names:
        raise DataError(f"{path} has {names.count(name)} columns that are called {name!r}: rename all but one")
    other = next((word for word, sign in DELIMITERS.items() if len(names) == 1 and sign in names[0]), None)
    advice = f"Is it separated otherwise? Then add --set delimiter={other}" if other else option
    raise DataError(f"{path} has no column {name!r}: it has {', '.join(map(repr, names))}. {advice}")


def read_labelled_jsonl(path: Path, text: str, label: str) -> list[LabelledText]:
    """Read the keys `text` and `label` of JSON objects, one a line. Labels become texts: 4 is "4", true is "true"."""
    found = []
    advice = dict(_column_advice(text, label))
    for where, record in placed_records(path, {text: str}, advice):
        if label not in record:
            raise DataError(missing_key(where, label, record, advice[label]))
        found.append(_labelled(where, record[text], _label_text(where, record[label], label), text, label))
    return found


def _label_text(where: str, value: Any, label: str) -> str:
    if isinstance(value, str):
        if not check_unicode(value):
            raise DataError(f"{where}: {label!r} has half of a surrogate pair in it, which is not text")
        return value
    if value is None or isinstance(value, list | dict):
        raise DataError(f"{where}: {label!r} must be a text, a number, true or false, not {json.dumps(value)[:40]}")
    return json.dumps(value)


def _labelled(where: str, text: str, its_label: str, text_name: str, label_name: str) -> LabelledText:
    for name, value in ((text_name, text), (label_name, its_label)):
        if not value.strip():
            raise DataError(f"{where}: {name!r} is empty: fill it in, or delete the row")
    return LabelledText(text, its_label.strip())


def split_labelled(
    texts: Sequence[LabelledText], where: Path | str, held: Sequence[str] = HELD, what: str = "text"
) -> Splits[list[LabelledText]]:
    """Split texts into about 80 / 10 / 10 %, label by label, by a hash of each text alone; splits that are not `held` are empty.

    Texts that differ in case or spaces alone are in the same split, and those with two labels are in train. A label of five
    texts or more is in every split, one of fewer in train alone. Each split keeps the order of the file. `what` names a text in
    sentences.
    """
    labels_of: dict[str, set[int | str]] = defaultdict(set)
    for x in texts:
        labels_of[_text_key(x.text)].add(x.label)
    if len({x.label for x in texts}) < 2:
        have = f"every {what} has the label {texts[0].label!r}" if texts else f"there is no {what} in it"
        raise DataError(f"{where}: {have}, but a classifier needs two labels at least")
    by_label: dict[int | str, list[str]] = defaultdict(list)
    for key, labels in labels_of.items():
        if len(labels) == 1:
            by_label[next(iter(labels))].append(key)
    split_of: dict[str, str] = {}
    for keys in by_label.values():
        split_of |= _held_out(keys, held)
    if held and not split_of:
        raise DataError(f"{where}: no label has {HELD_SHARE // 2} different {what}s, so that none is left for {_and(held)}")
    parts: dict[str, list[LabelledText]] = {"train": [], "val": [], "test": []}
    for x in texts:
        parts[split_of.get(_text_key(x.text), "train")].append(x)
    return Splits(**parts)


def split_pairs(pairs: Sequence[Pair], where: str, held: Sequence[str] = HELD) -> Splits[list[Pair]]:
    """Split pairs into about 80 / 10 / 10 %, by a hash of each source alone; val and test have HELD_PAIRS sources at most.

    Sources that differ in case or spaces alone are in the same split. Each split keeps the order of the files, and those that
    are not `held` are empty.
    """
    keys = {_text_key(pair.source) for pair in pairs}
    split_of = _held_out(keys, held, HELD_PAIRS)
    _check_enough(len(keys), "source", split_of, held, where)
    parts: dict[str, list[Pair]] = {"train": [], "val": [], "test": []}
    for pair in pairs:
        parts[split_of.get(_text_key(pair.source), "train")].append(pair)
    return Splits(**parts)


def read_tagged(path: Path, column: int = 0) -> list[Tagged]:
    """Read sentences of a CoNLL-U file (FORM and UPOS, with any tags), or of a file with a word and its tag on every line.

    The first line that is neither empty nor a comment (#) decides: CoNLL-U has ten columns with tabs between them. In other
    files a tab or spaces are between columns, an empty line ends a sentence, and no line is a comment. `column` is that of the
    tag, counted from 1; with 0 it is UPOS, or the second of two.
    """
    first = next(((i, x) for i, x in enumerate(read_lines(path), 1) if x.strip() and not x.startswith("#")), None)
    if first is None:
        return []
    if first[1].count("\t") == 9:
        return conllu(path, (), _tag_column(f"{path}, line {first[0]}", column or UPOS_COLUMN, 10))
    count = len(_columns(first[1]))
    if count != 2 and (count < 2 or not column):
        advice = f". It has {count} columns: name that of the tag, --set column={count}" if count > 2 else ""
        raise DataError(
            f"{path}, line {first[0]}: neither the 10 columns of CoNLL-U, with a tab between them, nor a word and its tag{advice}"
        )
    return _read_columns(path, count, _tag_column(f"{path}, line {first[0]}", column or 2, count))


def _tag_column(where: str, column: int, count: int) -> int:
    """Return the column of the tag, if it is one of so many; the first has the word."""
    if not 2 <= column <= count:
        raise DataError(f"{where}: {count} columns, so that the tag is not in column={column}: it is one from 2 to {count}")
    return column


def _read_columns(path: Path, count: int, column: int) -> list[Tagged]:
    """Read sentences of a file with `count` columns: the word, and its tag in `column`."""
    line_is = "a line is a word and its tag" if count == 2 else f"a line has {count} columns, as the first one has"
    found, words, tags = list[Tagged](), list[str](), list[str]()
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            columns = _columns(line)
            if len(columns) != count or not all(columns):
                raise DataError(f"{path}, line {number}: {line_is}, with a tab or spaces between them")
            words.append(columns[0])
            tags.append(columns[column - 1])
        elif words:
            found.append(Tagged(words, tags))
            words, tags = [], []
    return [*found, Tagged(words, tags)] if words else found


def _columns(line: str) -> list[str]:
    """Split a line at its tabs, and at its spaces where it has no tab: a word may then have spaces in it."""
    return [column.strip() for column in line.split("\t")] if "\t" in line.strip() else line.split()


def split_tagged(sentences: Sequence[Tagged], where: Path | str, held: Sequence[str] = HELD) -> Splits[list[Tagged]]:
    """Split sentences into about 80 / 10 / 10 %, by a hash of their words alone.

    Sentences that differ in case alone are in the same split. Each split keeps the order of the file, and those that are not
    `held` are empty.
    """
    keys = [_text_key(" ".join(x.words)) for x in sentences]
    split_of = _held_out(set(keys), held)
    _check_enough(len(set(keys)), "sentence", split_of, held, where)
    parts: dict[str, list[Tagged]] = {"train": [], "val": [], "test": []}
    for key, x in zip(keys, sentences, strict=True):
        parts[split_of.get(key, "train")].append(x)
    return Splits(**parts)


def split_lines(lines: Sequence[str], where: Path | str, held: Sequence[str] = HELD) -> Splits[list[str]]:
    """Split lines into about 80 / 10 / 10 %, by a hash of each line alone; val and test have HELD_LINES different ones at most.

    Lines that differ in case or spaces alone are in the same split. Each split keeps the order of the file, and those that are
    not `held` are empty.
    """
    keys = [_text_key(line) for line in lines]
    split_of = _held_out(set(keys), held, HELD_LINES)
    _check_enough(len(set(keys)), "line", split_of, held, where)
    parts: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for key, line in zip(keys, lines, strict=True):
        parts[split_of.get(key, "train")].append(line)
    return Splits(**parts)


def _held_out(keys: Collection[str], held: Sequence[str], most: int | None = None) -> dict[str, str]:
    """Map a tenth of these texts to each split that is held out, `most` to each at most: those with the smallest hashes."""
    count = (len(keys) + HELD_SHARE // 2) // HELD_SHARE
    count = count if most is None else min(count, most)
    ranked = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).digest())
    return {key: name for place, name in enumerate(held) for key in ranked[place * count : (place + 1) * count]}


def _check_enough(count: int, what: str, split_of: Mapping[str, str], held: Sequence[str], where: Path | str) -> None:
    """Refuse data of which nothing can be held out, or none at all."""
    few = f"{count} different {what}{'' if count == 1 else 's'}"
    if held and not split_of:
        names = _and(["train", *reversed(held)])
        raise DataError(f"{where}: {few}, too few to be split into {names}: {HELD_SHARE // 2} are needed")
    if not count:
        raise DataError(f"{where} has no {what} in it")


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def in_train(parts: Splits[list[Any]], text_of: Callable[[Any], str]) -> dict[str, int]:
    """Count the texts of val and of test that train has too, without regard to case and spaces."""
    keys = {_text_key(text_of(x)) for x in parts.train}
    return {name: sum(_text_key(text_of(x)) in keys for x in getattr(parts, name)) for name in ("val", "test")}


def _text_key(text: str) -> str:
    return " ".join(text.lower().split())


def split_text(whole: str, held: Sequence[str] = HELD) -> Splits[str]:
    """Cut a text into train, then 10 % for val and the last 10 % for test; a split that is not `held` is ""."""
    cuts = [len(whole) * share // HELD_SHARE for share in range(HELD_SHARE - len(held), HELD_SHARE + 1)]
    parts = {name: whole[a:b] for name, a, b in zip(reversed(held), cuts, cuts[1:], strict=False)}
    return Splits(whole[: cuts[0]], parts.get("val", ""), parts.get("test", ""))
