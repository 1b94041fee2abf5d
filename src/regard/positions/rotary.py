"""Positions that turn queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.mixers.base import Can, Dims, Places
from regard.mixers.position_interface import Positions
from regard.positions.frequencies import check_base, inverse_frequencies


class Rotary(Positions):
    """Queries and keys are turned by angles that grow with their positions, so that q.k depends only on their distance.

    In every plane f of two coordinates by the angle p / base^(2f / d). Su et al. 2021, arXiv:2104.09864.
    """

    needs = Can.ROTARY

    def __init__(self, dims: Dims, *, base: float = 10_000.0) -> None:
        super().__init__(dims)
        if dims.d % 2:
            raise ValueError(f"rotary turns pairs of coordinates: {dims.d} per head is an odd number")
        self.base = check_base(base)

    def turn(self, x: Tensor, places: Places) -> Tensor:
        wide, d = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
        cos, sin = places.derived(("rotary", d, self.base, wide), lambda: self._turns(places, d, wide))
        a, b = x.to(wide).chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return turned.to(x.dtype)

    def _turns(self, places: Places, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosine and the sine of every angle, (b or 1, 1, n, d / 2): of one row where all rows agree.

        Angles are in double precision: far positions keep their digits.
        """
        alike = places.valid is None and places.start is not None
        at = (places.at[:1] if alike else places.at)[:, None, :, None].double()
        angle = at * inverse_frequencies(d, self.base, at.device)
        return angle.cos().to(dtype), angle.sin().to(dtype)
