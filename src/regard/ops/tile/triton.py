"""The backend "triton": fused kernels for tile attention, forward and backward, on CUDA devices.

float16, bfloat16 and float32 with float32 sums; any length, grouped heads without copies, padding, ALiBi, relative positions,
dropout by pair. Results are deterministic. What the kernels do not compute (float64, very wide heads) is refused with a sentence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache import bounded_cache
from regard.ops.dropout_hash import head_numbers, keep_threshold, key_keys, query_keys
from regard.ops.tile.call import Gradients, HeadPlans, TileCall
from regard.ops.triton_support import HALVES, WIDEST_HEAD, block_of, dot_precision, kernel_config, triton_cannot_run
from regard.patterns.tile_list import TILE, KernelItems, KernelPlan, StridedBand, kernel_items, kernel_plan
from regard.patterns.tiles import MASKED_SCORE, ceil_div

WIDEST_FLOAT_HEAD = 128  # the tiles of wider ones do not fit into the shared memory of a multiprocessor
MASS_ROWS, MASS_COLUMNS = 64, 32  # queries and distance classes of a program that writes weights of classes
FURTHEST = 1 << 31  # elements of one head that 32-bit offsets reach


class _Group(NamedTuple):
    """Pairs that one launch computes: a plain band, the tiles of items, or a band in residue classes."""

    band: tuple[int, int] | None = None  # back, ahead, in steps
    by_query: KernelItems | None = None
    by_key: KernelItems | None = None
    strided: StridedBand | None = None
    size: int = 0


class TritonTiles:
    """Tile attention in Triton kernels."""

    name = "triton"
    devices = ("cuda",)

    def refuses(self, call: TileCall, plans: HeadPlans) -> str | None:
        if why := triton_cannot_run(call.q, call.k, call.v):
            return why
        widest = WIDEST_FLOAT_HEAD if call.q.dtype == torch.float32 else WIDEST_HEAD
        if max(call.q.shape[-1], call.v.shape[-1]) > widest:
            return f"a head has at most {widest} columns of this type, here {max(call.q.shape[-1], call.v.shape[-1])}"
        if not call.q.dtype == call.k.dtype == call.v.dtype:
            return f"queries, keys and values are of one type, here {call.q.dtype}, {call.k.dtype} and {call.v.dtype}"
        if any(x.shape[2] * x.stride(2) >= FURTHEST for x in (call.q, call.k, call.v)):
            return "a head of one sequence reaches over more than 2^31 elements"
        return _refused_classes(call) or _refused(plans)

    def forward(self, call: TileCall, plans: HeadPlans) -> tuple[Tensor, Tensor]:
        return TritonPass(call, plans).forward()

    def backward(
        self, call: TileCall, plans: HeadPlans, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        return TritonPass(call, plans).backward(out, lse, d_out, d_lse)


def _refused_classes(call: TileCall) -> str | None:
    if call.bias is None or (call.bias.by_query is None and not call.bias.mass):
        return None
    _, h, n, _ = call.q.shape
    if h * n * (call.v.shape[-1] + call.bias.classes) >= FURTHEST:
        return f"the {call.bias.classes} distance classes of one sequence have more than 2^31 elements"
    return None


def _refused(plans: HeadPlans) -> str | None:
    every = [kernel_plan(own.plan) for own in plans]
    if any(plan.strided for plan in every) and len(every) > 1:
        return "heads have strides of their own"
    return next((plan.refused for plan in every if plan.refused), None)


@bounded_cache(lambda groups: sum(group.size for group in groups))
def _groups(plans: HeadPlans, heads: int, share: int, device: torch.device) -> tuple[_Group, ...]:
    """Return what is launched for a call, in order."""
    span = plans[0].plan.span
    every = [kernel_plan(own.plan) for own in plans]
    if len(every) == 1 and every[0].by_query is None:
        plain = [_Group(every[0].band)] if every[0].band is not None else []
        return (*plain, *(_Group(strided=x) for x in every[0].strided))
    by_head: dict[int, KernelPlan] = {}
    for own, plan in zip(plans, every, strict=True):
        by_head.update(dict.fromkeys(own.heads, plan))
    each = (every[0],) if len(every) == 1 else tuple(by_head[h] for h in range(heads))
    by_query = kernel_items(each, share, span.n, False, device)
    by_key = kernel_items(each, share, span.m, True, device)
    size = sum(x.items.numel() + x.entries.numel() + x.masks.numel() for x in (by_query, by_key))
    return (_Group((0, 0), by_query, by_key, size=size),)


def _rows_contiguous(x: Tensor) -> Tensor:
    """Return x with the elements of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Allocate (b h n width) in the order of x: heads of a token side by side, or tokens of a head."""
    b, h, n = x.shape[:3]
    if x.stride(1) < x.stride(2):
        return torch.empty(b, n, h, width, dtype=dtype, device=x.device).transpose(1, 2)
    return torch.empty(b, h, n, width, dtype=dtype, device=x.device)


class TritonPass:
    """The launches of one call."""

    def __init__(self, call: TileCall, plans: HeadPlans) -> None:
        self.call, self.device = call, call.q.device
        self.q, self.k, self.v = (_rows_contiguous(x) for x in (call.q, call.k, call.v))
        (self.b, self.h, self.n, self.d), self.g = self.q.shape, self.k.shape[1]
        self.m, self.e = self.v.shape[2:]
        self.span = plans[0].plan.span
        self.groups = _groups(plans, self.h, self.h // self.g, self.device)
        self.valid = None if call.valid is None else call.valid.contiguous().view(torch.uint8)
        self.slopes = None if call.bias is None or call.bias.slopes is None else call.bias.slopes.float().contiguous()
        self.keys = self._dropout_keys() if call.dropout else None
        by_query = None if call.bias is None else call.bias.by_query
        self.by_query = None if by_query is None else by_query.float().contiguous()
        self.mass = call.bias is not None and call.bias.mass
        self.clip = 0 if call.bias is None else call.bias.clip

    def _dropout_keys(self) -> tuple[Tensor, Tensor]:
        """Return the keys of queries (b h n) and of keys (m), for the hash of a pair."""
        seed = self.call.seed
        assert seed is not None
        heads = head_numbers(self.b, self.h, slice(None), self.device)[..., None]
        i = torch.arange(self.n, device=self.device) + self.span.t
        j = torch.arange(self.m, device=self.device) + self.span.u
        return query_keys(seed, heads, i).contiguous(), key_keys(seed, j).contiguous()

    def _flags(self, group: _Group, number: int) -> dict[str, Any]:
        """Return the constants that a kernel is compiled for."""
        itemised = group.by_query is not None
        return {
            "R": self.h // self.g,
            "D": self.d,
            "E": self.e,
            "BD": block_of(self.d, self.device),
            "BE": block_of(self.e, self.device),
            "ITEMISED": itemised,
            "SHARED": group.by_query is not None and group.by_query.shared,
            "MORE": number > 0,
            "STEPPED": group.strided is not None,
            "HOLE": group.strided is not None and number > 0,
            "VALIDS": self.valid is not None,
            "SLOPED": self.slopes is not None,
            "CLASSED": self.by_query is not None,
            "MASSED": self.mass,
            "DROP": self.keys is not None,
            "PRECISION": dot_precision(self.q.dtype),
        }

    def _numbers(self, group: _Group) -> tuple:
        """Return the numbers that all kernels take: lengths, positions, the band and its hole, classes, scale and dropout."""
        back, ahead = group.band or (0, 0)
        hole, step = (0, 0), 1
        if group.strided is not None:
            x = group.strided
            step = x.step
            back, ahead = x.back // step, x.ahead // step
            hole = x.hole_back // step, x.hole_ahead // step
        rate = self.call.dropout
        drop = (keep_threshold(rate), 1 / (1 - rate)) if rate else (0, 1.0)
        return self.n, self.m, self.span.t, self.span.u, back, ahead, *hole, step, self.clip, self.call.scale, *drop

    def _config(self, kernel: str, group: _Group) -> dict[str, int]:
        """Return the sizes of a kernel; those that walk lists of tiles own 64 rows and take at most 32 at a time.

        So do those with distance classes, whose tiles need more registers.
        """
        kind = "half" if self.q.dtype in HALVES else "float"
        classed = self.by_query is not None or self.mass
        listed = " list" if classed or group.by_query is not None else ""
        width = max(block_of(self.d, self.device), block_of(self.e, self.device))
        config = kernel_config(kernel, f"{kind} {width}{listed}", self.device)
        return {**config, "SUB": TILE // min(config["BM"], config["BN"])}

    def _grid(self, group: _Group, items: KernelItems | None, length: int, tile: int, heads: int) -> tuple[tuple[int, int], int]:
        """Return the grid, and the tiles of a residue class."""
        tiles = ceil_div(length, tile)
        if items is not None:
            return (len(items.items), self.b * heads if items.shared else self.b), tiles
        if group.strided is not None:
            tiles = ceil_div(ceil_div(length, group.strided.step), tile)
            return (tiles * group.strided.step, self.b * heads), tiles
        return (tiles, self.b * heads), tiles

    def _parts(self, items: KernelItems | None, heads: int, *widths: int) -> tuple[list[Tensor], int]:
        """Allocate the results that are merged afterwards, (rows slots 64 width) each."""
        if items is None or not items.slots:
            return [self.q] * len(widths), 0
        rows = self.b * heads if items.shared else self.b
        shape = (rows, items.slots, TILE)
        return [torch.empty(*shape, width, dtype=torch.float32, device=self.device) for width in widths], items.slots

    def _common(self, items: KernelItems | None) -> tuple[Any, ...]:
        """Return the tensors that all kernels take, any tensor for one that is not used."""
        none = self.q
        query_hash, key_hash = self.keys or (none, none)
        lists = (none, none, none) if items is None else (items.items, items.entries, items.masks)
        valid, slopes, by_query = (none if x is None else x for x in (self.valid, self.slopes, self.by_query))
        return valid, slopes, query_hash, key_hash, *lists, by_query

    def _by_class(self, used: bool, fill: float) -> tuple[Tensor, Tensor]:
        """Allocate numbers (b h n classes) and those of the two outer classes (b h n 2), any tensors where they are not used."""
        if not used:
            return self.q, self.q
        shape = (self.b, self.h, self.n)
        inner = torch.full((*shape, 2 * self.clip + 1), fill, dtype=torch.float32, device=self.device)
        return inner, torch.zeros(*shape, 2, dtype=torch.float32, device=self.device)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return out (b h n width), in float32 while several groups add to it, and log-sum-exp (b h n)."""
        from regard.ops.tile.triton_kernels import tile_forward

        several = len(self.groups) > 1
        out = _empty_like(self.q, self.call.width, torch.float32 if several else self.v.dtype)
        lse = torch.empty(self.b, self.h, self.n, dtype=torch.float32, device=self.device)
        if not self.groups:
            return out.zero_(), lse.fill_(MASKED_SCORE)
        inner, outer = self._by_class(self.mass, float("-inf"))
        for number, group in enumerate(self.groups):
            flags, config, items = self._flags(group, number), self._config("tile_forward", group), group.by_query
            grid, tiles = self._grid(group, items, self.n, config["BM"], self.h)
            (part, part_lse, part_outer), slots = self._parts(items, self.h, flags["BE"], 1, 2)
            strides = (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *out.stride()[:3])
            tile_forward[grid](
                self.q, self.k, self.v, out, lse, *self._common(items), part, part_lse, inner, outer, part_outer, *strides,
                *self._numbers(group), self.h, tiles, slots, **flags, **config,
            )  # fmt: skip
            self._merge(out, lse, items, part, part_lse, self.e, flags["BE"])
            if self.mass:
                self._merge(outer, lse, items, part_outer, part_lse, 2, 2)
        if self.mass:
            self._write_masses(out, inner, outer, lse)
        return out, lse

    def _merge(
        self, out: Tensor, lse: Tensor, items: KernelItems | None, part: Tensor, part_lse: Tensor, width: int, block: int
    ) -> None:
        """Merge the parts of rows of tiles that were cut."""
        from regard.ops.tile.triton_merges import merge_parts

        if items is None or not items.slots:
            return
        merge_parts[(len(items.merges), len(part))](
            out, lse, items.merges, part, part_lse, *out.stride()[:3], self.n, self.h, items.slots,
            E=width, BE=block, BM=TILE, SHARED=items.shared, num_warps=4,
        )  # fmt: skip

    def _sum(self, total: Tensor, items: KernelItems | None, part: Tensor, block: int) -> None:
        """Sum the parts of a gradient (b heads length width)."""
        from regard.ops.tile.triton_merges import sum_parts

        if items is None or not items.slots:
            return
        _, heads, length, width = total.shape
        sum_parts[(len(items.merges), len(part))](
            total, items.merges, part, *total.stride()[:3], length, heads, items.slots,
            C=width, BC=block, BM=TILE, SHARED=items.shared, num_warps=4,
        )  # fmt: skip

    def _write_masses(self, out: Tensor, inner: Tensor, outer: Tensor, lse: Tensor) -> None:
        """Write the weights of distance classes behind the outputs."""
        from regard.ops.tile.triton_classes import write_masses

        kept = 1 / (1 - self.call.dropout)
        grid = (ceil_div(self.n, MASS_ROWS), self.b * self.h, ceil_div(2 * self.clip + 1, MASS_COLUMNS))
        write_masses[grid](
            out[..., self.e :], inner, outer, lse, *out.stride()[:3], self.n, self.clip, kept, self.h,
            BM=MASS_ROWS, BC=MASS_COLUMNS, num_warps=4,
        )  # fmt: skip

    def backward(self, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Gradients:
        """Return the gradients of q, k, v and of what the bias adds by query."""
        several = len(self.groups) > 1
        out, d_out = _rows_contiguous(out), _rows_contiguous(d_out.to(self.q.dtype))
        made = [_empty_like(x, x.shape[-1], torch.float32 if several else x.dtype) for x in (self.q, self.k, self.v)]
        inner, outer = self._by_class(self.by_query is not None, 0.0)
        found = None if self.by_query is None else inner
        if not self.groups:
            return *(x.zero_() for x in made), found
        if self.mass:  # its columns pull at the scores of a row as the outputs do
            pulled = (out[..., self.e :].float() * d_out[..., self.e :].float()).sum(-1)
            d_lse = -pulled if d_lse is None else d_lse - pulled
        pull = torch.empty_like(lse)
        for number, group in enumerate(self.groups):
            self._query_gradients(group, number, out, lse, d_out, d_lse, pull, made[0], inner, outer)
            self._key_gradients(group, number, lse, d_out, pull, *made[1:])
        if found is not None:
            found[..., 0] += outer[..., 0]
            found[..., -1] += outer[..., 1]
        return *(x.to(self.q.dtype) for x in made), found

    def _query_gradients(
        self,
        group: _Group,
        number: int,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        pull: Tensor,
        dq: Tensor,
        inner: Tensor,
        outer: Tensor,
    ) -> None:
        from regard.ops.tile.triton_gradients import query_gradients

        flags, config, items = self._flags(group, number), self._config("tile_query_gradients", group), group.by_query
        grid, tiles = self._grid(group, items, self.n, config["BM"], self.h)
        (part, part_outer), slots = self._parts(items, self.h, flags["BD"], 2)
        strides = [x.stride()[:3] for x in (self.q, self.k, self.v, out, d_out, dq)]
        lses = lse if d_lse is None else d_lse.contiguous()
        query_gradients[grid](
            self.q, self.k, self.v, out, lse, d_out, lses, pull, dq, *self._common(items), part, inner, outer, part_outer,
            *sum(strides, ()), *self._numbers(group), self.h, tiles, slots, **flags, LSES=d_lse is not None, **config,
        )  # fmt: skip
        self._sum(dq, items, part, flags["BD"])
        if self.by_query is not None:
            self._sum(outer, items, part_outer, 2)

    def _key_gradients(
        self, group: _Group, number: int, lse: Tensor, d_out: Tensor, pull: Tensor, dk: Tensor, dv: Tensor
    ) -> None:
        from regard.ops.tile.triton_gradients import key_gradients

        flags, config, items = self._flags(group, number), self._config("tile_key_gradients", group), group.by_key
        grid, tiles = self._grid(group, items, self.m, config["BN"], self.g)
        (part_k, part_v), slots = self._parts(items, self.g, flags["BD"], flags["BE"])
        strides = [x.stride()[:3] for x in (self.q, self.k, self.v, d_out, dk, dv)]
        key_gradients[grid](
            self.q, self.k, self.v, lse, d_out, pull, dk, dv, *self._common(items), part_k, part_v, *sum(strides, ()),
            *self._numbers(group), self.h, self.g, tiles, slots, **flags, **config,
        )  # fmt: skip
        self._sum(dk, items, part_k, flags["BD"])
        self._sum(dv, items, part_v, flags["BE"])
