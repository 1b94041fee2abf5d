"""A language model: a causal stack that says what comes next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.mixers.state import State
from regard.models.embedding import Embedding


def last_real(x: Tensor, valid: Tensor | None) -> Tensor:
    """The last real one of every row, (b n ...) -> (b ...)."""
    if valid is None:
        return x[:, -1]
    last = (torch.arange(x.shape[1], device=x.device) * valid).amax(1)
    return x[torch.arange(len(x), device=x.device), last]


class LanguageModel(nn.Module):
    """(b n) tokens -> (b n v) scores of the token that follows each; `start` and `extend` do the same token by token."""

    def __init__(self, embed: Embedding, stack: Stack, head: nn.Module) -> None:
        super().__init__()
        if stack.reads or not all(block.mixer.dims.causal for block in stack):
            raise ValueError("a language model must not see what it is to say: its stack is causal and reads no context")
        self.embed, self.stack, self.head = embed, stack, head

    def forward(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        places = self.embed.places(tokens, valid)
        return self.head(self.stack(self.embed(tokens, places), places))

    def start(self, batch: int) -> State:
        return self.stack.start(batch)

    def extend(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        places = self.embed.places(tokens, valid, state)
        y, after = self.stack.extend(state, self.embed(tokens, places), places)
        return self.head(y), after

    def last(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Return the scores (b v) of what follows the last real token alone: n times the vocabulary is not needed."""
        places = self.embed.places(tokens, valid, state)
        y, after = self.stack.extend(state, self.embed(tokens, places), places)
        return self.head(last_real(y, valid)[:, None])[:, 0], after
