"""Cora as the repository of Planetoid has it, in pickles of Python 2, converted to arrays."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from regard.data.array_pickles import pickled_array, pickled_lists, pickled_rows
from regard.data.labelled_graph import CORA_TOPICS
from regard.data.prepared_files import PreparedFile, named_arrays
from regard.data.source_files import source_files, utf8_text
from regard.data.text_files import DataError

VALIDATION = 500  # papers behind those of train
PLANETOID_FILES = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
_NAME = re.compile(r"(?:^|/)ind\.cora\.([a-z.]+)$")


def cora_arrays(source: Path) -> dict[str, PreparedFile]:
    """Read ind.cora.* of a clone, of its folder data or of an archive.

    Train are the papers of x, which are the first of allx; val are the next 500 of those, and test the papers of tx.
    """
    found: dict[str, bytes] = {}
    for path, raw in source_files(source, _NAME):
        if (parts := _NAME.search(path)) is not None:
            found[parts[1]] = raw
    if missing := [name for name in PLANETOID_FILES if name not in found]:
        raise DataError(f"{source} has no {', '.join(f'ind.cora.{name}' for name in missing)}: is it a clone of planetoid?")
    place = {name: f"{source}, ind.cora.{name}" for name in PLANETOID_FILES}
    train = pickled_rows(found["x"], place["x"])
    known, tested = (pickled_rows(found[name], place[name]) for name in ("allx", "tx"))
    labels = {name: _topics(pickled_array(found[name], place[name]), place[name]) for name in ("y", "ally", "ty")}
    for name, rows in (("y", train), ("ally", known), ("ty", tested)):
        if len(labels[name]) != len(rows[0]) - 1:
            raise DataError(f"{place[name]} has {len(labels[name]):,} labels for {len(rows[0]) - 1:,} papers")
    first, count = len(labels["ally"]), len(labels["ally"]) + len(labels["ty"])
    places = _paper_numbers(utf8_text(found["test.index"], place["test.index"]), range(first, count), place["test.index"])
    if not train[3] == known[3] == tested[3] or len(labels["y"]) + VALIDATION > first:
        raise DataError(f"{source}: x, allx and tx are not of one data set, or leave no {VALIDATION} papers for validation")
    label = np.concatenate([labels["ally"], np.empty_like(labels["ty"])])
    label[places] = labels["ty"]
    words = [*_words_by_paper(known, place["allx"]), *[np.empty(0, np.int64)] * len(places)]
    for node, row in zip(places, _words_by_paper(tested, place["tx"]), strict=True):
        words[node] = row
    edges = _edges(pickled_lists(found["graph"], place["graph"]), count, place["graph"])
    indices = np.concatenate(words)
    arrays = {
        "indptr": np.cumsum([0, *map(len, words)]),
        "indices": indices,
        "data": np.ones(len(indices), np.uint8),
        "shape": np.array([count, known[3]]),
        "label": label,
        "edges": edges,
        "train_idx": np.arange(len(labels["y"])),
        "val_idx": np.arange(len(labels["y"]), len(labels["y"]) + VALIDATION),
        "test_idx": np.array(sorted(places)),
    }
    return {"cora.npz": named_arrays(arrays, f"{count:,} papers, {len(edges):,} citations")}


def _topics(hot: np.ndarray, where: str) -> np.ndarray:
    """Read labels from rows with a one in the column of the label."""
    right = hot.ndim == 2 and hot.shape[1] == len(CORA_TOPICS) and ((hot == 0) | (hot == 1)).all() and (hot.sum(1) == 1).all()
    if not right:
        raise DataError(f"{where} does not have a one in each row, in one of {len(CORA_TOPICS)} columns")
    return hot.argmax(1)


def _paper_numbers(text: str, allowed: range, where: str) -> list[int]:
    """Read the numbers of the papers of tx, which are those behind allx in another order."""
    words = text.split()
    if not all(re.fullmatch("[0-9]{1,9}", word) for word in words) or sorted(map(int, words)) != list(allowed):
        raise DataError(f"{where} does not have the numbers {allowed.start} to {allowed.stop - 1}, each once")
    return [int(word) for word in words]


def _words_by_paper(matrix: tuple[np.ndarray, np.ndarray, np.ndarray, int], where: str) -> list[np.ndarray]:
    """Return the words of every paper, in order."""
    ends, columns, numbers, _ = matrix
    if (numbers != 1).any():
        raise DataError(f"{where} has numbers of words that are not 1")
    return [np.sort(row) for row in np.split(columns, ends[1:-1])]


def _edges(neighbours: dict[int, list[int]], count: int, where: str) -> np.ndarray:
    """List pairs of papers, each once and none with itself."""
    pairs = {(min(a, b), max(a, b)) for a, others in neighbours.items() for b in others if a != b}
    if not pairs or any(not 0 <= a < b < count for a, b in pairs):
        raise DataError(f"{where} does not have citations between {count:,} papers")
    return np.array(sorted(pairs), np.int32)
