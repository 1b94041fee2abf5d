"""Launch the Triton kernels of tile attention: a pass is prepared once for a signature and then called with tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.dropout_hash import head_numbers, key_keys, query_keys
from regard.ops.kernel_launch import KernelLaunch, hold_for_graphs, launch_kernel, present_slots
from regard.ops.tile.band_launch import BandSizes
from regard.ops.tile.call import Gradients, HeadPlans, TileCall
from regard.ops.tile.tile_sizes import PairGroup, StrideSizes, rows_contiguous
from regard.patterns.tile_list import TILE, KernelItems
from regard.patterns.tiles import MASKED_SCORE, ceil_div

MASS_ROWS, MASS_COLUMNS = 64, 32  # queries and distance classes of a program that writes weights of classes


class _Merge(NamedTuple):
    """A launch that merges the parts of rows of tiles that were cut."""

    launch: KernelLaunch
    tables: tuple[Tensor, ...]


class _Step(NamedTuple):
    """One launch over the pairs of a group, and what merges its parts."""

    launch: KernelLaunch
    lists: tuple[Tensor, ...]  # items, entries and masks, if there are any
    rooms: tuple[tuple[int, ...], ...]  # shapes of the results that are merged afterwards
    merges: tuple[_Merge, ...]  # one for every result
    joint: KernelLaunch | None = None  # sums the parts of all gradients


class _Inputs(NamedTuple):
    """The tensors of a call as kernels take them, those that are used."""

    q: Tensor
    k: Tensor
    v: Tensor
    before: tuple[Tensor, ...]  # validity of keys, slopes, keys of dropout
    by_query: tuple[Tensor, ...]


class _BackwardSteps(NamedTuple):
    queries: list[_Step]
    keys: list[_Step]


class TritonPass(BandSizes):
    """The launches of all calls with one signature: shapes, strides, types, device, options."""

    def __init__(self, call: TileCall, plans: HeadPlans, groups: tuple[PairGroup, ...]) -> None:
        super().__init__(call, plans[0].plan.span, groups)
        self.plans = plans
        self.size = sum(group.size for group in groups) + sum(own.plan.size for own in plans)
        self._forward_steps: list[_Step] | None = None
        self._backward_steps: dict[tuple, _BackwardSteps] = {}

    def _inputs(self, call: TileCall) -> _Inputs:
        q, k, v = call.q, call.k, call.v
        if self.loose:
            q, k, v = (rows_contiguous(x) for x in (q, k, v))
        if self.bare:
            return _Inputs(q, k, v, (), ())
        before: list[Tensor] = []
        if call.valid is not None:
            before.append(call.valid.contiguous().view(torch.uint8))
        if self.sloped:
            before.append(call.bias.slopes.float().contiguous())  # type: ignore[union-attr]
        if call.dropout:
            before += self._dropout_keys(call)
        by_query = (call.bias.by_query.float().contiguous(),) if self.classed else ()  # type: ignore[union-attr]
        return _Inputs(q, k, v, tuple(before), by_query)

    def _dropout_keys(self, call: TileCall) -> tuple[Tensor, Tensor]:
        """Return the keys of queries (b h n) and of keys (m), for the hash of a pair."""
        seed = call.seed
        assert seed is not None
        heads = head_numbers(self.b, self.h, slice(None), self.device)[..., None]
        i = torch.arange(self.n, device=self.device) + self.span.t
        j = torch.arange(self.m, device=self.device) + self.span.u
        return query_keys(seed, heads, i).contiguous(), key_keys(seed, j).contiguous()

    def _strided(self, shape: tuple[int, ...], strides: StrideSizes, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def _by_class(self, used: bool, fill: float) -> tuple[Tensor, ...]:
        """Allocate numbers (b h n classes) and those of the two outer classes (b h n 2), where they are used."""
        if not used:
            return ()
        inner = torch.full((*self.rows, 2 * self.clip + 1), fill, dtype=torch.float32, device=self.device)
        return inner, torch.zeros(*self.rows, 2, dtype=torch.float32, device=self.device)

    def forward(self, call: TileCall, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return out (b h n width), in float32 while several groups add to it, and log-sum-exp (b h n); `out`: write there."""
        if out is None:
            out = self._strided(self.out_shape, self.out_strides, self.sums)
        lse = self.new(self.rows)
        if not self.groups:
            return out.zero_(), lse.fill_(MASKED_SCORE)
        q, k, v, before, by_query = self._inputs(call)
        classes = self._by_class(self.mass, float("-inf"))
        steps = self._forward_steps
        if steps is None:
            steps = self._forward_steps = [self._forward_step(group, number) for number, group in enumerate(self.groups)]
        for launch, lists, rooms, merges, _ in steps:
            if lists:
                hold_for_graphs(q, self)
            parts = [self.new(room) for room in rooms]
            launch(q, k, v, out, lse, *before, *lists, *by_query, *parts[:2], *classes, *parts[2:])
            if parts:
                merges[0].launch(out, lse, *merges[0].tables, parts[0], parts[1])
            if parts and self.mass:
                merges[1].launch(classes[1], lse, *merges[1].tables, parts[2], parts[1])
        if self.mass:
            self._write_masses(out, lse, *classes)
        return out, lse

    def _forward_step(self, group: PairGroup, number: int) -> _Step:
        from regard.ops.tile.triton_kernels import tile_forward

        if band := self.window(group, number):
            merging = (_Merge(self.merge_rows(band), ()),) if band.rows else ()
            return _Step(self.band_forward(band), (), self.row_parts(band, self.e, 1), merging)
        flags, config, items = self.flags(group, number), self.config("tile_forward", group), group.by_query
        grid, tiles = self.grid(group, items, self.n, config["BM"], self.h)
        widths = (flags["BE"], 1, 2) if self.mass else (flags["BE"], 1)
        rooms = self.rooms(items, self.h, *widths)
        cut = bool(rooms)
        present = [*[True] * 5, *self.present(items), cut, cut, self.mass, self.mass, cut and self.mass]
        q, k, v = self.strides
        numbers = (*q[:3], *k[:3], *v[:3], *self.out_strides[:3], *self.numbers(group), self.h, tiles)
        launch = self._launch(tile_forward, grid, present, (*numbers, items.slots if items else 0), {**flags, **config})
        if items is None:
            return _Step(launch, (), (), ())
        outer = (self.h * self.n * 2, self.n * 2, 2)
        merges = [self._merge(self.out_strides[:3], items, self.e, flags["BE"]), self._merge(outer, items, 2, 2)]
        return _Step(launch, items[:3], rooms, tuple(merges))

    def _launch(self, kernel: Any, grid: tuple, present: list[bool], numbers: tuple, constants: dict[str, Any]) -> KernelLaunch:
        return KernelLaunch(kernel, grid, present_slots(present), numbers, constants, self.number)

    def _merge(self, strides: StrideSizes, items: KernelItems, width: int, block: int) -> _Merge:
        """Prepare to merge outputs by log-sum-exp."""
        from regard.ops.tile.triton_merges import merge_parts

        grid = (len(items.merges), self.b * self.h if items.shared else self.b)
        constants = {"E": width, "BE": block, "BM": TILE, "SHARED": items.shared, "num_warps": 4}
        return _Merge(
            self._launch(merge_parts, grid, [True] * 5, (*strides, self.n, self.h, items.slots), constants), (items.merges,)
        )

    def _sum(self, shape: tuple[int, ...], strides: StrideSizes, items: KernelItems, block: int) -> _Merge:
        """Prepare to sum the parts of a gradient (b heads length width)."""
        from regard.ops.tile.triton_merges import sum_parts

        _, heads, length, width = shape
        grid = (len(items.merges), self.b * heads if items.shared else self.b)
        constants = {"C": width, "BC": block, "BM": TILE, "SHARED": items.shared, "num_warps": 4}
        numbers = (*strides[:3], length, heads, items.slots)
        return _Merge(self._launch(sum_parts, grid, [True] * 3, numbers, constants), (items.merges,))

    def _write_masses(self, out: Tensor, lse: Tensor, inner: Tensor, outer: Tensor) -> None:
        """Write the weights of distance classes behind the outputs."""
        from regard.ops.tile.triton_classes import write_masses

        kept = 1 / (1 - self.dropout)
        grid = (ceil_div(self.n, MASS_ROWS), self.b * self.h, ceil_div(2 * self.clip + 1, MASS_COLUMNS))
        constants = {"BM": MASS_ROWS, "BC": MASS_COLUMNS, "num_warps": 4}
        numbers = (*out.stride()[:3], self.n, self.clip, kept, self.h)
        launch_kernel(write_masses, grid, (out[..., self.e :], inner, outer, lse), numbers, constants)

    def backward(
        self,
        call: TileCall,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Gradients:
        """Return the gradients of q, k, v and of what the bias adds by query; `into`: write the first three there."""
        dq, dk, dv = into or [self._strided(shape, strides, self.sums) for shape, strides in self.grads]
        classes = self._by_class(self.classed, 0.0)
        found = classes[0] if classes else None
        if not self.groups:
            return dq.zero_(), dk.zero_(), dv.zero_(), found
        if d_out.dtype != self.dtype:
            d_out = d_out.to(self.dtype)
        out, d_out = rows_contiguous(out), rows_contiguous(d_out)
        if self.mass:  # its columns pull at the scores of a row as the outputs do
            pulled = (out[..., self.e :].float() * d_out[..., self.e :].float()).sum(-1)
            d_lse = -pulled if d_lse is None else d_lse - pulled
        pull = self.new(self.rows)
        q, k, v, before, by_query = self._inputs(call)
        lses = () if d_lse is None else (d_lse.contiguous(),)
        queries, keys = self._steps_of(out, d_out, d_lse)
        for number in range(len(queries)):
            launch, lists, rooms, merges, _ = queries[number]
            row_parts = [self.new(room) for room in rooms]
            given = (q, k, v, out, lse, d_out, *lses, pull, dq, *before, *lists, *by_query)
            launch(*given, *row_parts[:1], *classes, *row_parts[1:])
            for total, merging, part in zip((dq, *classes[1:]), merges, row_parts, strict=False):
                merging.launch(total, *merging.tables, part)
            launch, lists, rooms, merges, joint = keys[number]
            parts = [self.new(room) for room in rooms]
            launch(q, k, v, lse, d_out, pull, dk, dv, *before, *lists, *by_query, *parts)
            for total, merging, part in zip((dk, dv), merges, parts, strict=False):
                merging.launch(total, *merging.tables, part)
            if joint is not None:
                joint(dq, dk, dv, *row_parts, *parts)
        if found is not None:
            found[..., 0] += classes[1][..., 0]
            found[..., -1] += classes[1][..., 1]
        if self.sums == self.dtype:
            return dq, dk, dv, found
        return dq.to(self.dtype), dk.to(self.dtype), dv.to(self.dtype), found

    def _steps_of(self, out: Tensor, d_out: Tensor, d_lse: Tensor | None) -> _BackwardSteps:
        key = (out.stride(), out.dtype, d_out.stride(), d_lse is None)
        found = self._backward_steps.get(key)
        if found is None:
            queries, keys = [], []
            for number, group in enumerate(self.groups):
                queries.append(self._query_step(group, number, out.stride(), d_out.stride(), d_lse is not None))
                keys.append(self._key_step(group, number, d_out.stride()))
            found = self._backward_steps[key] = _BackwardSteps(queries, keys)
        return found

    def _query_step(self, group: PairGroup, number: int, out: StrideSizes, d_out: StrideSizes, has_lse: bool) -> _Step:
        """Prepare the launch of the gradient of queries."""
        from regard.ops.tile.triton_gradients import query_gradients

        if band := self.window(group, number):
            return _Step(self.band_query_gradients(band, out, d_out, has_lse), (), self.row_parts(band, self.d), ())
        flags, config, items = self.flags(group, number), self.config("tile_query_gradients", group), group.by_query
        grid, tiles = self.grid(group, items, self.n, config["BM"], self.h)
        widths = (flags["BD"], 2) if self.classed else (flags["BD"],)
        rooms = self.rooms(items, self.h, *widths)
        cut = bool(rooms)
        own = [True] * 6 + [has_lse] + [True] * 2
        present = [*own, *self.present(items), cut, self.classed, self.classed, cut and self.classed]
        q, k, v = self.strides
        shape, dq = self.grads[0]
        strides = (*q[:3], *k[:3], *v[:3], *out[:3], *d_out[:3], *dq[:3])
        numbers = (*strides, *self.numbers(group), self.h, tiles, items.slots if items else 0)
        launch = self._launch(query_gradients, grid, present, numbers, {**flags, "LSES": has_lse, **config})
        if items is None:
            return _Step(launch, (), (), ())
        outer = (self.h * self.n * 2, self.n * 2, 2, 1)
        sums = (self._sum(shape, dq, items, flags["BD"]), self._sum((*self.rows, 2), outer, items, 2))
        return _Step(launch, items[:3], rooms, sums)

    def _key_step(self, group: PairGroup, number: int, d_out: StrideSizes) -> _Step:
        """Prepare the launch of the gradients of keys and values."""
        from regard.ops.tile.triton_gradients import key_gradients

        if band := self.window(group, number):
            joint = self.sum_edges(band) if band.rows or band.columns else None
            return _Step(self.band_key_gradients(band, d_out), (), self.column_parts(band), (), joint)
        flags, config, items = self.flags(group, number), self.config("tile_key_gradients", group), group.by_key
        grid, tiles = self.grid(group, items, self.m, config["BN"], self.g)
        rooms = self.rooms(items, self.g, flags["BD"], flags["BE"])
        present = [*[True] * 8, *self.present(items), bool(rooms), bool(rooms)]
        q, k, v = self.strides
        (k_shape, dk), (v_shape, dv) = self.grads[1:]
        strides = (*q[:3], *k[:3], *v[:3], *d_out[:3], *dk[:3], *dv[:3])
        numbers = (*strides, *self.numbers(group), self.h, self.g, tiles, items.slots if items else 0)
        launch = self._launch(key_gradients, grid, present, numbers, {**flags, **config})
        if items is None:
            return _Step(launch, (), (), ())
        sums = (self._sum(k_shape, dk, items, flags["BD"]), self._sum(v_shape, dv, items, flags["BE"]))
        return _Step(launch, items[:3], rooms, sums)
