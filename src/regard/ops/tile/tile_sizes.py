"""What the launches of tile attention are made of: sizes, numbers, constants and grids, computed once for a signature."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.dropout_hash import keep_threshold
from regard.ops.tile.call import TileCall
from regard.ops.triton_support import HALVES, block_of, dot_precision, kernel_config
from regard.patterns.tile_list import TILE, KernelItems, LedBand, StridedBand
from regard.patterns.tiles import Span, ceil_div

StrideSizes = tuple[int, ...]
LIST_STEP = 32  # tokens of a list that a program takes at a time: a mask is 32 bits of a token


class PairGroup(NamedTuple):
    """Pairs that one launch computes: a plain band, the tiles of items, or a band in residue classes."""

    band: tuple[int, int] | None = None  # back, ahead, in steps
    by_query: KernelItems | None = None
    by_key: KernelItems | None = None
    strided: StridedBand | None = None
    size: int = 0
    led: LedBand | None = None  # the same pairs as the items, by arithmetic


def packed_strides(x: Tensor) -> StrideSizes:
    """Return the strides of x, or those of a copy where the elements of a row are not side by side."""
    return x.stride() if x.stride(-1) == 1 else x.contiguous().stride()


def rows_contiguous(x: Tensor) -> Tensor:
    """Return x with the elements of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides_like(shape: tuple[int, ...], like: StrideSizes) -> StrideSizes:
    """Return strides of a new tensor (b h n width): heads of a token side by side, or tokens of a head, as in another one."""
    _, h, n, width = shape
    if like[1] < like[2]:
        return n * h * width, width, h * width, 1
    return h * n * width, n * width, width, 1


class TileSizes:
    """Sizes, numbers, constants and grids of the kernels, for all calls with one signature."""

    def __init__(self, call: TileCall, span: Span, groups: tuple[PairGroup, ...]) -> None:
        q, k, v, bias = call.q, call.k, call.v, call.bias
        self.device, self.dtype, self.number, self.span, self.groups = q.device, q.dtype, q.get_device(), span, groups
        (self.b, self.h, self.n, self.d), self.g = q.shape, k.shape[1]
        self.m, self.e = v.shape[2:]
        self.loose = any(x.stride(-1) != 1 for x in (q, k, v))
        self.strides = tuple(packed_strides(x) for x in (q, k, v))
        self.dropout, self.scale = call.dropout, call.scale
        self.masked, self.sloped = call.valid is not None, bias is not None and bias.slopes is not None
        self.classed, self.mass = bias is not None and bias.by_query is not None, bias is not None and bias.mass
        self.clip = 0 if bias is None else bias.clip
        self.bare = bias is None and not self.masked and not call.dropout
        self.sums = torch.float32 if len(groups) > 1 else self.dtype  # while several groups add to it
        self.rows = (self.b, self.h, self.n)
        self.out_shape = (*self.rows, call.width)
        self.out_strides = strides_like(self.out_shape, self.strides[0])
        shapes = (q.shape, k.shape, v.shape)
        self.grads = [(tuple(shape), strides_like(shape, own)) for shape, own in zip(shapes, self.strides, strict=True)]

    def flags(self, group: PairGroup, number: int) -> dict[str, Any]:
        """Return the constants that a kernel is compiled for."""
        return {
            "R": self.h // self.g,
            "D": self.d,
            "E": self.e,
            "BD": block_of(self.d, self.device),
            "BE": block_of(self.e, self.device),
            "ITEMISED": group.by_query is not None,
            "SHARED": group.by_query is not None and group.by_query.shared,
            "MORE": number > 0,
            "STEPPED": group.strided is not None,
            "HOLE": group.strided is not None and number > 0,
            "VALIDS": self.masked,
            "SLOPED": self.sloped,
            "CLASSED": self.classed,
            "MASSED": self.mass,
            "DROP": self.dropout > 0,
            "PRECISION": dot_precision(self.dtype),
        }

    def numbers(self, group: PairGroup) -> tuple:
        """Return the numbers that all kernels take: lengths, positions, the band and its hole, classes, scale and dropout."""
        back, ahead = group.band or (0, 0)
        hole, step = (0, 0), 1
        if group.strided is not None:
            x = group.strided
            step = x.step
            back, ahead = x.back // step, x.ahead // step
            hole = x.hole_back // step, x.hole_ahead // step
        drop = (keep_threshold(self.dropout), 1 / (1 - self.dropout)) if self.dropout else (0, 1.0)
        return self.n, self.m, self.span.t, self.span.u, back, ahead, *hole, step, self.clip, self.scale, *drop

    def config(self, kernel: str, group: PairGroup) -> dict[str, int]:
        """Return the sizes of a kernel; those that walk lists of tiles own 64 rows and take at most 32 of a list at a time.

        Those with distance classes have the same sizes, because their tiles need more registers.
        """
        kind = "half" if self.dtype in HALVES else "float"
        classed = self.classed or self.mass
        listed = " list" if classed or group.by_query is not None else ""
        width = max(block_of(self.d, self.device), block_of(self.e, self.device))
        config = kernel_config(kernel, f"{kind} {width}{listed}", self.device)
        return {**config, "SUB": max(TILE // min(config["BM"], config["BN"]), TILE // LIST_STEP)}

    def grid(self, group: PairGroup, items: KernelItems | None, length: int, tile: int, heads: int) -> tuple[tuple, int]:
        """Return the grid, and the tiles of a residue class."""
        tiles = ceil_div(length, tile)
        if items is not None:
            return (len(items.items), self.b * heads if items.shared else self.b), tiles
        if group.strided is not None:
            tiles = ceil_div(ceil_div(length, group.strided.step), tile)
            return (tiles * group.strided.step, self.b * heads), tiles
        return (tiles, self.b * heads), tiles

    def present(self, items: KernelItems | None) -> list[bool]:
        """Return which of the tensors that all kernels take are used."""
        drops, listed = self.dropout > 0, items is not None
        return [self.masked, self.sloped, drops, drops, listed, listed, listed, self.classed]

    def rooms(self, items: KernelItems | None, heads: int, *widths: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of results that are merged afterwards, (rows slots 64 width) each; none where nothing is cut."""
        if items is None or not items.slots:
            return ()
        rows = self.b * heads if items.shared else self.b
        return tuple((rows, items.slots, TILE, width) for width in widths)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)
