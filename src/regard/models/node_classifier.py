"""A label for every node of one graph, from the words of nodes and its edges."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, elu, embedding_bag, relu

from regard.checks import need
from regard.data.labelled_graph import LabelledGraph
from regard.mixers.graph_layer import GraphAttention, GraphConvolution
from regard.options import check_choice
from regard.patterns import Edges

GRAPH_LAYERS = ("gat", "gcn")
GraphLayer = GraphAttention | GraphConvolution


class NodeClassifier(nn.Module):
    """Compute scores of labels (n c) for the nodes of a graph by layers of graph attention, or of graph convolution.

    A node is the mean of its words. "gat" is the published network: heads are concatenated and an elu follows, and the
    `out_heads` of the last layer are averaged; inputs of every layer are dropped (`drop`), and weights of attention
    (`weight_drop`). "gcn" has convolutions and relu, one head, and no weights to drop. The graph is no weight: `state_dict` does
    not have it, so that weights are put into the network of another graph with the same vocabulary.
    Velickovic et al. 2018, arXiv:1710.10903; Kipf and Welling 2016, arXiv:1609.02907.
    """

    bags: Tensor
    starts: Tensor
    shares: Tensor

    def __init__(
        self,
        graph: LabelledGraph,
        *,
        layers: str = "gat",
        width: int = 64,
        heads: int = 8,
        out_heads: int = 1,
        depth: int = 2,
        drop: float = 0.6,
        weight_drop: float = 0.6,
    ) -> None:
        super().__init__()
        attends = check_choice("layers", layers, GRAPH_LAYERS) == "gat"
        need("out_heads", out_heads, 1)
        self.drop, self.bend = drop, elu if attends else relu
        index = torch.tensor(graph.edges, dtype=torch.long).reshape(-1, 2).T
        edges = Edges(index, nodes=len(graph.words), both=True, loops=True)

        def layer(inputs: int, last: bool) -> GraphLayer:
            out = len(graph.names) if last else width
            if not attends:
                return GraphConvolution(inputs, out, pattern=edges)
            many = out_heads if last else heads
            size = out if last else width // heads
            return GraphAttention(inputs, size, many, pattern=edges, concat=not last, dropout=weight_drop)

        sizes = [graph.vocabulary, *[width] * (need("depth", depth) - 1)]
        self.layers = nn.ModuleList([layer(size, number == depth) for number, size in enumerate(sizes, 1)])
        lengths = torch.tensor([len(own) for own in graph.words])
        words = torch.tensor([word for own in graph.words for word in own], dtype=torch.long)
        self.register_buffer("bags", words, persistent=False)
        self.register_buffer("starts", lengths.cumsum(0) - lengths, persistent=False)
        self.register_buffer("shares", (1 / lengths.clamp_min(1).float()).repeat_interleave(lengths), persistent=False)

    def forward(self) -> Tensor:
        """Return the scores of all nodes (n c)."""
        first, *others = self._each()
        shares = dropout(self.shares, self.drop, self.training)
        weight = first.w.weight.T  # a row for every word: few of them are in a node
        y = embedding_bag(self.bags, weight, self.starts, mode="sum", per_sample_weights=shares.to(weight.dtype))[None]
        y = first.collect(y)
        for layer in others:
            y = layer(dropout(self.bend(y), self.drop, self.training))
        return y[0]

    def _each(self) -> list[GraphLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def penalised(self) -> Iterator[Tensor]:
        """Iterate over the parameters that have an L2 penalty: all of attention, the first map of convolutions."""
        first = self._each()[0]
        return iter([first.w.weight]) if isinstance(first, GraphConvolution) else self.parameters()
