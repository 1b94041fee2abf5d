"""Attention that looks a few tokens ahead, as a stream: a query waits until its last key is there.

Letters: b batch, h heads, n tokens, p waiting queries, d key dim, w width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.mixers.places import Places
from regard.mixers.state import State
from regard.patterns import Band, Pattern

if TYPE_CHECKING:
    from regard.mixers.attention import Attention


class Waiting(NamedTuple):
    """The keys that were read, and the newest queries, whose last keys are still to come."""

    memory: Any
    q: Tensor  # (b h p d), p at most the latency


def pattern_ahead(patterns: Sequence[Pattern]) -> int | None:
    """Return how many tokens ahead the queries of any head see; None: without a bound, or with the length of the sequence."""
    reaches = []
    for pattern in patterns:
        if pattern.depends_on_length:
            return None
        for atoms in pattern.alternatives():
            bounds = [atom.ahead for atom in atoms if isinstance(atom, Band) and atom.ahead is not None]
            if not bounds:
                return None
            reaches.append(min(bounds))
    return max(reaches, default=0)


def extend_waiting(layer: Attention, state: State, x: Tensor, latency: int) -> tuple[Tensor, State]:
    """Return the outputs (b n' w) of the queries that have all of their keys after n more tokens x (b n w), and the state.

    After t tokens, max(t - latency, 0) outputs have been returned, each what the whole pass gives for its token.
    """
    waiting, places = state.memory, Places.of(x, None, state.t, state.start)
    layer.check_length(places)
    if x.shape[1] == 0:
        return x, state
    q, k, v = layer.heads(x, places)
    memory = layer.core.push(waiting.memory, k, v, places)
    q = torch.cat([waiting.q, q], 2)
    ready = max(q.shape[2] - latency, 0)
    y = layer.answer_waiting(memory, q[:, :, :ready], _first(state))
    after = layer.later(state, None, places)
    left = q[:, :, ready:].clone()  # not a view: it would keep all queries
    memory = layer.core.forget(memory, after.t - left.shape[2])
    return y, after._replace(memory=Waiting(memory, left))


def finish_waiting(layer: Attention, state: State) -> Tensor:
    """Return the outputs (b p w) of the queries that still wait, at the end of a sequence."""
    return layer.answer_waiting(state.memory.memory, state.memory.q, _first(state))


def _first(state: State) -> int:
    """Return the position of the first query that waits."""
    assert state.start is not None  # a stream without padding
    return state.start - state.memory.q.shape[2]
