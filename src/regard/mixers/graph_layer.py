"""Published graph layers: attention with one map for queries, keys and values, and convolution, which weighs by degrees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import check_tokens, check_valid
from regard.mixers.attend import attend
from regard.mixers.base import Dims
from regard.mixers.graph_attention import GAT
from regard.mixers.places import mask_padding
from regard.patterns import Edges, Pattern


class GraphAttention(nn.Module):
    """Compute the graph attention layer exactly as published: (b n width) -> (b n heads * out), or (b n out).

    h = W x, one map for each head, is query, key and value. s_ij = LeakyReLU(a_q . h_i + a_k . h_j), A = softmax over the edges
    (i, j), of which training drops a share, out_i = sum_j A_ij h_j. Heads are concatenated (concat=True) or averaged (the paper's
    last layer); a bias follows unless bias=False, and no further map. Weights begin as Glorot's.
    The mechanism `gat` of the catalogue scores in the same way, with a map for each of q, k, v and the output, as all rows.
    The graph is a pattern, with self loops as in the paper: Edges(index, nodes=n, loops=True). `on_graph` replaces it.
    Velickovic et al. 2018, arXiv:1710.10903.

    `width` goes in and `out` comes out of each of the `heads`; `pattern` is the graph, `slope` that of LeakyReLU below zero,
    `dropout` the share of edges.

    >>> import torch
    >>> from regard import Edges, GraphAttention
    >>> graph = Edges([[0, 1], [1, 2]], nodes=3, loops=True)
    >>> tuple(GraphAttention(8, 4, heads=2, pattern=graph)(torch.randn(1, 3, 8)).shape)
    (1, 3, 8)
    """

    def __init__(
        self,
        width: int,
        out: int,
        heads: int,
        *,
        pattern: Pattern | str,
        concat: bool = True,
        slope: float = 0.2,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        for name, flag in (("concat", concat), ("bias", bias)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False, not {flag!r}")
        self.dims, self.concat = Dims(width, heads, key_dim=out, value_dim=out, dropout=dropout), concat
        self.core = GAT(self.dims, pattern=pattern, slope=slope)
        self.w = nn.Linear(width, heads * out, bias=False)
        biases = heads * out if concat else out
        self.bias = nn.Parameter(torch.zeros(biases)) if bias else None
        with torch.no_grad():
            for own in self.w.weight.view(heads, out, width):
                nn.init.xavier_uniform_(own)
            for side in (self.core.a_q, self.core.a_k):
                assert side is not None
                bound = (6 / (out + 1)) ** 0.5
                side.uniform_(-1, 1).mul_(bound)

    def extra_repr(self) -> str:
        return f"concat={self.concat}"

    def forward(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """Return what the nodes x (b n width) collect from their neighbours; `valid` (b n) is False at padding."""
        check_tokens(x, "x", self.dims.width, self.w.weight)
        check_valid(valid, x.shape[0], x.shape[1], "nodes")
        return self.collect(self.w(mask_padding(x, valid)), valid=valid)

    def collect(self, h: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """Return the same from h = W x (b n heads * out), where a caller computes it, as from few words of many."""
        like = h
        h = h.unflatten(-1, (self.dims.heads, -1)).transpose(1, 2)
        y = attend(h, h, h, self.core, valid=valid, query_valid=valid).to(like.dtype)
        y = y.transpose(1, 2).flatten(2) if self.concat else y.mean(1)
        if self.bias is not None:
            y = y + self.bias
        if valid is None:
            return y
        return y.masked_fill(~valid[..., None], 0)


class GraphConvolution(nn.Module):
    """Compute the graph convolution as published: (b n width) -> (b n out), the mean of neighbours in place of attention.

    out_i = sum_j h_j / sqrt(d_i d_j) + bias over the edges (i, j), h = W x, with d_i the number of edges of i. The graph has self
    loops and both directions of every edge: Edges(index, nodes=n, loops=True, both=True). It is the control of GraphAttention:
    weights are those of the graph, and nothing is learned but W. Kipf and Welling 2016, arXiv:1609.02907.
    """

    index: Tensor
    weights: Tensor

    def __init__(self, width: int, out: int, *, pattern: Edges, bias: bool = True) -> None:
        super().__init__()
        if not isinstance(pattern, Edges):
            raise ValueError(f"a graph convolution needs Edges, not {pattern!r}")
        self.w = nn.Linear(width, out, bias=False)
        nn.init.xavier_uniform_(self.w.weight)
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None
        j, i = pattern.index
        degrees = torch.bincount(i, minlength=pattern.nodes).clamp_min(1).double()
        self.register_buffer("index", torch.stack([i, j]), persistent=False)
        self.register_buffer("weights", (degrees[i] * degrees[j]).rsqrt().float(), persistent=False)
        self.nodes = pattern.nodes

    def forward(self, x: Tensor) -> Tensor:
        """Return what the nodes x (b n width) collect from their neighbours."""
        return self.collect(self.w(x))

    def collect(self, h: Tensor) -> Tensor:
        """Return the same from h = W x (b n out)."""
        if h.dim() != 3 or h.shape[1] != self.nodes:
            raise ValueError(f"the graph has {self.nodes:,} nodes, but the shape of what they have is {tuple(h.shape)}")
        i, j = self.index
        sent = h[:, j] * self.weights.to(h.dtype)[:, None]
        y = torch.zeros_like(h).index_add(1, i, sent)
        return y if self.bias is None else y + self.bias
