"""Output heads: a label per vector, a label per sequence, the next token, a masked token, a label per pair of sequences.

Letters: b batch, n tokens, w width, c classes, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.blocks.feedforward import activate, check_fraction
from regard.mixers.feature_math import upcast
from regard.ops.dropout import Dropout
from regard.text import unknown

POOLS = ("token", "mean", "max", "smooth")


def pooled(x: Tensor, valid: Tensor | None, pool: str) -> Tensor:
    """Reduce a sequence (b n w) to one vector (b w): its first token, the mean or maximum of real ones; 0 if there is none.

    "smooth" is a smooth maximum: the mean of each channel, weighted by its softmax over positions.

    `x` are the vectors, `valid` (b n) is True at real ones, `pool` is "token", "mean", "max" or "smooth".

    >>> import torch
    >>> from regard.models import pooled
    >>> x = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> pooled(x, torch.tensor([[True, True, False]]), "mean")
    tensor([[2.]])
    """
    _pool(pool)
    if x.shape[1] == 0:
        return x.new_zeros(len(x), x.shape[2])
    if valid is None:
        return _pooled_all(x, pool)
    empty = ~valid.any(1, keepdim=True)
    if pool == "token":
        first = valid.long().argmax(1)
        token = x.take_along_dim(first[:, None, None], 1)[:, 0]
        return token.masked_fill(empty, 0)
    padding = ~valid[..., None]
    if pool == "mean":
        real = x.masked_fill(padding, 0)
        total = upcast(real).sum(1)
        mean = total / valid.sum(1, keepdim=True).clamp_min(1)
        return mean.to(x.dtype)
    if pool == "smooth":
        return _smooth_max(x.masked_fill(padding, torch.finfo(x.dtype).min), x.masked_fill(padding, 0))
    top = x.masked_fill(padding, -torch.inf).amax(1)
    return top.masked_fill(empty, 0)


def _pooled_all(x: Tensor, pool: str) -> Tensor:
    if pool == "token":
        return x[:, 0]
    if pool == "mean":
        return x.mean(1)
    return _smooth_max(x, x) if pool == "smooth" else x.amax(1)


def _smooth_max(scores: Tensor, x: Tensor) -> Tensor:
    """Weigh x (b n w) by the softmax of scores over positions, each channel by itself; returns (b w)."""
    weights = upcast(scores).softmax(1)
    return (weights * upcast(x)).sum(1).to(x.dtype)


def _pool(name: str) -> str:
    """Check the name of a pool."""
    if name not in POOLS:
        raise ValueError(unknown("no pool is called", name, POOLS))
    return name


class PerVector(nn.Module):
    """A label for every vector: (b n w) -> (b n c).

    `width` goes in, `classes` scores come out; `dropout` is that of the vectors.

    >>> import torch
    >>> from regard.models import PerVector
    >>> tuple(PerVector(16, 3)(torch.randn(2, 5, 16)).shape)
    (2, 5, 3)
    """

    def __init__(self, width: int, classes: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        dropout = check_fraction("dropout", dropout)
        self.drop = Dropout(dropout)
        self.map = nn.Linear(width, classes)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: ARG002 - heads are called alike
        x = self.drop(x)
        return self.map(x)


class PerSequence(nn.Module):
    """A label for the whole sequence, (b n w) -> (b c): of its first token (put one there: front=1), or of one of the POOLS.

    `deep` puts one more layer in between, c = W tanh(U x), as BERT does, or with another `activation`.

    `width` goes in, `classes` scores come out; `pool` is that of `pooled`, `dropout` that of the pooled vector.

    >>> import torch
    >>> from regard.models import PerSequence
    >>> tuple(PerSequence(16, 3)(torch.randn(2, 5, 16)).shape)
    (2, 3)
    """

    def __init__(
        self,
        width: int,
        classes: int,
        *,
        pool: str = "mean",
        deep: bool = False,
        activation: str = "tanh",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation, self.act = activation, torch.tanh if activation == "tanh" else activate(activation)
        self.change = nn.Linear(width, width) if deep else None
        self.pool = _pool(pool)
        dropout = check_fraction("dropout", dropout)
        self.drop = Dropout(dropout)
        self.map = nn.Linear(width, classes)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        y = pooled(x, valid, self.pool)
        if self.change is not None:
            y = self.act(self.change(y))
        y = self.drop(y)
        return self.map(y)

    def extra_repr(self) -> str:
        return f"pool={self.pool!r}, activation={self.activation!r}"


class NextToken(nn.Module):
    """Scores of every token of the vocabulary, (b n w) -> (b n v); `table` (v w) is an embedding's, if they share it.

    `width` goes in, `vocab` scores come out; `bias` adds a number for each token.

    >>> import torch
    >>> from regard.models import NextToken
    >>> tuple(NextToken(16, 20)(torch.randn(2, 5, 16)).shape)
    (2, 5, 20)
    """

    def __init__(self, width: int, vocab: int, *, table: nn.Embedding | None = None, bias: bool = False) -> None:
        super().__init__()
        self.map = nn.Linear(width, vocab, bias=bias)
        if table is None:
            nn.init.normal_(self.map.weight, std=width**-0.5)
        elif table.weight.shape != self.map.weight.shape:
            raise ValueError(f"the shared table has shape {tuple(table.weight.shape)}, but ({vocab}, {width}) is needed")
        else:
            self.map.weight = table.weight
        if bias:
            nn.init.zeros_(self.map.bias)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.map(x)


class ScaledNextToken(NextToken):
    """Scores of every token, of vectors divided by sqrt(w), as T5 does where its table is shared: (b n w) -> (b n v)."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.map(x * self.map.in_features**-0.5)


class MaskedToken(nn.Module):
    """Predict masked tokens: one more layer, then every token's score. Devlin et al. 2018, arXiv:1810.04805.

    `width` goes in, `vocab` scores come out; `table` is an embedding's, if they share it, `activation` that of the layer, `eps`
    that of its norm.

    >>> import torch
    >>> from regard.models import MaskedToken
    >>> tuple(MaskedToken(16, 20)(torch.randn(2, 5, 16)).shape)
    (2, 5, 20)
    """

    def __init__(
        self, width: int, vocab: int, *, table: nn.Embedding | None = None, activation: str = "gelu", eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.act = activate(activation)
        self.change = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.next = NextToken(width, vocab, table=table, bias=True)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: ARG002
        hidden = self.act(self.change(x))
        return self.next(self.norm(hidden))


class Matching(nn.Module):
    """Classify two sequences: (b n w), (b m w) -> (b c), from u, v, u * v and |u - v| of their pooled vectors.

    Mou et al. 2015, arXiv:1512.08422.

    `width` goes in, `classes` scores come out; `pool` is that of `pooled`, `dropout` that of the pooled vectors.

    >>> import torch
    >>> from regard.models import Matching
    >>> tuple(Matching(16, 3)(torch.randn(2, 5, 16), None, torch.randn(2, 7, 16), None).shape)
    (2, 3)
    """

    def __init__(self, width: int, classes: int, *, pool: str = "mean", dropout: float = 0.0) -> None:
        super().__init__()
        self.pool = _pool(pool)
        dropout = check_fraction("dropout", dropout)
        first = nn.Linear(4 * width, width)
        second = nn.Linear(width, classes)
        self.map = nn.Sequential(first, nn.ReLU(), Dropout(dropout), second)

    def forward(self, x: Tensor, valid: Tensor | None, y: Tensor, y_valid: Tensor | None) -> Tensor:
        u = pooled(x, valid, self.pool)
        v = pooled(y, y_valid, self.pool)
        distance = (u - v).abs()
        features = torch.cat([u, v, u * v, distance], -1)
        return self.map(features)
