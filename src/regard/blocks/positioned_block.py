"""A block whose input carries positions of its own, for positions that enter every block of a stack."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.blocks.block import Block
from regard.mixers.base import Mixer, Places, State
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

    def forward(self, x: Tensor, valid: Tensor | None = None, **given: Any) -> Tensor:
        return super().forward(self._placed(x, Places.of(x, valid)), valid, **given)

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None, *, hush: bool = True) -> tuple[Tensor, State]:
        return super().extend(state, self._placed(x, Places.of(x, valid, state.t, state.start)), valid, hush=hush)

    def _placed(self, x: Tensor, places: Places) -> Tensor:
        return self._shared[0].enter(x, places, self.number)
