"""Constraints on generated tokens: lengths, repeated n-grams, banned tokens, a grammar."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

PROMPT_PADDING = -1  # padding of a prompt: no token


class Constraints(NamedTuple):
    """Constrain what comes next. A row that they leave without a token may end.

    `no_repeat_ngram_size` counts the n-grams of the answer alone: those of the prompt may come again. With count_prompt=True
    the n-grams of the prompt count too, which is Hugging Face's `no_repeat_ngram_size`. The source of an
    encoder is not counted, there as here.

    `eos` ends an answer of at most `max_new_tokens` tokens (the end among them) and at least `min_new_tokens` before it; tokens
    in `banned` are never chosen. `grammar` maps the tokens so far (x t) to those that may follow (x v), as `BracketGrammar` does.

    >>> import torch
    >>> from regard.decoding import Constraints
    >>> limits = Constraints(eos=0, max_new_tokens=9, min_new_tokens=1, banned=(2,))
    >>> limits(torch.zeros(1, 4), torch.zeros(1, 0, dtype=torch.long))  # scores of the first token
    tensor([[-inf, 0., -inf, 0.]])
    """

    eos: int  # the token that ends an answer
    max_new_tokens: int  # tokens of an answer at most, the end among them
    min_new_tokens: int = 0  # tokens before the end at least
    no_repeat_ngram_size: int = 0  # no n-gram of this size comes twice; 0: no constraint
    banned: tuple[int, ...] = ()  # tokens that are never chosen
    count_prompt: bool = False  # n-grams of the prompt count too
    grammar: Callable[[Tensor], Tensor] | None = None  # allowed tokens (x v) behind generated ones (x t): BracketGrammar

    def checked(self) -> Constraints:
        """Return the constraints; raise a ValueError where they contradict each other."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens < self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be from 0 to {self.max_new_tokens - 1}, below max_new_tokens={self.max_new_tokens}, "
                f"not {self.min_new_tokens}"
            )
        if self.no_repeat_ngram_size < 0:
            raise ValueError(f"no_repeat_ngram_size counts tokens, 0 for no such constraint, not {self.no_repeat_ngram_size}")
        if self.count_prompt and not self.no_repeat_ngram_size:
            raise ValueError("count_prompt=True is for no_repeat_ngram_size, which is 0 here: leave it out, or set it")
        if self.eos in self.banned:
            raise ValueError(f"eos, token {self.eos}, cannot be among the banned tokens")
        return self

    def prompt(self, prompt: Tensor, valid: Tensor | None = None) -> Tensor | None:
        """Return a prompt (x p) with its real tokens behind its padding, as `__call__` needs it; None where it is not counted."""
        if not self.count_prompt or valid is None:
            return prompt if self.count_prompt else None
        order = valid.long().argsort(dim=1, stable=True)
        return prompt.masked_fill(~valid, PROMPT_PADDING).gather(1, order)

    def __call__(self, scores: Tensor, tokens: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Set scores (x v) of forbidden tokens to -inf, after generated `tokens` (x t) behind a `prompt` (x p)."""
        early = tokens.shape[1] < self.min_new_tokens
        allowed = None if self.grammar is None else self.grammar(tokens)
        if prompt is not None:
            tokens = torch.cat([prompt, tokens], 1)
        repeats = 0 < self.no_repeat_ngram_size <= tokens.shape[1]
        if not (self.banned or repeats or early or allowed is not None):
            return scores
        scores = scores.clone() if allowed is None else scores.masked_fill(~allowed, -torch.inf)
        if self.banned:
            scores.index_fill_(1, _tokens(self.banned, scores.device), -torch.inf)
        if repeats:
            runs = tokens.unfold(1, self.no_repeat_ngram_size, 1)  # (x runs size)
            again = (runs[..., :-1] == tokens[:, None, tokens.shape[1] - self.no_repeat_ngram_size + 1 :]).all(-1)
            last = runs[..., -1]
            if prompt is not None:  # which may hold padding, and tokens outside of the vocabulary
                again, last = again & (last >= 0) & (last < scores.shape[1]), last.clamp(0, scores.shape[1] - 1)
            bound = torch.where(again, -torch.inf, torch.inf).to(scores.dtype)
            scores.scatter_reduce_(1, last, bound, "amin")
        if early:
            scores[:, self.eos] = -torch.inf
        nothing = scores.amax(1) == -torch.inf
        scores[:, self.eos].masked_fill_(nothing, 0.0)
        return scores


@lru_cache(maxsize=16)
def _tokens(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Keep banned tokens on the device: they are copied once, not at every step."""
    with torch.inference_mode(False):
        return torch.tensor(tokens, device=device)
