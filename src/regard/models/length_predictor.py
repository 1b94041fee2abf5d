"""Prediction of the length of an output from its source.

Letters: b batch, n source tokens, w width, k guesses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import need
from regard.mixers.feature_math import upcast
from regard.models.heads import pooled


def length_targets(x: Tensor, valid: Tensor | None) -> Tensor:
    """Count the real tokens of each row of x (b n ...), (b)."""
    if valid is not None:
        return valid.sum(1)
    return torch.full(x.shape[:1], x.shape[1], device=x.device)


class LengthPredictor(nn.Module):
    """Predict p(length) for lengths from n - reach to n + reach, n the tokens of the source, from the mean of their vectors.

    There is no length below 1 or above `most`. A length out of reach is learned as the nearest one within.
    Gu et al. 2017, arXiv:1711.02281.
    """

    def __init__(self, width: int, *, reach: int = 32, most: int | None = None) -> None:
        super().__init__()
        self.reach = need("reach", reach)
        self.most = most
        self.count = 2 * reach + 1
        self.map = nn.Linear(width, self.count)

    def longest(self, n: int) -> int:
        """Return the longest length that is predicted for n source tokens."""
        longest = n + self.reach
        if self.most is None:
            return longest
        return min(longest, self.most)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return lengths in ascending order, and their log-probabilities: both (b 2 reach + 1)."""
        offsets = torch.arange(-self.reach, self.reach + 1, device=x.device)
        source = length_targets(x, valid)
        lengths = source[:, None] + offsets
        impossible = lengths < 1
        if self.most is not None:
            impossible = impossible | (lengths > self.most)
        mean = pooled(x, valid, "mean")
        scores = upcast(self.map(mean))
        scores = scores.masked_fill(impossible, -torch.inf)
        return lengths, scores.log_softmax(-1)

    def surprise(self, x: Tensor, valid: Tensor | None, length: Tensor) -> Tensor:
        """Return -log p of the true lengths (b); 0 where a row has none."""
        lengths, logs = self(x, valid)
        at = length[:, None] - lengths[:, :1]
        at = at.clamp(0, self.count - 1)
        log_p = logs.gather(1, at).squeeze(1)
        empty = length == 0
        return -log_p.masked_fill(empty, 0)

    def best(self, x: Tensor, valid: Tensor | None, k: int = 1) -> tuple[Tensor, Tensor]:
        """Return the k likeliest lengths, the likeliest first, and their log-probabilities: (b k) both.

        Where fewer are possible, the likeliest is repeated with log-probability -inf.
        """
        if not 1 <= k <= self.count:
            raise ValueError(f"from 1 to {self.count} lengths can be guessed, with reach={self.reach}, not {k!r}")
        lengths, logs = self(x, valid)
        top = logs.topk(k, dim=1)
        found = lengths.gather(1, top.indices)
        impossible = top.values == -torch.inf
        return torch.where(impossible, found[:, :1], found), top.values
