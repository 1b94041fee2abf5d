"""The KV cache of a `StaticDecoder`: keys and values of all layers in one tensor of fixed room, and the mask bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.mixers.base import State
from regard.runtime.state_buffers import context_room

if TYPE_CHECKING:
    from regard.runtime.static_step import GraphedStepReplay


def _mask_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: 0 where a key is seen, -inf elsewhere."""
    return torch.where(seen, 0.0, -torch.inf).to(dtype)


class StaticCache:
    """Hold b rows with k beams each, `room` tokens at most, and m tokens of a context (0: there is none).

    On a GPU (`fixed`) beams have two buffers (`sides`): they are copied in their new order from one to the other, so that no
    memory is allocated. The tokens of the prompt, the same for all beams, are in both. On a CPU beams are `spread`: every
    beam writes beside the others of its row and nothing is reordered; the mask bias records which tokens a beam descends from,
    and the k beams are k queries of one row. The tokens of the prompt are stored once.
    """

    def __init__(self, b: int, k: int, room: int, m: int, shape: tuple[int, int, int], like: Tensor, fixed: bool) -> None:
        layers, g, d = shape
        self.b, self.k, self.room, self.m, self.fixed, self.spread = b, k, room, m, fixed, k > 1 and not fixed
        # a CPU appends tokens to rows; a GPU multiplies and copies whole rooms
        side = (layers, 2, b * k, g, room, d) if fixed else (layers, b, room, 2, g, d)
        if self.spread:
            side = (layers, 2, b, g, room * k, d)
        self.sides = [like.new_empty(side) for _ in range(1 + (k > 1 and fixed))]
        self.valid = torch.zeros(b * k, room, dtype=torch.bool, device=like.device)
        seen = (b, 1, k, room * k) if self.spread else (b * k, 1, 1, room)
        self.bias = like.new_zeros(seen)  # the mask bias: 0 or -inf, added to scores
        self.own_bias = _mask_bias(
            torch.eye(k, dtype=torch.bool, device=like.device), like.dtype
        )  # a beam sees its own newest token
        self.at = torch.zeros(b * k, dtype=torch.long, device=like.device)  # position of the next token
        self.slot = torch.zeros(1, dtype=torch.long, device=like.device)  # index of its slot
        self.tokens = torch.zeros(b * k, 1, dtype=torch.long, device=like.device)
        self.rows = torch.arange(b * k, device=like.device)
        self.same = self.rows.clone()
        self.context: list[Any] = [None] * layers  # of each layer: keys, values (b g m d), and a mask bias or None
        if fixed and m:
            k_v = [like.new_zeros(2, b, g, m, d) for _ in range(layers)]
            self.context = [(x[0], x[1], like.new_zeros(b, 1, 1, m)) for x in k_v]
        self.table: Tensor | None = None  # vectors of positions, added to tokens
        self.graphs: list[GraphedStepReplay] = []
        self.size = self.longest = self.side = self.turn = 0
        self.count = 0  # tokens in a row's room, where beams are spread
        self.plain = True

    @staticmethod
    def context_tokens(state: State, fixed: bool) -> int:
        """Return the room of the context that a state reads, in tokens."""
        cross = state.memory[0].memory[1]
        if cross is None:
            return 0
        size = cross.memory.size
        return context_room(size) if fixed else max(size, 1)

    def advance(self) -> None:
        """Count one token more, on the host."""
        self.size, self.longest, self.turn, self.count = self.size + 1, self.longest + 1, self.turn + 1, self.count + self.k

    def load(self, state: State) -> None:
        """Copy the state of a model after its prompt, k times."""
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
                self._load_context(i, cross)
        self.valid.unflatten(0, (self.b, self.k))[:, :, : self.size].copy_(log.valid[:, None, : self.size])
        self._set_bias()
        self.at.copy_(state.t.repeat_interleave(self.k))
        self.slot.fill_(self.size)

    def _set_bias(self) -> None:
        bias = _mask_bias(self.valid, self.bias.dtype)
        if self.spread:
            self.bias[..., : self.size].copy_(bias.view(self.b, 1, self.k, -1)[..., : self.size])
        else:
            self.bias.copy_(bias[:, None, None])

    def _clean(self) -> None:
        self.valid.zero_()
        if self.fixed:  # all of the room is read, behind a mask: masked numbers must be finite
            for side in self.sides:
                side.zero_()

    def _load_context(self, i: int, cross: State) -> None:
        log = cross.memory
        k, v, mask = log.keys, log.values, log.places.valid
        if mask is not None:
            empty = ~mask.any(1)  # rows without a context get zeros
            v, mask = v.masked_fill(empty[:, None, None, None], 0), (mask | empty[:, None])[:, None, None]
        if not self.fixed:
            self.context[i] = (k.contiguous(), v.contiguous(), None if mask is None else _mask_bias(mask, k.dtype))
            return
        keys, values, bias = self.context[i]
        for x, y in ((keys, k), (values, v)):
            x.zero_()[:, :, : log.size].copy_(y)
        bias.fill_(-torch.inf)[..., : log.size].copy_(_mask_bias(mask, bias.dtype) if mask is not None else torch.zeros(()))
        if not log.size:  # an empty context gives zeros
            bias.zero_()

    def take(self, old: StaticCache) -> None:
        """Copy everything from a smaller cache."""
        now = old.sides[old.side]
        self._clean()
        self.size, self.longest, self.plain, self.count = old.size, old.longest, old.plain, old.count
        self.side, self.turn = 0, self.turn + 1
        for side in self.sides:
            (side[..., : now.shape[-2], :] if self.fixed or self.spread else side[:, :, : old.room]).copy_(now)
        self.valid[:, : old.room].copy_(old.valid)
        if self.spread:
            self.bias[..., : old.bias.shape[-1]].copy_(old.bias)
        else:
            self._set_bias()
        for mine, other in ((self.at, old.at), (self.slot, old.slot)):
            mine.copy_(other)
        if self.fixed and self.m:
            for to, has in zip(self.context, old.context, strict=True):
                for x, y in zip(to, has, strict=True):
                    x.copy_(y)
        else:
            self.context = old.context

    def reorder(self, rows: Tensor) -> None:
        """Reorder beams by the rows (r) that they descend from: in the mask bias, or by a copy to the other side."""
        if self.spread:
            seen = self.bias.flatten(0, 2)[:, : self.count]
            seen.copy_(seen.index_select(0, rows))
            return
        now, other = (side.flatten(0, 1).unbind() for side in (self.sides[self.side], self.sides[1 - self.side]))
        for a, b in zip(now, other, strict=True):  # keys of a layer, then its values: a copy of whole rows is the fast one
            torch.index_select(a, 0, rows, out=b)
        self.side = 1 - self.side

    def kept(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (r g room d) of a layer's part of a side; (b g room d) of all beams of a row if spread."""
        if self.fixed or self.spread:
            return own[0], own[1]
        k, v = own.unbind(2)
        return k.transpose(1, 2), v.transpose(1, 2)

    def write(self, own: Tensor, kv: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
        """Write one token, kv (r 2 g d), into a layer's room; return the keys and values (r g m d) to read."""
        if size is None:
            own.index_copy_(3, self.slot, kv.transpose(0, 1)[:, :, :, None])
            return self.kept(own)
        if self.spread:
            at = self.count
            own[:, :, :, at : at + self.k] = kv.unflatten(0, (self.b, self.k)).permute(2, 0, 3, 1, 4)
            return self.kept(own[:, :, :, : at + self.k])
        own[:, size] = kv
        return self.kept(own[:, : size + 1])

    def unmask_newest(self) -> None:
        """Let the newest tokens be seen."""
        if self.spread:
            self.bias[:, 0, :, self.count : self.count + self.k] = self.own_bias
        elif not self.plain:
            self.valid[:, self.size] = True

    def mask(self, size: int | None) -> Tensor | None:
        """Return the mask of the newest token; None: it sees everything."""
        if size is None:
            return self.bias
        if self.spread:
            return self.bias[..., : self.count + self.k]
        return None if self.plain else self.valid[:, None, None, : size + 1]
