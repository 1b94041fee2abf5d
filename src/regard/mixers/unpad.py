"""Real tokens to the front of their row and back: for whoever needs neighbours to stand side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.checks import check_batch
from regard.mixers.base import Can, Free, Places, State, need_claims
from regard.transforms import may_read_data


class UnpadOrder(NamedTuple):
    there: Tensor  # (b n) which token comes to each place
    back: Tensor  # (b n) where each token went
    real: Tensor  # (b n) which places hold a real token


def unpad_order(valid: Tensor) -> UnpadOrder | None:
    """Real tokens to the front; None where they are there already, which only a CPU can see for free."""
    if may_read_data(valid) and bool((valid[:, 1:] <= valid[:, :-1]).all()):
        return None
    there = (~valid).long().argsort(dim=1, stable=True)
    return UnpadOrder(there, there.argsort(dim=1), torch.arange(valid.shape[1], device=valid.device) < valid.sum(1, keepdim=True))


class UnpaddedMixer(Free):
    """A mixer that sees the real tokens of a row side by side, so that padding anywhere is as if absent.

    `mix` gets whole sequences, `scan` tokens that stand behind a memory, in causal order. Places are those of the packed tokens:
    behind the real ones of a row x is zero, and what comes out there is dropped. Neither ever gets an empty tensor.
    """

    def empty(self, batch: int) -> Any:
        """What is remembered before the first token, in batch-first tensors."""
        raise NotImplementedError

    def mix(self, x: Tensor, places: Places) -> Tensor:
        raise NotImplementedError

    def scan(self, memory: Any, x: Tensor, places: Places) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def forward(self, x: Tensor, *, context: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        self.no_context(context)
        self.check(x)
        return self._packed(self._nothing(x.shape[0], x.device), x, valid)[0]

    def start(self, batch: int | None = None, *, context: Tensor | None = None, valid: Tensor | None = None) -> State:
        self._streams()
        if batch is None or context is not None or valid is not None:
            raise ValueError(f"a causal {self.name} starts from nothing: start(batch), with the number of sequences")
        check_batch(batch)
        return self._nothing(batch, next(self.parameters()).device)._replace(maker=self.maker())

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        self._streams()
        self.check(x)
        self.check_state(state, x)
        return self._packed(state, x, valid)

    def _streams(self) -> None:
        need_claims(self.name, self.can, Can.STREAM)
        if not self.dims.causal:
            raise ValueError(f"only a causal {self.name} can stream: build it with causal=True")

    def _nothing(self, batch: int, device: torch.device) -> State:
        memory = self.empty(batch) if self.dims.causal else None
        return State(memory, torch.zeros(batch, dtype=torch.long, device=device), 0)

    def _packed(self, state: State, x: Tensor, valid: Tensor | None) -> tuple[Tensor, State]:
        self.check_padding(valid, x)
        places = Places.of(x, valid, state.t, state.start)
        self.check_length(places)
        room = self._room(state, x.shape[1])
        if x.numel() == 0 or room == 0:  # nothing, or nothing but padding
            return x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0), state
        if valid is None:
            y, memory = self._mixed(state.memory, x, places)
            return y, self.later(state, memory, places)
        order = unpad_order(valid)
        tokens, real = (x, valid) if order is None else (x.gather(1, order.there[..., None].expand_as(x)), order.real)
        tokens, real = tokens[:, :room].masked_fill(~real[:, :room, None], 0), real[:, :room]
        front = Places.of(tokens, real, state.t, state.start)
        y, memory = self._mixed(state.memory, tokens, front)
        y = pad(y, (0, 0, 0, x.shape[1] - room))
        y = y if order is None else y.gather(1, order.back[..., None].expand_as(y))
        return y.masked_fill(~valid[..., None], 0), self.later(state, memory, front)

    def _mixed(self, memory: Any, x: Tensor, places: Places) -> tuple[Tensor, Any]:
        return self.scan(memory, x, places) if self.dims.causal else (self.mix(x, places), None)

    def _room(self, state: State, n: int) -> int:
        """How many packed tokens can be real: behind the longest sequence there is only padding, and no weight for it."""
        limit = self.dims.max_len
        return n if limit is None or state.start is None else min(n, limit - state.start)
