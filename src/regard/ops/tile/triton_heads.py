"""Tile attention whose heads differ in what kernels launch: a pass for each kind of head, all of them write one result.

Heads without strides are one kind, whatever their bands and lists; heads in residue classes are one kind for each plan. A kind
reads and writes its heads where those lie, as slices of the tensors of all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.dropout_hash import head_numbers, key_keys, query_keys
from regard.ops.tile.call import Gradients, HeadPlans, PlanHeads, TileCall
from regard.ops.tile.head_pieces import HeadPiece, Heads, split_heads
from regard.ops.tile.tile_launch import TritonPass
from regard.ops.tile.tile_sizes import PairGroup, packed_strides, strides_like
from regard.patterns.tile_list import kernel_plan


def kinds_of_heads(plans: HeadPlans) -> tuple[tuple[int, ...], ...]:
    """Return heads that one pass takes together: those of all plans without strides, and those of each plan with strides."""
    strided = [bool(kernel_plan(own.plan).strided) for own in plans]
    plain = [h for own, apart in zip(plans, strided, strict=True) if not apart for h in own.heads]
    apart = [own.heads for own, apart in zip(plans, strided, strict=True) if apart]
    return (*((tuple(sorted(plain)),) if plain else ()), *apart)


def plans_of_piece(plans: HeadPlans, piece: HeadPiece, heads: int) -> HeadPlans:
    """Return the plans of some heads, which are numbered from 0."""
    number = {h: x for x, h in enumerate(_listed(piece.heads, heads))}
    own = [(one.plan, tuple(number[h] for h in one.heads if h in number)) for one in plans]
    return tuple(PlanHeads(plan, some) for plan, some in own if some)


def _listed(heads: Heads, count: int) -> list[int]:
    return list(range(*heads.indices(count))) if isinstance(heads, slice) else heads


class HeadsPass(TritonPass):
    """The pass of some heads, whose results are those heads of larger tensors."""

    def __init__(self, call: TileCall, piece: HeadPiece, plans: HeadPlans, groups: tuple[PairGroup, ...]) -> None:
        super().__init__(select_heads(call, piece), plans, groups)
        self.piece, self.every = piece, call.q.shape[1]
        self.direct = self.sums == self.dtype and isinstance(piece.heads, slice)
        if self.direct:
            self.out_strides = full_strides(call)[0]

    def write_gradients_as(self, call: TileCall) -> None:
        """Write gradients into those of all heads: for key heads that no other pass has."""
        strides = full_strides(call)[1:]
        self.grads = [(shape, own) for (shape, _), own in zip(self.grads, strides, strict=True)]

    def _dropout_keys(self, call: TileCall) -> tuple[Tensor, Tensor]:
        assert call.seed is not None
        heads = head_numbers(self.b, self.every, self.piece.heads, self.device)[..., None]
        i = torch.arange(self.n, device=self.device) + self.span.t
        j = torch.arange(self.m, device=self.device) + self.span.u
        return query_keys(call.seed, heads, i).contiguous(), key_keys(call.seed, j).contiguous()


def select_heads(call: TileCall, piece: HeadPiece) -> TileCall:
    """Return the call of some heads."""
    bias = None if call.bias is None else call.bias.heads(piece.heads)
    q, k, v = call.q[:, piece.heads], call.k[:, piece.key_heads], call.v[:, piece.key_heads]
    return call._replace(q=q, k=k, v=v, bias=bias)


def full_strides(call: TileCall) -> list[tuple[int, ...]]:
    """Return the strides of the output of all heads, and of the gradients of q, k and v."""
    q = packed_strides(call.q)
    own = [strides_like(x.shape, packed_strides(x)) for x in (call.q, call.k, call.v)]
    return [strides_like((*call.q.shape[:3], call.width), q), *own]


class _Sizes(NamedTuple):
    """Shapes and strides of the results of all heads: out, and the gradients of q, k and v."""

    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]


class MixedHeadsPass:
    """The passes of all kinds of heads of one signature."""

    def __init__(self, call: TileCall, plans: HeadPlans, passes: tuple[HeadsPass, ...]) -> None:
        self.plans, self.passes = plans, passes
        self.size = sum(own.size for own in passes)
        owned = [set(_listed(own.piece.key_heads, call.k.shape[1])) for own in passes]
        self.apart = sum(map(len, owned)) == call.k.shape[1]  # no key head has gradients of two passes
        shapes = ((*call.q.shape[:3], call.width), *(tuple(x.shape) for x in (call.q, call.k, call.v)))
        self.sizes = _Sizes(shapes, tuple(full_strides(call)))
        for own in passes:
            if self._writes(own):
                own.write_gradients_as(call)

    def _writes(self, own: HeadsPass) -> bool:
        """Return whether a pass writes gradients into the tensors of all heads."""
        return self.apart and own.direct and isinstance(own.piece.key_heads, slice)

    def _new(self, number: int, like: Tensor) -> Tensor:
        shape, strides = self.sizes.shapes[number], self.sizes.strides[number]
        return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)

    def forward(self, call: TileCall) -> tuple[Tensor, Tensor]:
        """Return out (b h n width) and log-sum-exp (b h n)."""
        out = self._new(0, call.q)
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
        for own in self.passes:
            heads = own.piece.heads
            found, sums = own.forward(select_heads(call, own.piece), out[:, heads] if own.direct else None)
            lse[:, heads] = sums
            if not own.direct:
                out[:, heads] = found.to(out.dtype)
        return out, lse

    def backward(self, call: TileCall, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Gradients:
        """Return the gradients of q, k, v and of what the bias adds by query."""
        dq, dk, dv = (self._new(number, call.q) for number in (1, 2, 3))
        sums = (dk, dv) if self.apart else tuple(torch.zeros_like(x, dtype=torch.float32) for x in (dk, dv))
        classes = call.bias.by_query if call.bias is not None else None
        by_query = None if classes is None else torch.empty_like(classes, dtype=torch.float32)
        for own in self.passes:
            heads, key_heads = own.piece.heads, own.piece.key_heads
            into = (dq[:, heads], dk[:, key_heads], dv[:, key_heads]) if self._writes(own) else None
            up = None if d_lse is None else d_lse[:, heads].contiguous()
            given = (out[:, heads], lse[:, heads].contiguous(), d_out[:, heads], up)
            found = own.backward(select_heads(call, own.piece), *given, into)
            if by_query is not None:
                _add_heads((by_query,), found[3:], heads, True)
            if into is None:
                _add_heads((dq,), found[:1], heads, True)
                _add_heads(sums, found[1:3], key_heads, self.apart)
        if not self.apart:
            dk, dv = (x.to(call.q.dtype) for x in sums)
        return dq, dk, dv, by_query


def _add_heads(sums: tuple[Tensor, ...], found: Gradients, heads: Heads, apart: bool) -> None:
    """Write what one pass found for its key heads, or add it to that of others."""
    for total, x in zip(sums, found, strict=True):
        assert x is not None
        total[:, heads] = x.to(total.dtype) if apart else total[:, heads] + x


def mixed_pieces(plans: HeadPlans, heads: int, share: int) -> tuple[HeadPiece, ...]:
    """Return the heads that are computed together, with equally many for each of their key heads."""
    return tuple(piece for kind in kinds_of_heads(plans) for piece in split_heads(kind, share, heads))
