"""WikiSQL: questions about a table and their SQL queries, with values copied from the question.

Zhong, Xiong, Socher 2017, arXiv:1709.00103; the templates are those of Finegan-Dollak et al. 2018, arXiv:1806.09029.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.datasets import Splits
from regard.data.locate import file
from regard.data.strict_json import JsonError, read_value
from regard.data.text_files import DataError, Pair, check_unicode, read_text

SPLITS = {"train": 0, "dev": 1, "test": 2}
_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
_VALUE = re.compile(r'"?\b(var\d+)\b"?')  # the placeholder of a value in a template, quoted or not: the data has both
_REMOVED = re.compile(r"TABLEalias0\.?|\bAS(?= TABLEalias0)|_FIELD\b|;\s*$")


class Question(NamedTuple):
    """Hold a question and its query in pieces: words of SQL and words of values alternate, SQL first."""

    split: int
    question: list[str]
    pieces: list[list[str]]

    @property
    def query(self) -> list[str]:
        return [word for piece in self.pieces for word in piece]


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words and single signs, so that a value and its mention in a question agree."""
    return _WORD.findall(text.lower())


def read_wikisql(folder: Path) -> Splits[list[Pair]]:
    """Read questions and queries, 56,355 / 8,421 / 15,878, both as words with a space between them.

    "SELECT TABLEalias0.NOTES_FIELD FROM TABLE AS TABLEalias0 WHERE TABLEalias0.STATE/TERRITORY_FIELD = "var0" ;" with the value
    "South Australia" is "select notes from table where state territory = south australia". Of the words of values 99.97 %
    occur in their question (`in_question` counts them). The split is that of the questions.
    """
    parts: Splits[list[Pair]] = Splits([], [], [])
    for example in questions(folder):
        parts[example.split].append(Pair(" ".join(example.question), " ".join(example.query)))
    return parts


def in_question(folder: Path) -> float:
    """Return the share of the words of values, over all questions, that occur in their question: what copying can reach."""
    found = total = 0
    for example in questions(folder):
        words = set(example.question)
        values = [word for piece in example.pieces[1::2] for word in piece]
        found += sum(word in words for word in values)
        total += len(values)
    return found / max(1, total)


def questions(folder: Path) -> Iterator[Question]:
    """Iterate over all questions in the order of the file."""
    path = file(folder, "wikisql.json")
    try:
        entries = read_value(read_text(path))
    except JsonError as error:
        where = f"{path}, line {error.line}"
        raise DataError(f"{where}: not JSON that can be read: {error.msg} at character {error.column}") from None
    if not isinstance(entries, list):
        raise DataError(f"{path}: a list of queries is needed, not {type(entries).__name__}")
    for number, entry in enumerate(entries, 1):
        try:
            for example in _entry_questions(entry):
                if not all(map(check_unicode, [*example.question, *example.query])):
                    raise TypeError("half of a surrogate pair, which is not text")
                yield example
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}, query {number}: not as text2sql-data has it: {what}") from None


def _entry_questions(entry: dict[str, Any]) -> Iterator[Question]:
    pieces = _VALUE.split(entry["sql"][0])  # SQL and names of values alternate
    plain = [_sql_words(piece) for piece in pieces[::2]]
    defaults = {value["name"]: value["example"] for value in entry["variables"]}  # for values that no sentence mentions
    for sentence in entry["sentences"]:
        values = defaults | sentence["variables"]
        query = [split_words(values[piece]) if place % 2 else plain[place // 2] for place, piece in enumerate(pieces)]
        yield Question(SPLITS[sentence["question-split"]], split_words(sentence["original"]), query)


def _sql_words(piece: str) -> list[str]:
    return split_words(re.sub(r"[_/]", " ", _REMOVED.sub("", piece)))
