"""What may not be said: too short an answer, the same few words again, words that are not wanted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rules(NamedTuple):
    """Constraints on what comes next. A row that is left with nothing may end."""

    end: int  # the token that ends an answer
    most: int  # tokens of an answer at most, the end among them
    least: int = 0  # tokens before the end at least
    no_repeat: int = 0  # no run of so many tokens comes twice; 0: it may
    never: tuple[int, ...] = ()  # tokens that are not said at all

    def checked(self) -> Rules:
        """Itself, or a sentence about what is wrong with it."""
        if self.most < 1:
            raise ValueError(f"most must be at least 1 token, not {self.most}")
        if not 0 <= self.least < self.most:
            raise ValueError(f"least must be from 0 to {self.most - 1}, below most={self.most}, not {self.least}")
        if self.no_repeat < 0:
            raise ValueError(f"no_repeat counts tokens, 0 for no such rule, not {self.no_repeat}")
        if self.end in self.never:
            raise ValueError(f"the end, token {self.end}, cannot be among those that are never said")
        return self

    def __call__(self, scores: Tensor, said: Tensor) -> Tensor:
        """Scores (x v) of the next token with -inf where it may not be, after what has been said (x t)."""
        banned = torch.zeros_like(scores, dtype=torch.bool)
        if self.never:
            banned[:, list(self.never)] = True
        if self.no_repeat and said.shape[1] >= self.no_repeat:
            runs = said.unfold(1, self.no_repeat, 1)  # (x runs no_repeat)
            again = (runs[..., :-1] == said[:, None, said.shape[1] - self.no_repeat + 1 :]).all(-1)
            banned |= torch.zeros_like(scores, dtype=torch.long).scatter_add(1, runs[..., -1], again.long()) > 0
        if said.shape[1] < self.least:
            banned[:, self.end] = True
        nothing = (banned | (scores == -torch.inf)).all(1)
        scores = scores.masked_fill(banned, -torch.inf)
        return torch.where(nothing[:, None] & (torch.arange(scores.shape[1], device=scores.device) == self.end), 0.0, scores)
