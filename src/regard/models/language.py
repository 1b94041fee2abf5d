"""A language model: a causal stack that says what comes next."""

from __future__ import annotations

from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.mixers.base import State
from regard.models.embed import Embedding


class LanguageModel(nn.Module):
    """(b n) tokens -> (b n v) scores of the token that follows each; `start` and `extend` do the same token by token."""

    def __init__(self, embed: Embedding, stack: Stack, head: nn.Module) -> None:
        super().__init__()
        if stack.reads or not all(block.mixer.dims.causal for block in stack):
            raise ValueError("a language model must not see what it is to say: its stack is causal and reads no context")
        self.embed, self.stack, self.head = embed, stack, head

    def forward(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.head(self.stack(self.embed(tokens, valid), valid))

    def start(self, batch: int) -> State:
        return self.stack.start(batch)

    def extend(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        y, after = self.stack.extend(state, self.embed(tokens, valid, state), valid)
        return self.head(y), after
