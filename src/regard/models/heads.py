"""The way out: a label per vector, a label per sequence, the next token, a masked token, two sequences matched.

Letters: b batch, n tokens, w width, c classes, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.blocks.feedforward import activate, check_fraction
from regard.mixers.feature_math import upcast
from regard.text import unknown

POOLS = ("token", "mean", "max")


def pooled(x: Tensor, valid: Tensor | None, pool: str) -> Tensor:
    """One vector of a sequence (b n w): of its first token, the mean or the maximum over real ones; 0 if there is none."""
    _pool(pool)
    if x.shape[1] == 0:
        return x.new_zeros(len(x), x.shape[2])
    if pool == "token":
        if valid is None:
            return x[:, 0]
        first = x.take_along_dim(valid.long().argmax(1)[:, None, None], 1)[:, 0]
        return first.masked_fill(~valid.any(1, keepdim=True), 0)
    if pool == "mean":
        if valid is None:
            return x.mean(1)
        total = upcast(x.masked_fill(~valid[..., None], 0)).sum(1)
        return (total / valid.sum(1, keepdim=True).clamp_min(1)).to(x.dtype)
    if valid is None:
        return x.amax(1)
    top = x.masked_fill(~valid[..., None], -torch.inf).amax(1)
    return top.masked_fill(~valid.any(1, keepdim=True), 0)


def _pool(name: str) -> str:
    """The name, if it is one of a pool."""
    if name not in POOLS:
        raise ValueError(unknown("no pool is called", name, POOLS))
    return name


class PerVector(nn.Module):
    """A label for every vector: (b n w) -> (b n c)."""

    def __init__(self, width: int, classes: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop, self.map = nn.Dropout(check_fraction("dropout", dropout)), nn.Linear(width, classes)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: ARG002 - heads are called alike
        return self.map(self.drop(x))


class PerSequence(nn.Module):
    """A label for the whole sequence, (b n w) -> (b c): of its first token (put one there: front=1), the mean or the maximum.

    `deep` puts one more layer in between, c = W tanh(U x), as BERT does.
    """

    def __init__(self, width: int, classes: int, *, pool: str = "mean", deep: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.change = nn.Linear(width, width) if deep else None
        self.pool, self.drop, self.map = _pool(pool), nn.Dropout(check_fraction("dropout", dropout)), nn.Linear(width, classes)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        y = pooled(x, valid, self.pool)
        return self.map(self.drop(y if self.change is None else self.change(y).tanh()))


class NextToken(nn.Module):
    """Scores of every token of the vocabulary, (b n w) -> (b n v); `table` (v w) is an embedding's, if they share it."""

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


class MaskedToken(nn.Module):
    """What stood behind a mask: one more layer, then every token's score. Devlin et al. 2018, arXiv:1810.04805."""

    def __init__(
        self, width: int, vocab: int, *, table: nn.Embedding | None = None, activation: str = "gelu", eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.act = activate(activation)
        self.change, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=eps)
        self.next = NextToken(width, vocab, table=table, bias=True)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.next(self.norm(self.act(self.change(x))))


class Matching(nn.Module):
    """How two sequences go together: (b n w), (b m w) -> (b c), from u, v, u * v and |u - v| of their pooled vectors.

    Mou et al. 2015, arXiv:1512.08422.
    """

    def __init__(self, width: int, classes: int, *, pool: str = "mean", dropout: float = 0.0) -> None:
        super().__init__()
        self.pool = _pool(pool)
        self.map = nn.Sequential(
            nn.Linear(4 * width, width), nn.ReLU(), nn.Dropout(check_fraction("dropout", dropout)), nn.Linear(width, classes)
        )

    def forward(self, x: Tensor, valid: Tensor | None, y: Tensor, y_valid: Tensor | None) -> Tensor:
        u, v = pooled(x, valid, self.pool), pooled(y, y_valid, self.pool)
        return self.map(torch.cat([u, v, u * v, (u - v).abs()], -1))
