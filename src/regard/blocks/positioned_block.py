"""A block whose input carries positions of its own, for positions that enter every block of a stack."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.blocks.block import Block
from regard.mixers.base import Mixer
from regard.mixers.places import PaddingMask, Places
from regard.mixers.state import State
from regard.positions import Floater


class PlacedBlock(Block):
    """A `Block` that adds the positions of block `number` to its tokens first: x + p_number, then as ever.

    All blocks of a stack share one module of positions; the first of them owns it.
    """

    def __init__(self, mixer: Mixer, channel: nn.Module, *, positions: Floater, number: int, **options: Any) -> None:
        super().__init__(mixer, channel, **options)
        if number == 0:
            self.positions = positions
        self.number, self._shared = number, (positions,)  # in a tuple: no further name for the same weights

    def forward(self, x: Tensor, valid: PaddingMask = None, *, rows: Tensor | None = None, **given: Any) -> Tensor:
        """Run the block; `rows` (b n blocks w) are the positions of all blocks, which a stack computes once."""
        places = valid if isinstance(valid, Places) else Places.of(x, valid)
        x = self._placed(x, places, rows)
        return super().forward(x, valid, **given)

    def extend(self, state: State, x: Tensor, valid: PaddingMask = None, *, rows: Tensor | None = None) -> tuple[Tensor, State]:
        places = valid if isinstance(valid, Places) else Places.of(x, valid, state.t, state.start)
        x = self._placed(x, places, rows)
        return super().extend(state, x, valid)

    def rows(self, x: Tensor, places: Places) -> Tensor | None:
        """Return the positions (b n blocks w), or (n blocks w), that enter all blocks of a stack; None without tokens."""
        if x.numel() == 0:
            return None
        return self._shared[0].rows(places)

    def _placed(self, x: Tensor, places: Places, rows: Tensor | None) -> Tensor:
        if rows is None:
            rows = self.rows(x, places)
        if rows is None:
            return x
        return x + rows[..., self.number, :].to(x.dtype)
