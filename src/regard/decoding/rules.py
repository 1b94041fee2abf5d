"""What may not be said: too short an answer, the same few words again, words that are not wanted."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Rules(NamedTuple):
    """Constraints on what comes next. A row that they leave with nothing may end."""

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
        repeats, early = 0 < self.no_repeat <= said.shape[1], said.shape[1] < self.least
        if not (self.never or repeats or early):
            return scores
        scores = scores.clone()
        if self.never:
            scores.index_fill_(1, _tokens(self.never, scores.device), -torch.inf)
        if repeats:
            runs = said.unfold(1, self.no_repeat, 1)  # (x runs no_repeat)
            again = (runs[..., :-1] == said[:, None, said.shape[1] - self.no_repeat + 1 :]).all(-1)
            price = torch.where(again, -torch.inf, torch.inf).to(scores.dtype)
            scores.scatter_reduce_(1, runs[..., -1], price, "amin")
        if early:
            scores[:, self.end] = -torch.inf
        nothing = scores.amax(1) == -torch.inf
        scores[:, self.end].masked_fill_(nothing, 0.0)
        return scores


@lru_cache(maxsize=16)
def _tokens(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device once, not at every step."""
    with torch.inference_mode(False):
        return torch.tensor(tokens, device=device)
