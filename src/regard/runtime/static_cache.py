"""The room that a ready model writes in: the keys and values of every layer, in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.mixers.base import State

if TYPE_CHECKING:
    from regard.runtime.static_step import GraphedStepReplay

CONTEXT_MULTIPLE = 32  # with graphs a source gets room in multiples of this many tokens, so that few graphs do for many sources


def _mask_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(seen, 0.0, -torch.inf).to(dtype)


class StaticCache:
    """b rows with k beams each, `room` tokens at most, m tokens of a source (0: there is none).

    On a GPU (`fixed`) beams need two sides: they are copied in their new order from one to the other, so no page is new and none
    is in its own way. What was read before they parted is alike for all of them and lies on both. On a host they are `spread`:
    every beam writes beside the others of its row and nothing is reordered; a mask says which of them a beam comes from, and the
    k beams are k queries of one row. What was read before they parted lies there once.
    """

    def __init__(self, b: int, k: int, room: int, m: int, shape: tuple[int, int, int], like: Tensor, fixed: bool) -> None:
        layers, g, d = shape
        self.b, self.k, self.room, self.m, self.fixed, self.spread = b, k, room, m, fixed, k > 1 and not fixed
        # a host appends tokens to rows; a GPU multiplies and copies whole rooms
        side = (layers, 2, b * k, g, room, d) if fixed else (layers, b, room, 2, g, d)
        if self.spread:
            side = (layers, 2, b, g, room * k, d)
        self.sides = [like.new_empty(side) for _ in range(1 + (k > 1 and fixed))]
        self.valid = torch.zeros(b * k, room, dtype=torch.bool, device=like.device)
        seen = (b, 1, k, room * k) if self.spread else (b * k, 1, 1, room)
        self.price = like.new_zeros(seen)  # the same as what is added to scores: 0 or -inf
        self.apart = _mask_bias(torch.eye(k, dtype=torch.bool, device=like.device), like.dtype)  # a beam sees what it says itself
        self.at = torch.zeros(b * k, dtype=torch.long, device=like.device)  # where the next token stands
        self.slot = torch.zeros(1, dtype=torch.long, device=like.device)  # where it is written
        self.tokens = torch.zeros(b * k, 1, dtype=torch.long, device=like.device)
        self.rows = torch.arange(b * k, device=like.device)
        self.same = self.rows.clone()
        self.heard: list[Any] = [None] * layers  # of each: keys, values (b g m d), and a mask or None
        if fixed and m:
            k_v = [like.new_zeros(2, b, g, m, d) for _ in range(layers)]
            self.heard = [(x[0], x[1], like.new_zeros(b, 1, 1, m)) for x in k_v]
        self.table: Tensor | None = None  # vectors of positions, to be added
        self.graphs: list[GraphedStepReplay] = []
        self.size = self.longest = self.side = self.turn = 0
        self.count = 0  # tokens that lie in a row's room, where beams are spread
        self.plain = True

    @staticmethod
    def sources(state: State, fixed: bool) -> int:
        cross = state.memory[0].memory[1]
        if cross is None:
            return 0
        size = max(cross.memory.size, 1)
        return -(-size // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE if fixed else size

    def went(self) -> None:
        self.size, self.longest, self.turn, self.count = self.size + 1, self.longest + 1, self.turn + 1, self.count + self.k

    def load(self, state: State) -> None:
        """All that a model knows after its prompt, k times."""
        log = state.memory[0].memory[0].memory
        self.size, self.count, self.plain, self.side, self.turn = log.size, log.size, log.plain, 0, self.turn + 1
        self.longest = state.start if state.start is not None else int(state.t.max())
        self._clean()
        for i, part in enumerate(state.memory):
            own, cross = part.memory
            for side in self.sides:
                for x, y in zip(self.kept(side[i]), (own.memory.keys, own.memory.values), strict=True):
                    x.unflatten(0, (self.b, -1))[..., : self.size, :].copy_(y[:, None])
            if cross is not None:
                self._hear(i, cross)
        self.valid.unflatten(0, (self.b, self.k))[:, :, : self.size].copy_(log.valid[:, None, : self.size])
        self._priced()
        self.at.copy_(state.t.repeat_interleave(self.k))
        self.slot.fill_(self.size)

    def _priced(self) -> None:
        price = _mask_bias(self.valid, self.price.dtype)
        if self.spread:
            self.price[..., : self.size].copy_(price.view(self.b, 1, self.k, -1)[..., : self.size])
        else:
            self.price.copy_(price[:, None, None])

    def _clean(self) -> None:
        self.valid.zero_()
        if self.fixed:  # all of the room is looked at, behind a mask: what is hidden must be a number
            for side in self.sides:
                side.zero_()

    def _hear(self, i: int, cross: State) -> None:
        log = cross.memory
        k, v, mask = log.keys, log.values, log.places.valid
        if mask is not None:
            lost = ~mask.any(1)  # who has nothing to read hears nothing
            v, mask = v.masked_fill(lost[:, None, None, None], 0), (mask | lost[:, None])[:, None, None]
        if not self.fixed:
            self.heard[i] = (k.contiguous(), v.contiguous(), None if mask is None else _mask_bias(mask, k.dtype))
            return
        keys, values, price = self.heard[i]
        for x, y in ((keys, k), (values, v)):
            x.zero_()[:, :, : log.size].copy_(y)
        price.fill_(-torch.inf)[..., : log.size].copy_(_mask_bias(mask, price.dtype) if mask is not None else torch.zeros(()))
        if not log.size:  # nothing was read: zeros are heard
            price.zero_()

    def take(self, old: StaticCache) -> None:
        """Everything from a smaller desk."""
        now = old.sides[old.side]
        self._clean()
        self.size, self.longest, self.plain, self.count = old.size, old.longest, old.plain, old.count
        self.side, self.turn = 0, self.turn + 1
        for side in self.sides:
            (side[..., : now.shape[-2], :] if self.fixed or self.spread else side[:, :, : old.room]).copy_(now)
        self.valid[:, : old.room].copy_(old.valid)
        if self.spread:
            self.price[..., : old.price.shape[-1]].copy_(old.price)
        else:
            self._priced()
        for mine, other in ((self.at, old.at), (self.slot, old.slot)):
            mine.copy_(other)
        if self.fixed and self.m:
            for to, has in zip(self.heard, old.heard, strict=True):
                for x, y in zip(to, has, strict=True):
                    x.copy_(y)
        else:
            self.heard = old.heard

    def reorder(self, rows: Tensor) -> None:
        """Beams by the rows (r) that they come from: as what each of them sees, or onto the other side."""
        if self.spread:
            seen = self.price.flatten(0, 2)[:, : self.count]
            seen.copy_(seen.index_select(0, rows))
            return
        now, other = (side.flatten(0, 1).unbind() for side in (self.sides[self.side], self.sides[1 - self.side]))
        for a, b in zip(now, other, strict=True):  # keys of a layer, then its values: a copy of whole rows is the fast one
            torch.index_select(a, 0, rows, out=b)
        self.side = 1 - self.side

    def kept(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values (r g room d) of a layer's part of a side; (b g room d) of all beams of a row if spread."""
        if self.fixed or self.spread:
            return own[0], own[1]
        k, v = own.unbind(2)
        return k.transpose(1, 2), v.transpose(1, 2)

    def write(self, own: Tensor, kv: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
        """One token more in a layer's room, kv (r 2 g d); the keys and values (r g m d) to look at."""
        if size is None:
            own.index_copy_(3, self.slot, kv.transpose(0, 1)[:, :, :, None])
            return self.kept(own)
        if self.spread:
            at = self.count
            own[:, :, :, at : at + self.k] = kv.unflatten(0, (self.b, self.k)).permute(2, 0, 3, 1, 4)
            return self.kept(own[:, :, :, : at + self.k])
        own[:, size] = kv
        return self.kept(own[:, : size + 1])

    def open(self) -> None:
        """Let the newest tokens be seen."""
        if self.spread:
            self.price[:, 0, :, self.count : self.count + self.k] = self.apart
        elif not self.plain:
            self.valid[:, self.size] = True

    def mask(self, size: int | None) -> Tensor | None:
        """What the newest token may see; None: all of it."""
        if size is None:
            return self.price
        if self.spread:
            return self.price[..., : self.count + self.k]
        return None if self.plain else self.valid[:, None, None, : size + 1]
