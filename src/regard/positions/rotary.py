"""Positions that turn queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.checks import need
from regard.mixers.base import Can, Dims, Places
from regard.mixers.position_interface import Positions
from regard.positions.frequencies import check_base, inverse_frequencies


class Rotary(Positions):
    """Queries and keys are turned by angles that grow with their positions, so that q.k depends only on their distance.

    In every plane f of two coordinates by the angle p / base^(2f / d). Su et al. 2021, arXiv:2104.09864. `factor` divides all
    angles, or with `trained`, a length, those of waves that are long beside it, as Llama 3.1 does: waves longer than
    trained / low in full, those shorter than trained / high not at all, those between by a share (arXiv:2407.21783).

    `dims` are the sizes of the layer, `base` sets the longest wave.

    >>> import torch
    >>> from regard import layer
    >>> mixer = layer("softmax", width=16, heads=2, positions="rotary(base=500.0)")
    >>> tuple(mixer(torch.randn(1, 10, 16)).shape)
    (1, 10, 16)
    """

    needs = Can.ROTARY

    def __init__(
        self,
        dims: Dims,
        *,
        base: float = 10_000.0,
        factor: float = 1.0,
        trained: int | None = None,
        low: float = 1.0,
        high: float = 4.0,
    ) -> None:
        super().__init__(dims)
        if dims.d % 2:
            raise ValueError(f"rotary turns pairs of coordinates: {dims.d} per head is an odd number")
        self.base = check_base(base)
        if trained is not None:
            need("trained", trained)
        numbers = (factor, low, high)
        if any(isinstance(x, bool) or not isinstance(x, int | float) or not x > 0 for x in numbers) or not low < high:
            raise ValueError(f"factor, low and high are positive numbers, low below high, not {factor!r}, {low!r} and {high!r}")
        self.factor, self.trained, self.low, self.high = float(factor), trained, float(low), float(high)

    def extra_repr(self) -> str:
        return f"base={self.base}, factor={self.factor}, trained={self.trained}, low={self.low}, high={self.high}"

    def frequencies(self, d: int, device: torch.device) -> Tensor:
        """Return the angle of every plane by which one position turns it, (d / 2) in float64."""
        found = inverse_frequencies(d, self.base, device)
        if self.factor == 1:
            return found
        if self.trained is None:
            return found / self.factor
        waves = self.trained * found / (2 * math.pi)  # of each plane, in the length of training
        kept = ((waves - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * found + (1 - kept) * found / self.factor

    def turn(self, x: Tensor, places: Places) -> Tensor:
        wide, d = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
        cos, sin = places.derived(("rotary", d, wide, self.extra_repr()), lambda: self._turns(places, d, wide))
        a, b = x.to(wide).chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return turned.to(x.dtype)

    def _turns(self, places: Places, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosine and the sine of every angle, (b or 1, 1, n, d / 2): of one row where all rows agree.

        Angles are in double precision: far positions keep their digits.
        """
        alike = places.valid is None and places.start is not None
        at = (places.at[:1] if alike else places.at)[:, None, :, None].double()
        angle = at * self.frequencies(d, at.device)
        return angle.cos().to(dtype), angle.sin().to(dtype)
