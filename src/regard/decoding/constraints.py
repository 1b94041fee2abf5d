"""What may not be said: too short an answer, the same few words again, words that are not wanted."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

PADDING = -1  # of a prompt: no token


class Rules(NamedTuple):
    """Constraints on what comes next. A row that they leave with nothing may end.

    `no_repeat` counts the runs of tokens in the answer alone: it may say again what stands in the prompt. With count_prompt=True
    the prompt's runs count too, which is Hugging Face's `no_repeat_ngram_size`. Where an encoder reads the source, the prompt is
    what the decoder begins with, and the source is not counted, there as here.
    """

    end: int  # the token that ends an answer
    most: int  # tokens of an answer at most, the end among them
    least: int = 0  # tokens before the end at least
    no_repeat: int = 0  # no run of so many tokens comes twice; 0: it may
    never: tuple[int, ...] = ()  # tokens that are not said at all
    count_prompt: bool = False  # no_repeat looks into the prompt too

    def checked(self) -> Rules:
        """Itself, or a sentence about what is wrong with it."""
        if self.most < 1:
            raise ValueError(f"most must be at least 1 token, not {self.most}")
        if not 0 <= self.least < self.most:
            raise ValueError(f"least must be from 0 to {self.most - 1}, below most={self.most}, not {self.least}")
        if self.no_repeat < 0:
            raise ValueError(f"no_repeat counts tokens, 0 for no such rule, not {self.no_repeat}")
        if self.count_prompt and not self.no_repeat:
            raise ValueError("count_prompt=True is for no_repeat, which is 0 here: leave it out, or set no_repeat")
        if self.end in self.never:
            raise ValueError(f"the end, token {self.end}, cannot be among those that are never said")
        return self

    def prompt(self, prompt: Tensor, valid: Tensor | None = None) -> Tensor | None:
        """What `__call__` needs of a prompt (x p): its real tokens behind its padding. None where it is not counted."""
        if not self.count_prompt or valid is None:
            return prompt if self.count_prompt else None
        order = valid.long().argsort(dim=1, stable=True)
        return prompt.masked_fill(~valid, PADDING).gather(1, order)

    def __call__(self, scores: Tensor, said: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Scores (x v) of the next token with -inf where it may not be, after what was said (x t) behind a `prompt` (x p)."""
        early = said.shape[1] < self.least
        if prompt is not None:
            said = torch.cat([prompt, said], 1)
        repeats = 0 < self.no_repeat <= said.shape[1]
        if not (self.never or repeats or early):
            return scores
        scores = scores.clone()
        if self.never:
            scores.index_fill_(1, _tokens(self.never, scores.device), -torch.inf)
        if repeats:
            runs = said.unfold(1, self.no_repeat, 1)  # (x runs no_repeat)
            again = (runs[..., :-1] == said[:, None, said.shape[1] - self.no_repeat + 1 :]).all(-1)
            last = runs[..., -1]
            if prompt is not None:  # which may hold padding, and tokens that are never said
                again, last = again & (last >= 0) & (last < scores.shape[1]), last.clamp(0, scores.shape[1] - 1)
            price = torch.where(again, -torch.inf, torch.inf).to(scores.dtype)
            scores.scatter_reduce_(1, last, price, "amin")
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
