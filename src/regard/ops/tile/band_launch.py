"""Launch the Triton kernels of a plain window, where a configuration chooses one: see `regard.ops.tile.triton_bands`."""

from __future__ import annotations

from typing import Any

from regard.ops.kernel_launch import KernelLaunch, present_slots
from regard.ops.tile.tile_sizes import PairGroup, StrideSizes, TileSizes
from regard.ops.triton_support import HALVES, block_of, dot_precision, kernel_config
from regard.patterns.tiles import ceil_div

GENERAL = 1  # the form of configurations that leave windows to the kernels of all patterns
FORMS = {"band_forward": (1, 2, 3, 4), "band_query_gradients": (1, 2, 3), "band_key_gradients": (1, 2, 3, 4)}


class BandSizes(TileSizes):
    """Choose and prepare launches for a plain window; None where the kernels of all patterns compute it."""

    def _config(self, kernel: str, group: PairGroup, number: int) -> dict[str, Any] | None:
        """Return the constants of a kernel, unless the call has more than a window, or one narrower than a program's tile."""
        if (
            not self.bare
            or self.scale <= 0
            or number
            or group.band is None
            or group.by_query is not None
            or group.strided is not None
        ):
            return None
        kind = "half" if self.dtype in HALVES else "float"
        width, value_width = block_of(self.d, self.device), block_of(self.e, self.device)
        config = dict(kernel_config(kernel, f"{kind} {max(width, value_width)}", self.device))
        form = config.pop("form")
        if form not in FORMS[kernel]:
            raise ValueError(f"{kernel} has the forms {', '.join(map(str, FORMS[kernel]))}, not {form}: change its configuration")
        own, taken = (config["BN"], config["BM"]) if kernel == "band_key_gradients" else (config["BM"], config["BN"])
        if form == GENERAL or not own <= _rounded(group.band, taken) <= self.m:
            return None
        flags = {"R": self.h // self.g, "D": self.d, "E": self.e, "BD": width, "BE": value_width, "FORM": form}
        return {**flags, "PRECISION": dot_precision(self.dtype), **config}

    def _band_launch(self, kernel: Any, constants: dict[str, Any], pointers: list[bool], group: PairGroup, strides: tuple,
                     by_key: bool = False) -> KernelLaunch:  # fmt: skip
        """Prepare the launch of a kernel: one program for a tile of a head."""
        assert group.band is not None
        back, ahead = group.band
        wide = _rounded(group.band, constants["BM" if by_key else "BN"])
        numbers = (self.n, self.m, self.span.t - self.span.u, back, ahead, wide, self.scale, self.h)
        heads, length, tile = (self.g, self.m, constants["BN"]) if by_key else (self.h, self.n, constants["BM"])
        grid = (ceil_div(length, tile), self.b * heads)
        more = (self.g,) if by_key else ()
        return KernelLaunch(kernel, grid, present_slots(pointers), (*strides, *numbers, *more), constants, self.number)

    def band_forward(self, group: PairGroup, number: int) -> KernelLaunch | None:
        """Prepare the launch of the outputs."""
        constants = self._config("band_forward", group, number)
        if constants is None:
            return None
        from regard.ops.tile.triton_bands import band_forward

        q, k, v = self.strides
        strides = (*q[:3], *k[:3], *v[:3], *self.out_strides[:3])
        return self._band_launch(band_forward, constants, [True] * 5, group, strides)

    def band_query_gradients(
        self, group: PairGroup, number: int, out: StrideSizes, d_out: StrideSizes, has_lse: bool
    ) -> KernelLaunch | None:
        """Prepare the launch of the gradient of queries."""
        constants = self._config("band_query_gradients", group, number)
        if constants is None:
            return None
        from regard.ops.tile.triton_band_gradients import band_query_gradients

        q, k, v = self.strides
        strides = (*q[:3], *k[:3], *v[:3], *out[:3], *d_out[:3], *self.grads[0][1][:3])
        pointers = [True] * 6 + [has_lse] + [True] * 2
        return self._band_launch(band_query_gradients, {**constants, "LSES": has_lse}, pointers, group, strides)

    def band_key_gradients(self, group: PairGroup, number: int, d_out: StrideSizes) -> KernelLaunch | None:
        """Prepare the launch of the gradients of keys and values."""
        constants = self._config("band_key_gradients", group, number)
        if constants is None:
            return None
        from regard.ops.tile.triton_band_gradients import band_key_gradients

        q, k, v = self.strides
        strides = (*q[:3], *k[:3], *v[:3], *d_out[:3], *self.grads[1][1][:3], *self.grads[2][1][:3])
        constants["EVEN"] = self._even_tiles(group, constants["BN"], constants["BM"])
        return self._band_launch(band_key_gradients, constants, [True] * 8, group, strides, by_key=True)

    def _even_tiles(self, group: PairGroup, own: int, taken: int) -> bool:
        """Return whether all tiles of queries begin at multiples of their size, and so does the end: see `window_of`."""
        assert group.band is not None
        back, ahead = group.band
        start = self.span.u - self.span.t - ahead
        leads = _rounded(group.band, taken) > back + ahead + 1 or (start - 1) % taken == 0
        return self._met(group) and not (start - leads) % taken and not own % taken and not self.n % taken

    def _met(self, group: PairGroup) -> bool:
        """Return whether queries and keys are at the same places, so that every tile of keys meets queries."""
        return group.band is not None and self.span.t == self.span.u and self.n == self.m and min(group.band) >= 0


def _rounded(band: tuple[int, int], tile: int) -> int:
    """Return the keys of a query, rounded up to whole tiles."""
    back, ahead = band
    return ceil_div(back + ahead + 1, tile) * tile
