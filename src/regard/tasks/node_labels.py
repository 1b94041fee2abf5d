"""One label for every node of a graph, of which few are labelled: topics of papers by their words and citations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as mean_loss

from regard.blocks.feedforward import check_fraction
from regard.checks import need
from regard.data.batch import Batch
from regard.data.labelled_graph import GraphSplits, LabelledGraph, drawn_communities, graph_of_json, read_cora
from regard.data.locate import find
from regard.models.node_classifier import GRAPH_LAYERS, NodeClassifier
from regard.options import check_choice
from regard.tasks.graph_config import NodeLabels
from regard.tasks.support import device_under, evaluating, learned
from regard.tasks.task import Task
from regard.training.learnable import Step
from regard.training.losses import Loss, cross_entropy

PROPAGATIONS = 100  # rounds of label propagation
OF_BLOCKS = ("ffn", "activation", "gated", "norm", "positions", "max_len", "share")
NODE_LINE = "a line is the number of a node, or a new one such as: cites 12 633 words 3 17 99"


class NodeLabelsTask(Task):
    """Labels of the nodes of one graph, all of which are read in every pass; scored by the share of nodes that is right.

    An example is the number of a node. Weights are selected by the cross-entropy of validation, which is less noisy than the
    accuracy of few nodes. Floors: the most frequent label of train, and labels that spread along edges, without any words.
    """

    best = ("loss", "min")
    bodies = ()
    steady = True
    config: NodeLabels

    def __init__(self, config: NodeLabels) -> None:
        super().__init__(config)
        need("depth", config.depth)
        if not isinstance(config.mixer, str):
            raise ValueError(f"{config.task} has one mixer for all layers, {' or '.join(GRAPH_LAYERS)}, not {config.mixer!r}")
        check_choice("mixer", config.mixer, GRAPH_LAYERS)
        for name in ("dropout", "weight_dropout"):
            check_fraction(name, getattr(config, name))
        if config.l2 < 0:
            raise ValueError(f"l2 must not be below 0, but it is {config.l2!r}")
        if config.width % max(1, config.heads):
            raise ValueError(f"width {config.width} is not divisible by {config.heads} heads")
        self.graph: LabelledGraph | None = None
        self.spread: list[int] = []  # labels by propagation

    def unused(self) -> dict[str, str]:
        found = super().unused() | dict.fromkeys(OF_BLOCKS, "models of blocks")
        attention = dict.fromkeys(("heads", "out_heads", "weight_dropout"), "mixer=gat")
        return found if self.config.mixer == "gat" else found | attention

    def data(self, folder: Path | None) -> GraphSplits:
        """Read the graph and its splits."""
        return read_cora(find("planetoid", folder))

    def read(self, folder: Path | None = None) -> None:
        self.graph, nodes = self.data(folder)
        self.splits = nodes
        self.spread = propagated_labels(self.graph, nodes["train"])
        self.sample = str(nodes["val"][0])

    def describe_data(self) -> list[str]:
        graph, counts = learned(self.graph), ", ".join(f"{len(own):,} {name}" for name, own in self.splits.items())
        edges = f"{len(graph.words):,} nodes, {len(graph.edges):,} edges, {len(graph.names)} labels"
        floors = [f"{self._right(self._most_frequent(), name):.1f} % of {name}" for name in ("val", "test")]
        spread = [f"{self._right(self.spread, name):.1f} % of {name}" for name in ("val", "test")]
        return [
            f"{edges}; labels of {counts}",
            f"floor: the most frequent label of train is right for {' and '.join(floors)}",
            f"floor: labels that spread along edges are right for {' and '.join(spread)}",
        ]

    def assets(self) -> dict[str, str]:
        return {"graph.json": learned(self.graph).to_json()}

    def restore(self, assets: Mapping[str, str]) -> None:
        self.graph = graph_of_json(assets["graph.json"])

    def size(self, example: int) -> int:  # noqa: ARG002 - a node is one token
        return 1

    def batch(self, examples: Sequence[int]) -> Batch:
        nodes, labels = torch.tensor(examples), learned(self.graph).labels
        return Batch(nodes[:, None], None, torch.tensor([labels[node] for node in examples]))

    def model(self) -> NodeClassifier:
        return self._network(learned(self.graph))

    def _network(self, graph: LabelledGraph) -> NodeClassifier:
        config = self.config
        assert isinstance(config.mixer, str)
        return NodeClassifier(
            graph,
            layers=config.mixer,
            width=config.width,
            heads=config.heads,
            out_heads=config.out_heads,
            depth=config.depth,
            drop=config.dropout,
            weight_drop=config.weight_dropout,
        )

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        assert batch.target is not None
        found = cross_entropy(model()[batch.source[:, 0]], batch.target, smoothing=self.config.smoothing)
        if not self.config.l2:
            return found
        squares = torch.stack([p.square().sum() for p in model.penalised()])  # type: ignore[operator]
        penalty = squares.sum() * (self.config.l2 / 2)
        return found._replace(total=found.total + found.over * penalty)

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        nodes = self.splits[split]
        batch = self.batch(nodes)
        assert batch.target is not None
        with evaluating(model):
            scores = model()[batch.source[:, 0].to(device_under(model))].float().cpu()
        return {
            "accuracy": self._right(scores.argmax(-1).tolist(), split, of_split=True),
            "loss": mean_loss(scores, batch.target).item(),
            "floor": self._right(self._most_frequent(), split),
            "propagation": self._right(self.spread, split),
            "nodes": float(len(nodes)),
        }

    def _right(self, found: Sequence[int], split: str, *, of_split: bool = False) -> float:
        """Return the percentage of nodes of a split that have the label found: by node, or in the order of the split."""
        nodes, labels = self.splits[split], learned(self.graph).labels
        own = found if of_split else [found[node] for node in nodes]
        right = sum(labels[node] == label for node, label in zip(nodes, own, strict=True))
        return 100 * right / max(1, len(nodes))

    def _most_frequent(self) -> list[int]:
        labels = learned(self.graph).labels
        counts = Counter(labels[node] for node in self.splits["train"])
        return [max(sorted(counts), key=counts.__getitem__)] * len(labels)

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        graph = learned(self.graph)
        with evaluating(model):
            known = model().argmax(-1).tolist()
            return [graph.names[self._label_of(model, line, known)] if line.strip() else "" for line in lines]

    def _label_of(self, model: nn.Module, line: str, known: list[int]) -> int:
        """Return the label of a node by its number, or of one that is not in the graph; each such line by itself."""
        graph = learned(self.graph)
        if (number := line.strip()).isascii() and number.isdigit():
            if int(number) >= len(known):
                raise ValueError(f"there is no node {number}: they go from 0 to {len(known) - 1:,}")
            return known[int(number)]
        words, near = _new_node(line, graph)
        other = self._network(graph.with_node(words, near))
        other.load_state_dict(model.state_dict())
        return int(other.to(device_under(model)).eval()()[-1].argmax())


class CommunitiesTask(NodeLabelsTask):
    """Groups of a graph that is drawn from a seed."""

    def data(self, folder: Path | None) -> GraphSplits:  # noqa: ARG002 - made, not read
        return drawn_communities()


def _new_node(line: str, graph: LabelledGraph) -> tuple[list[int], list[int]]:
    """Read the words and neighbours of a node that is not in the graph: "cites 12 633 words 3 17 99"."""
    found = re.fullmatch(r"(?:cites((?:\s+\d+)*))?\s*(?:words((?:\s+\d+)*))?", line.strip(), re.ASCII)
    if found is None:
        raise ValueError(f"{line.strip()[:40]!r} is no node: {NODE_LINE}")
    near, words = (sorted({int(text) for text in (part or "").split()}) for part in found.groups())
    for what, numbers, most in (("node", near, len(graph.words)), ("word", words, graph.vocabulary)):
        if numbers and numbers[-1] >= most:
            raise ValueError(f"there is no {what} {numbers[-1]}: they go from 0 to {most - 1:,}")
    if not near and not words:
        raise ValueError(f"a node without words and citations has nothing to be read: {NODE_LINE}")
    return words, near


def propagated_labels(graph: LabelledGraph, train: Sequence[int]) -> list[int]:
    """Compute the label of every node that labels of train give by edges alone: the mean of its neighbours, again and again.

    Labels of train stay as they are. A node that no label reaches has the first. Zhu and Ghahramani 2002.
    """
    pairs = torch.tensor(graph.edges, dtype=torch.long).reshape(-1, 2).T
    i, j = torch.cat([pairs, pairs.flip(0)], 1)
    degrees = torch.bincount(i, minlength=len(graph.words)).clamp_min(1)[:, None]
    given = torch.tensor(list(train))
    truth: Tensor = torch.eye(len(graph.names))[[graph.labels[node] for node in train]]
    found = torch.zeros(len(graph.words), len(graph.names))
    for _ in range(PROPAGATIONS):
        found[given] = truth
        found = torch.zeros_like(found).index_add_(0, i, found[j]) / degrees
    found[given] = truth
    return found.argmax(-1).tolist()
