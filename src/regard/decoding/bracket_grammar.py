"""Well-formed brackets as a constraint of decoding: every answer is a tree over the words of its sentence.

Letters: x rows, t generated tokens, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEITHER, OPENS, CLOSES, NAMES_WORD = range(4)  # what a token does


@dataclass(frozen=True)
class BracketGrammar:
    """Allow the tokens that keep an answer a prefix of a tree that can be ended in time.

    A tree opens one bracket, has all words of its sentence inside of it, no constituent without a word, and no more than
    `chain` brackets opened between two words. A bracket opens only where enough tokens are left for all words and for closing
    all brackets, so that no answer is cut off.
    """

    kinds: Tensor  # (v) what each token does
    words: Tensor  # (b) words of each sentence; x is a multiple of b, the rows of a sentence side by side
    eos: int
    room: int  # tokens of an answer at most, eos among them
    chain: int = 8

    def __post_init__(self) -> None:
        fewest, most = int(self.words.min()), int(self.words.max())
        if fewest < 1 or most + 3 > self.room:
            raise ValueError(
                f"sentences of {fewest} to {most} words do not fit into answers of {self.room} tokens: "
                "a tree has a word at least, two brackets and an end"
            )

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the allowed tokens (x v), true or false, behind generated tokens (x t)."""
        kinds = self.kinds[tokens]
        opens, closes, named = kinds == OPENS, kinds == CLOSES, kinds == NAMES_WORD
        depth = opens.sum(1) - closes.sum(1)
        left = self.words.repeat_interleave(len(tokens) // len(self.words)) - named.sum(1)
        t = tokens.shape[1]
        since = torch.arange(t, 0, -1, device=tokens.device)  # tokens since each one, itself counted
        run = torch.where(~opens, since, t + 1).amin(1) - 1 if t else depth  # brackets opened without anything behind them
        inside, free = depth > 0, self.room - t - 1  # tokens behind the next one
        may_name = inside & (left > 0)
        may_close = inside & (run == 0) & ((depth > 1) | (left == 0))
        may_open = (left > 0) & (run < self.chain) & (free >= left + depth + 2) & (inside | (t == 0))
        by_kind = torch.stack([torch.zeros_like(inside), may_open, may_close, may_name], 1)
        allowed = by_kind[:, self.kinds]
        allowed[:, self.eos] = (depth == 0) & (left == 0) & (t > 0)
        return allowed
