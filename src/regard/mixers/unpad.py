"""Mixers that need neighbouring real tokens side by side: padding is moved behind them, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.checks import check_batch, missing_method
from regard.mixers.base import Free
from regard.mixers.dims import Can, need_claims
from regard.mixers.places import Places, mask_padding
from regard.mixers.state import State


class UnpaddedMixer(Free):
    """A mixer that sees the real tokens of a row side by side, so that padding anywhere is as if absent.

    `mix` gets whole sequences, `scan` tokens that follow a memory, in causal order. Places are those of the packed tokens:
    behind the real ones of a row x is zero, and what comes out there is dropped. Neither ever gets an empty tensor.
    """

    def empty(self, batch: int) -> Any:
        """What is remembered before the first token, in batch-first tensors."""
        raise NotImplementedError(
            missing_method(self, "empty(batch)", "a memory without tokens, a NamedTuple of batch-first tensors")
        )

    def mix(self, x: Tensor, places: Places) -> Tensor:
        raise NotImplementedError(missing_method(self, "mix(x, places)", "the outputs (b n w) of the whole sequences x (b n w)"))

    def scan(self, memory: Any, x: Tensor, places: Places) -> tuple[Tensor, Any]:
        raise NotImplementedError(
            missing_method(self, "scan(memory, x, places)", "the outputs (b n w) of the tokens x in causal order, and the memory")
        )

    def forward(self, x: Tensor, *, context: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        self.no_context(context)
        self.check(x)
        self.check_padding(valid, x)
        return self.forward_at(x, Places.of(x, valid))

    def forward_at(
        self,
        x: Tensor,
        places: Places,
        *,
        context: Tensor | None = None,
        context_places: Places | None = None,  # noqa: ARG002
    ) -> Tensor:
        self.no_context(context)
        memory = self.empty(x.shape[0]) if self.dims.causal else None
        return self._unpadded(memory, x, places)[0]

    def start(self, batch: int | None = None, *, context: Tensor | None = None, valid: Tensor | None = None) -> State:
        self._check_streams()
        if batch is None or context is not None or valid is not None:
            raise ValueError(f"a causal {self.name} starts from nothing: start(batch), with the number of sequences")
        check_batch(batch)
        t = torch.zeros(batch, dtype=torch.long, device=next(self.parameters()).device)
        return self.start_at(t)

    def start_at(self, t: Tensor, *, context: Tensor | None = None, context_places: Places | None = None) -> State:  # noqa: ARG002
        self._check_streams()
        memory = self.empty(len(t))
        return State(memory, t, 0, self.maker())

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        self._check_streams()
        self.check(x)
        self.check_state(state, x)
        self.check_padding(valid, x)
        return self.extend_at(state, x, Places.of(x, valid, state.t, state.start))

    def extend_at(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        y, memory = self._unpadded(state.memory, x, places)
        nothing = x.numel() == 0 or self._room(places) == 0
        return y, state if nothing else self.later(state, memory, places)

    def _check_streams(self) -> None:
        need_claims(self.name, self.can, Can.STREAM)
        if not self.dims.causal:
            raise ValueError(f"only a causal {self.name} can stream: build it with causal=True")

    def _unpadded(self, memory: Any, x: Tensor, places: Places) -> tuple[Tensor, Any]:
        """Mix tokens with the real ones of every row in front, and bring the outputs back; zeros at padding."""
        self.check_length(places)
        room = self._room(places)
        if x.numel() == 0 or room == 0:  # no token, or padding alone
            return x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0), memory
        if places.valid is None:
            return self._mixed(memory, x, places)
        order, front = places.unpad_order, places.front(room)
        tokens = x
        if order is not None:
            tokens = x.gather(1, order.there[..., None].expand_as(x))
        y, memory = self._mixed(memory, mask_padding(tokens[:, :room], front.valid), front)
        y = pad(y, (0, 0, 0, x.shape[1] - room))
        if order is not None:
            y = y.gather(1, order.back[..., None].expand_as(y))
        return mask_padding(y, places.valid), memory

    def _mixed(self, memory: Any, x: Tensor, places: Places) -> tuple[Tensor, Any]:
        if self.dims.causal:
            return self.scan(memory, x, places)
        return self.mix(x, places), None

    def _room(self, places: Places) -> int:
        """Return how many tokens of a row can be real: there are weights for max_len of them."""
        n, limit = places.shape[1], self.dims.max_len
        if limit is None or places.start is None:
            return n
        return min(n, limit - places.start)
