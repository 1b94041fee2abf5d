"""Papers of the ACL Anthology Network, and pairs of them: does one cite the other? Radev et al. 2009; texts of scisumm-corpus."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from regard.data.datasets import Splits
from regard.data.locate import file
from regard.data.text_files import DataError, placed_records, read_lines

PAIR_COLUMNS = ["label", "doc1", "doc2"]


class LabelledPair(NamedTuple):
    """Hold two papers by their ids, and 1 where one cites the other."""

    label: int
    first: str
    second: str


def read_papers(folder: Path) -> dict[str, str]:
    """Read the texts of papers by id."""
    found: dict[str, str] = {}
    for where, record in placed_records(file(folder, "docs.jsonl"), {"id": str, "text": str}):
        if record["id"] in found:
            raise DataError(f"{where}: {record['id']!r} is there twice")
        found[record["id"]] = record["text"]
    return found


def read_pairs(folder: Path, papers: dict[str, str]) -> Splits[list[LabelledPair]]:
    """Read the pairs of each split: 16,824 / 2,103 / 2,103."""
    return Splits(*(_pairs(file(folder, f"pairs.{part}.tsv"), papers) for part in ("train", "val", "test")))


def _pairs(path: Path, papers: dict[str, str]) -> list[LabelledPair]:
    found = []
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        where = f"{path}, line {number}"
        if len(columns) != len(PAIR_COLUMNS):
            raise DataError(f"{where}: {len(columns)} columns instead of {', '.join(PAIR_COLUMNS)}, with a tab between them")
        if number == 1:
            if columns != PAIR_COLUMNS:
                raise DataError(f"{where}: the columns must be {', '.join(PAIR_COLUMNS)}, not {', '.join(columns)}")
            continue
        if columns[0] not in ("0", "1"):
            raise DataError(f"{where}: the label must be 0 or 1, not {columns[0]!r}")
        if unknown_ids := [name for name in columns[1:] if name not in papers]:
            raise DataError(f"{where}: docs.jsonl has no paper {unknown_ids[0]!r}")
        found.append(LabelledPair(int(columns[0]), columns[1], columns[2]))
    return found
