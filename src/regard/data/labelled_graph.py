"""Graphs whose nodes have words and labels: Cora as Planetoid splits it, and communities drawn from a seed."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from regard.checks import need
from regard.data.locate import file
from regard.data.strict_json import JsonError, read_value
from regard.data.text_files import DataError, read_binary, why_no_array

# in the order of Planetoid's labels
CORA_TOPICS = (
    *("theory", "reinforcement learning", "genetic algorithms", "neural networks", "probabilistic methods", "case-based"),
    "rule learning",
)
CORA_ARRAYS = ("indptr", "indices", "data", "shape", "label", "edges", "train_idx", "val_idx", "test_idx")


class LabelledGraph(NamedTuple):
    """Hold the nodes and edges of one graph."""

    words: list[list[int]]  # of every node
    vocabulary: int  # words are below this number
    edges: list[list[int]]  # pairs of nodes, each once
    labels: list[int]  # of every node
    names: list[str]  # of the labels

    def to_json(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))

    def with_node(self, words: Sequence[int], neighbours: Sequence[int]) -> LabelledGraph:
        """Add a node, with edges to those that are there; its label is 0 and means nothing."""
        new = len(self.words)
        edges = [[new, other] for other in neighbours]
        return self._replace(words=[*self.words, list(words)], edges=self.edges + edges, labels=[*self.labels, 0])


class GraphSplits(NamedTuple):
    """Hold a graph and the nodes of its splits."""

    graph: LabelledGraph
    nodes: dict[str, list[int]]  # of train, val and test


def graph_of_json(text: str) -> LabelledGraph:
    """Read what `LabelledGraph.to_json` wrote."""
    try:
        found = LabelledGraph(**read_value(text))
        _check(found, "graph.json")
    except (JsonError, TypeError) as error:
        raise ValueError(f"graph.json holds no graph: restore it ({error})") from None
    return found


def read_cora(folder: Path) -> GraphSplits:
    """Read cora.npz: papers, the words in each, citations, and Planetoid's splits of 140, 500 and 1,000 papers."""
    path = file(folder, "cora.npz")
    found = _arrays(path)
    _check_whole(found, path)
    nodes, vocabulary = (int(size) for size in found["shape"])
    if len(found["indptr"]) != nodes + 1 or len(found["label"]) != nodes or (found["data"] != 1).any():
        raise DataError(f"{path}: {nodes:,} papers need {nodes + 1:,} in indptr, {nodes:,} labels, and data that is all 1")
    ends = found["indptr"].astype(np.int64)
    if ends[0] != 0 or ends[-1] != len(found["indices"]) or (np.diff(ends) < 0).any():
        raise DataError(f"{path}: indptr does not cut {len(found['indices']):,} words into those of {nodes:,} papers")
    words = [found["indices"][low:high].tolist() for low, high in pairwise(ends.tolist())]
    names = list(CORA_TOPICS)
    graph = LabelledGraph(words, vocabulary, found["edges"].tolist(), found["label"].tolist(), names)
    _check(graph, str(path))
    parts = {name: found[f"{name}_idx"].tolist() for name in ("train", "val", "test")}
    for name, own in parts.items():
        if any(not 0 <= node < nodes for node in own):
            raise DataError(f"{path}: {name}_idx names papers that are not there")
    return GraphSplits(graph, parts)


def _check_whole(found: Mapping[str, np.ndarray], path: Path) -> None:
    """Refuse arrays of other shapes than those of cora.npz, and numbers that are not whole."""
    for name, array in found.items():
        shape = {"shape": (2,), "edges": (len(array) if array.ndim else 0, 2)}.get(name, (array.size,))
        if array.shape != shape or array.dtype.kind not in ("uif" if name == "data" else "ui"):
            raise DataError(f"{path}: {name} has {array.dtype} of shape {array.shape}, not whole numbers of shape {shape}")
    if (found["shape"] < 1).any() or len(found["data"]) != len(found["indices"]):
        raise DataError(
            f"{path}: shape is {found['shape'].tolist()}, with {len(found['indices']):,} indices and {len(found['data']):,} data"
        )


def _arrays(path: Path) -> Mapping[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(read_binary(path)), allow_pickle=False) as archive:
            missing = [name for name in CORA_ARRAYS if name not in archive.files]
            if missing:
                raise DataError(f"{path} has no array {', '.join(missing)}")
            return {name: archive[name] for name in CORA_ARRAYS}
    except (ValueError, EOFError, BadZipFile, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not a whole .npz file: {why_no_array(error)}") from None


def _check(graph: LabelledGraph, where: str) -> None:
    """Refuse numbers of words, nodes and labels that are not there."""
    nodes = len(graph.words)
    if len(graph.labels) != nodes:
        raise DataError(f"{where}: {nodes:,} nodes have {len(graph.labels):,} labels")
    for what, numbers, most in (
        ("words", (word for own in graph.words for word in own), graph.vocabulary),
        ("edges", (node for pair in graph.edges for node in pair), nodes),
        ("labels", graph.labels, len(graph.names)),
    ):
        wrong = next((number for number in numbers if not 0 <= number < most), None)
        if wrong is not None:
            raise DataError(f"{where}: {what} go from 0 to {most - 1:,}, but one is {wrong:,}")


def drawn_communities(nodes: int = 600, groups: int = 4, *, labelled: int = 10, seed: int = 1) -> GraphSplits:
    """Draw a graph of groups that are denser inside, whose nodes have few words of their group: neither alone is enough.

    A node has 4 edges on average, three quarters of them inside of its group, and 8 words of 400, of which each is one of the 100
    of its group with probability 0.4. `labelled` nodes of every group are train, a quarter of the others val, the rest test.
    """
    need("nodes", nodes, 8 * groups)
    need("labelled", labelled, 1, nodes // (2 * groups))
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(nodes) % groups)
    own = rng.random((nodes, 8)) < 0.4
    words = np.where(own, labels[:, None] * 100 + rng.integers(100, size=own.shape), rng.integers(100 * groups, size=own.shape))
    members = [np.flatnonzero(labels == group) for group in range(groups)]
    edges: set[tuple[int, int]] = set()
    while len(edges) < 2 * nodes:
        a = int(rng.integers(nodes))
        near = members[labels[a]] if rng.random() < 0.75 else np.arange(nodes)
        b = int(rng.choice(near))
        if a != b:
            edges.add((min(a, b), max(a, b)))
    train = sorted(int(node) for group in members for node in group[:labelled])
    rest = [node for node in range(nodes) if node not in set(train)]
    parts: dict[str, Any] = {"train": train, "val": rest[: len(rest) // 4], "test": rest[len(rest) // 4 :]}
    names = [f"group {group}" for group in range(groups)]
    bags = [sorted(set(row)) for row in words.tolist()]
    return GraphSplits(LabelledGraph(bags, 100 * groups, [list(pair) for pair in sorted(edges)], labels.tolist(), names), parts)
