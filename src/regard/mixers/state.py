"""What a mixer remembers between two calls: a value, whose rows can be taken in any order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def select(value: Any, rows: Tensor, within: bool = False) -> Any:
    """Rows of a state's batch, in any order and number: what beam search needs. Everything in a state is batch-first.

    `within`: a row only ever changes with one that reads the same context, so what is known of the context stays where it is.
    """
    if isinstance(value, Tensor):
        return value.index_select(0, rows)
    if within and isinstance(value, Reading):
        return value
    if isinstance(value, tuple):
        parts = [select(part, rows, within) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def nbytes(value: Any) -> int:
    """Bytes held by a state, spare room included."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, tuple) else 0


class State(NamedTuple):
    """A mixer between two calls of extend: a value. Extending it twice gives two independent futures."""

    memory: Any
    t: Tensor  # (b) real tokens seen so far
    start: int | None  # the same number on the host, where all rows agree

    def select(self, rows: Tensor, within: bool = False) -> State:
        return select(self, rows, within)

    def fan(self, k: int) -> State:
        """Every row k times, side by side: the beams that begin with it."""
        return self.select(torch.arange(len(self.t), device=self.t.device).repeat_interleave(k))

    @property
    def nbytes(self) -> int:
        return nbytes(self.memory)


class Reading(State):
    """That of a mixer which reads a context and adds nothing to it: rows with the same context, as many tokens on, are alike."""

    __slots__ = ()
