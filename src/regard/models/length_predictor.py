"""How long an answer will be, said before any of it is.

Letters: b batch, n source tokens, w width, k guesses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import need
from regard.mixers.feature_math import upcast
from regard.models.heads import pooled


def length_targets(x: Tensor, valid: Tensor | None) -> Tensor:
    """How many tokens of each row of x (b n ...) are real, (b)."""
    return torch.full(x.shape[:1], x.shape[1], device=x.device) if valid is None else valid.sum(1)


class LengthPredictor(nn.Module):
    """p(length) for lengths from n - reach to n + reach around the n tokens that were read, from the mean of their vectors.

    There is no length below 1 or above `most`. A length out of reach is learned as the nearest one within.
    Gu et al. 2017, arXiv:1711.02281.
    """

    def __init__(self, width: int, *, reach: int = 32, most: int | None = None) -> None:
        super().__init__()
        self.reach, self.most = need("reach", reach), most
        self.map = nn.Linear(width, 2 * reach + 1)

    def longest(self, n: int) -> int:
        """Of an answer to n tokens."""
        return n + self.reach if self.most is None else min(n + self.reach, self.most)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Lengths in order, and their log-probabilities: both (b 2 reach + 1)."""
        around = torch.arange(-self.reach, self.reach + 1, device=x.device)
        lengths = length_targets(x, valid)[:, None] + around
        out = lengths < 1 if self.most is None else (lengths < 1) | (lengths > self.most)
        scores = upcast(self.map(pooled(x, valid, "mean")))
        return lengths, scores.masked_fill(out, -torch.inf).log_softmax(-1)

    def surprise(self, x: Tensor, valid: Tensor | None, length: Tensor) -> Tensor:
        """-log p of the true lengths (b); 0 where a row has none."""
        lengths, logs = self(x, valid)
        at = (length[:, None] - lengths[:, :1]).clamp(0, 2 * self.reach)
        return -logs.gather(1, at).squeeze(1).masked_fill(length == 0, 0)

    def best(self, x: Tensor, valid: Tensor | None, k: int = 1) -> tuple[Tensor, Tensor]:
        """The k likeliest lengths, the likeliest first, and their log-probabilities: (b k) both.

        Where there are not so many, the likeliest comes again, as one that cannot be.
        """
        if not 1 <= k <= 2 * self.reach + 1:
            raise ValueError(f"from 1 to {2 * self.reach + 1} lengths can be guessed, with reach={self.reach}, not {k!r}")
        lengths, logs = self(x, valid)
        top = logs.topk(k, dim=1)
        found = lengths.gather(1, top.indices)
        return torch.where(top.values == -torch.inf, found[:, :1], found), top.values
