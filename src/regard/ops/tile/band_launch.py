"""Launch the Triton kernels of windows, alone or with global tokens, where configurations choose them: see `triton_bands`."""

from __future__ import annotations

from typing import Any

from regard.ops.kernel_launch import KernelLaunch, present_slots
from regard.ops.tile.tile_sizes import PairGroup, StrideSizes, TileSizes
from regard.ops.triton_support import HALVES, block_of, dot_precision, kernel_config
from regard.patterns.tile_list import LedBand
from regard.patterns.tiles import ceil_div

GENERAL, BY_ARITHMETIC = 1, 2  # `form` of a configuration: kernels of all patterns, or those of windows
ROOM = 512  # tokens of a piece of all tokens that one program walks
MERGED_PIECES = 32  # pieces that are merged at a time
PartShapes = tuple[tuple[int, ...], ...]


class BandSizes(TileSizes):
    """Choose and prepare launches for a window; None where the kernels of all patterns compute it."""

    def window(self, group: PairGroup, number: int) -> LedBand | None:
        """Return the window that a group is, if it is one and nothing more, and kernels of windows compute it in all passes."""
        if not self.bare or self.scale <= 0 or number or group.strided is not None:
            return None
        band = group.led
        if group.by_query is None and group.band is not None:
            band = LedBand(*group.band)
        if band is None:
            return None
        chosen = [  # all three are read, so that `regard tune` finds them where one is not chosen
            self._chosen("band_forward", self._config("band_forward"), band),
            self._chosen("band_query_gradients", self._config("band_query_gradients"), band),
            self._chosen("band_key_gradients", self._config("band_key_gradients"), band),
        ]
        return band if all(chosen) else None

    def _config(self, kernel: str) -> dict[str, Any]:
        kind = "half" if self.dtype in HALVES else "float"
        width = max(block_of(self.d, self.device), block_of(self.e, self.device))
        return dict(kernel_config(kernel, f"{kind} {width}", self.device))

    def _chosen(self, kernel: str, config: dict[str, Any], band: LedBand) -> bool:
        """Return whether a configuration chooses a kernel, and the window and the keys are no narrower than its tiles."""
        form = config["form"]
        if form not in (GENERAL, BY_ARITHMETIC):
            raise ValueError(f"{kernel} has the forms {GENERAL}, {BY_ARITHMETIC}, not {form}: change its configuration")
        own, taken = (config["BN"], config["BM"]) if kernel == "band_key_gradients" else (config["BM"], config["BN"])
        wide = ceil_div(band.back + band.ahead + 1, taken) * taken
        return form == BY_ARITHMETIC and own <= wide <= self.m and max(band.columns, band.rows) <= own

    def _band_launch(self, kernel: Any, band: LedBand, pointers: list[bool], strides: tuple, by_key: bool = False,
                     **more: Any) -> KernelLaunch:  # fmt: skip
        """Prepare the launch of a kernel: one program for a tile of a head, and one for every piece of the rows that meet all."""
        config = self._config(kernel.__name__)
        del config["form"]
        heads, length, tile = (self.g, self.m, config["BN"]) if by_key else (self.h, self.n, config["BM"])
        common, whole = (band.rows, band.columns) if by_key else (band.columns, band.rows)
        pieces = self._pieces(band, by_key)
        leads = max(common, whole) > 0
        numbers = (self.n, self.m, self.span.t - self.span.u, band.back, band.ahead, common, whole, band.reach, pieces)
        blocks = {"BD": block_of(self.d, self.device), "BE": block_of(self.e, self.device)}
        flags = {"R": self.h // self.g, "D": self.d, "E": self.e, **blocks, "LEADS": leads, "ROOM": ROOM, **more}
        constants = {**flags, "PRECISION": dot_precision(self.dtype), **config}
        grid = (pieces + ceil_div(length, tile), self.b * heads)
        heads_too = (self.h, self.g) if by_key else (self.h,)
        every = (*strides, *numbers, self.scale, *heads_too)
        return KernelLaunch(kernel, grid, present_slots(pointers), every, constants, self.number)

    def _pieces(self, band: LedBand, by_key: bool) -> int:
        """Return how many pieces there are of the queries that global keys meet, or of the keys that global queries meet."""
        whole, tokens = (band.columns, self.n) if by_key else (band.rows, self.m)
        return ceil_div(tokens, ROOM) if whole else 0

    def row_parts(self, band: LedBand, *widths: int) -> PartShapes:
        """Return the shapes of what programs find for pieces of the keys of global queries."""
        pieces = self._pieces(band, False)
        return tuple((self.b * self.h, pieces, band.rows, width) for width in widths) if pieces else ()

    def column_parts(self, band: LedBand) -> PartShapes:
        """Return the shapes of what programs find for pieces of the queries of global keys."""
        pieces = self._pieces(band, True)
        return tuple((self.b * self.g, pieces, band.columns, width) for width in (self.d, self.e)) if pieces else ()

    def band_forward(self, band: LedBand) -> KernelLaunch:
        """Prepare the launch of the outputs."""
        from regard.ops.tile.triton_bands import band_forward

        q, k, v = self.strides
        strides = (*q[:3], *k[:3], *v[:3], *self.out_strides[:3])
        return self._band_launch(band_forward, band, [True] * 5 + [band.rows > 0] * 2, strides)

    def merge_rows(self, band: LedBand) -> KernelLaunch:
        """Prepare to merge the outputs of global queries."""
        from regard.ops.tile.triton_edges import merge_rows

        numbers = (*self.out_strides[:3], self.n, self.h, self._pieces(band, False))
        constants = {"E": self.e, "BE": block_of(self.e, self.device), "BP": MERGED_PIECES, "num_warps": 2}
        return KernelLaunch(merge_rows, (band.rows, self.b * self.h), range(4), numbers, constants, self.number)

    def band_query_gradients(self, band: LedBand, out: StrideSizes, d_out: StrideSizes, has_lse: bool) -> KernelLaunch:
        """Prepare the launch of the gradient of queries."""
        from regard.ops.tile.triton_band_gradients import band_query_gradients

        q, k, v = self.strides
        strides = (*q[:3], *k[:3], *v[:3], *out[:3], *d_out[:3], *self.grads[0][1][:3])
        pointers = [True] * 6 + [has_lse] + [True] * 2 + [band.rows > 0]
        return self._band_launch(band_query_gradients, band, pointers, strides, LSES=has_lse)

    def band_key_gradients(self, band: LedBand, d_out: StrideSizes) -> KernelLaunch:
        """Prepare the launch of the gradients of keys and values."""
        from regard.ops.tile.triton_band_gradients import band_key_gradients

        q, k, v = self.strides
        strides = (*q[:3], *k[:3], *v[:3], *d_out[:3], *self.grads[1][1][:3], *self.grads[2][1][:3])
        pointers = [True] * 8 + [band.columns > 0] * 2
        return self._band_launch(band_key_gradients, band, pointers, strides, by_key=True, EVEN=self._even_tiles(band))

    def sum_edges(self, band: LedBand) -> KernelLaunch:
        """Prepare to sum the gradients of global queries, and of global keys and values."""
        from regard.ops.tile.triton_edges import sum_edges

        strides = [size for _, own in self.grads for size in own[:3]]
        numbers = (*strides, band.rows, band.columns, self._pieces(band, False), self._pieces(band, True), self.b, self.h, self.g)
        blocks = {"BD": block_of(self.d, self.device), "BE": block_of(self.e, self.device), "BP": MERGED_PIECES}
        pointers = [True] * 3 + [band.rows > 0] + [band.columns > 0] * 2
        grid = (max(band.rows, band.columns), self.b * self.h, 3)
        constants = {"D": self.d, "E": self.e, **blocks, "num_warps": 2}
        return KernelLaunch(sum_edges, grid, present_slots(pointers), numbers, constants, self.number)

    def _even_tiles(self, band: LedBand) -> bool:
        """Return whether all tiles of queries begin at multiples of their size, and so does the end: see `window_of`."""
        config = self._config("band_key_gradients")
        own, taken = config["BN"], config["BM"]
        start = self.span.u - self.span.t - band.ahead
        leads = (band.back + band.ahead + 2) % taken == 0 or (start - 1) % taken == 0
        met = self.span.t == self.span.u and self.n == self.m and min(band.back, band.ahead) >= 0  # each tile of keys has queries
        return met and not (start - leads) % taken and not own % taken and not self.n % taken
