"""A language model: a causal stack with scores of the next token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.mixers.state import State
from regard.models.embedding import Embedding


def last_real(x: Tensor, valid: Tensor | None) -> Tensor:
    """Select the last real vector of every row, (b n ...) -> (b ...)."""
    if valid is None:
        return x[:, -1]
    last = (torch.arange(x.shape[1], device=x.device) * valid).amax(1)
    rows = torch.arange(len(x), device=x.device)
    return x[rows, last]


class LanguageModel(nn.Module):
    """Map tokens (b n) to scores (b n v) of the token that follows each; `start` and `extend` do the same token by token.

    `embed` makes vectors of tokens, `stack` is causal, `head` makes scores of vectors. `language_model` builds one.

    >>> import torch
    >>> from regard.blocks import Stack
    >>> from regard.models import LanguageModel, NextToken, Tokens
    >>> stack = Stack.of("gla", width=16, heads=2, depth=1, causal=True)
    >>> model = LanguageModel(Tokens(20, 16), stack, NextToken(16, 20))
    >>> scores, state = model.extend(model.start(2), torch.randint(20, (2, 5)))
    >>> tuple(scores.shape)
    (2, 5, 20)
    """

    def __init__(self, embed: Embedding, stack: Stack, head: nn.Module) -> None:
        super().__init__()
        causal = all(block.mixer.dims.causal for block in stack)
        if stack.reads or not causal:
            raise ValueError("a language model must not see what it is to say: its stack is causal and reads no context")
        self.embed = embed
        self.stack = stack
        self.head = head

    def forward(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        places = self.embed.places(tokens, valid)
        x = self.embed(tokens, places)
        y = self.stack(x, places)
        return self.head(y)

    def start(self, batch: int) -> State:
        return self.stack.start(batch)

    def extend(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        places = self.embed.places(tokens, valid, state)
        x = self.embed(tokens, places)
        y, after = self.stack.extend(state, x, places)
        return self.head(y), after

    def last(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Return the scores (b v) of what follows the last real token alone: n times the vocabulary is not needed."""
        places = self.embed.places(tokens, valid, state)
        x = self.embed(tokens, places)
        y, after = self.stack.extend(state, x, places)
        last = last_real(y, valid)
        return self.head(last[:, None])[:, 0], after
