"""The state of a mixer between two calls: a value, whose rows can be taken in any order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.checks import check_rows, check_rows_of
from regard.mixers.places import Places


def select(value: Any, rows: Tensor, within: bool = False) -> Any:
    """Take rows of a state's batch, in any order and number, as beam search does. Every tensor in a state is batch-first.

    `within`: a row is only exchanged with one that reads the same context, so the memory of the context is left as it is.

    `value` is a State or any nest of tuples of tensors, `rows` are indices into its batch.

    >>> import torch
    >>> from regard import select
    >>> select((torch.tensor([[1], [2], [3]]), None), torch.tensor([2, 0]))
    (tensor([[3],
            [1]]), None)
    """
    if isinstance(value, State):
        return value.select(rows, within)
    check_rows(rows)
    return _RowSelection(rows, within)(value)


class _RowSelection:
    """Take rows of all tensors in a value. Tensors that layers share are taken once, and shared afterwards too."""

    def __init__(self, rows: Tensor, within: bool) -> None:
        self.rows, self.within = rows, within
        self.taken: dict[int, tuple[Any, Any]] = {}  # by the id of what it was taken of, which is kept too

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor | Places):
            return self._shared(value)
        if self.within and isinstance(value, CrossState):
            return value
        if isinstance(value, tuple):
            parts = [self(part) for part in value]
            if hasattr(value, "_fields"):
                return type(value)(*parts)
            return tuple(parts)
        return value

    def _shared(self, value: Tensor | Places) -> Tensor | Places:
        if torch.compiler.is_compiling():
            return _rows_of(value, self.rows)
        if id(value) not in self.taken:
            self.taken[id(value)] = value, _rows_of(value, self.rows)
        return self.taken[id(value)][1]


def _rows_of(value: Tensor | Places, rows: Tensor) -> Tensor | Places:
    if isinstance(value, Tensor):
        return value.index_select(0, rows)
    return value.select(rows)


def nbytes(value: Any) -> int:
    """Count the bytes of a state, spare room included."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple):
        return sum(map(nbytes, value))
    return 0


class StateOwner(NamedTuple):
    """Identify the layer that made a state: its mechanism and sizes as a text, and the type of its weights."""

    layer: str
    dtype: torch.dtype


class State(NamedTuple):
    """Hold a mixer between two calls of extend: a value. Extended twice, it gives two independent continuations.

    `memory` is the mechanism's own, `t` (b) counts the tokens read, `start` is their number where all rows agree on it, and
    `maker` the layer that it belongs to. `mixer.start` makes one.

    >>> import torch
    >>> from regard import layer
    >>> mixer = layer("linear", width=16, heads=2, causal=True)
    >>> _, state = mixer.extend(mixer.start(2), torch.randn(2, 5, 16))
    >>> state.t
    tensor([5, 5])
    >>> state.select(torch.tensor([1, 1, 0])).t
    tensor([5, 5, 5])
    """

    memory: Any
    t: Tensor  # (b) real tokens seen so far
    start: int | None  # the same number on the host, where all rows agree
    maker: StateOwner | None = None  # of the state of one layer; the state of several holds theirs

    def select(self, rows: Tensor, within: bool = False) -> State:
        """Take rows of the batch, in any order and number."""
        check_rows_of(rows, len(self.t), self.t.device)
        return _RowSelection(rows, within)(self)

    def fan(self, k: int) -> State:
        """Repeat every row k times, side by side: the beams that begin with it."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a positive integer, the number of beams, not {k!r}")
        rows = torch.arange(len(self.t), device=self.t.device)
        return self.select(rows.repeat_interleave(k))

    @property
    def nbytes(self) -> int:
        return nbytes(self.memory)


class CrossState(State):
    """Hold a mixer that reads a context and adds nothing to it: rows with the same context and as many tokens are equal."""

    __slots__ = ()


def check_state(state: Any, x: Tensor) -> None:
    """Raise where a value is no state of as many sequences, on the same device, as the tokens x (b n w)."""
    if not isinstance(state, State):
        raise TypeError(f"a state comes from start or from extend, and {type(state).__name__} does not: begin with start(batch)")
    held, given = state.t.shape[0], x.shape[0]
    if held != given:
        raise ValueError(f"the state holds {held} sequences but x has {given}: start with that many, or select rows of it")
    if state.t.device != x.device:
        raise ValueError(f"the state is on {state.t.device} but x is on {x.device}: start anew on that device")


def check_states(state: Any, x: Tensor, parts: int, what: str) -> None:
    """Raise where a value is no state of a `what` of so many parts."""
    check_state(state, x)
    memory = state.memory
    right_number = type(memory) is tuple and len(memory) == parts
    if not right_number or not all(part is None or isinstance(part, State) for part in memory):
        raise ValueError(f"the state belongs to another kind of module than this {what}: use the one that its start gave")
