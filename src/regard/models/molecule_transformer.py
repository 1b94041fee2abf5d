"""A graph transformer: every atom attends to every atom, and scores have a bias for the bond or the path between them.

Letters: b molecules, n atoms, f numbers of an atom, w width, h heads, c labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.blocks.feedforward import FeedForward, check_fraction
from regard.checks import need
from regard.mixers.attend import attend
from regard.mixers.base import Dims
from regard.mixers.softmax import Softmax
from regard.ops.dropout import Dropout


class PairBiasAttention(nn.Module):
    """Attend with a learned number for the class of every pair, by head: softmax(q k / sqrt(d) + table[pairs]) v.

    x (b n w) -> (b n w); pairs (b n n) are classes of query and key. Outputs at padding are zero.
    """

    def __init__(self, dims: Dims, classes: int) -> None:
        super().__init__()
        self.heads, self.core = dims.heads, Softmax(dims)
        self.qkv = nn.Linear(dims.width, 3 * dims.width)
        self.out = nn.Linear(dims.width, dims.width)
        self.pair_embedding = nn.Embedding(classes, dims.heads)
        nn.init.normal_(self.pair_embedding.weight, std=0.1)
        for part in (*self.qkv.weight.detach().chunk(3), self.out.weight):
            nn.init.xavier_uniform_(part)

    def forward(self, x: Tensor, pairs: Tensor, valid: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        bias = self.pair_embedding(pairs).permute(0, 3, 1, 2)
        y = attend(q, k, v, self.core, valid=valid, query_valid=valid, score=lambda scores, *_: scores + bias)
        y = self.out(y.transpose(1, 2).flatten(2).to(x.dtype))
        return y if valid is None else y.masked_fill(~valid[..., None], 0)


class PairBiasBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), with a bias of pairs in the scores."""

    def __init__(self, dims: Dims, classes: int, channel: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = nn.LayerNorm(dims.width), PairBiasAttention(dims, classes)
        self.channel_norm, self.channel = nn.LayerNorm(dims.width), channel
        self.drop = Dropout(check_fraction("dropout", dropout))

    def forward(self, x: Tensor, pairs: Tensor, valid: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.mixer(self.mixer_norm(x), pairs, valid))
        return x + self.drop(self.channel(self.channel_norm(x)))


class MoleculeTransformer(nn.Module):
    """Compute scores of labels (b c) for molecules: atoms (b n f) by their numbers, and classes of pairs (b n n).

    An atom is the sum of a vector for each of its numbers, of `sizes` choices. One more vector in front is joined to all atoms
    (a virtual node, with a class of pairs of its own), and the labels are read from it. As Graphormer: Ying et al. 2021,
    arXiv:2106.05234.
    """

    starts: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        classes: int,
        labels: int,
        *,
        dims: Dims,
        depth: int,
        ffn: int,
        activation: str = "relu",
        gated: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.embedding = nn.Embedding(sum(sizes), dims.width)
        nn.init.normal_(self.embedding.weight, std=len(sizes) ** -0.5)
        many = torch.tensor(list(sizes))
        self.register_buffer("starts", many.cumsum(0) - many, persistent=False)
        self.virtual_embedding = nn.Parameter(torch.randn(dims.width) * 0.02)
        self.blocks = nn.ModuleList(
            PairBiasBlock(
                dims,
                classes + 1,
                FeedForward(dims.width, ffn, activation=activation, gated=gated, dropout=dropout),
                dropout=dropout,
            )
            for _ in range(need("depth", depth))
        )
        self.drop = Dropout(check_fraction("dropout", dropout))
        self.final_norm, self.head = nn.LayerNorm(dims.width), nn.Linear(dims.width, labels)

    def forward(self, atoms: Tensor, pairs: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the scores (b c); `valid` (b n) is False at padding."""
        x = self.embedding(atoms + self.starts).sum(-2)
        front = self.virtual_embedding.to(x.dtype).expand(len(x), 1, -1)
        x = self.drop(torch.cat([front, x], 1))
        pairs = nn.functional.pad(pairs, (1, 0, 1, 0), value=self.classes)
        valid = None if valid is None else nn.functional.pad(valid, (1, 0), value=True)
        for block in self.blocks:
            x = block(x, pairs, valid)
        return self.head(self.drop(self.final_norm(x[:, 0])))
