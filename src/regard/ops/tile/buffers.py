"""What a pass over tiles works with: buffers that are used again, and sequences cut into blocks."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from regard.patterns.tiles import Layout

HELD = 1 << 22  # elements of the largest buffer that is kept between calls


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Scratch:
    """Buffers used again by every batch of tiles: fresh pages cost more than the arithmetic."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.flat: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        flat = self.flat.get(name)
        if flat is None or len(flat) < size:
            with torch.inference_mode(False):  # a buffer outlives the mode it is made in
                flat = torch.empty(size, dtype=self.dtype, device=self.device)
            if size <= HELD:
                self.flat[name] = flat
        return flat[:size].view(shape)


class _Own(threading.local):
    """On a CPU a thread keeps its buffers from call to call: some tens of megabytes, and twice the speed of a short pass."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype], Scratch] = {}

    def scratch(self, use: str, dtype: torch.dtype, device: torch.device) -> Scratch:
        if device.type != "cpu":
            return Scratch(dtype, device)
        return self.kept.setdefault((use, dtype), Scratch(dtype, device))


kept_buffers = _Own()


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Batched matrix product into a buffer of the accumulating type."""
    if a.dtype == out.dtype:
        return torch.bmm(a, b, out=out)
    return torch.bmm(a, b, out_dtype=out.dtype)  # half precision on a GPU: operands stay half, sums are float32


class Blocked:
    """A sequence (B length x) seen through a layout, (B blocks size x), and the way back."""

    def __init__(self, x: Tensor, layout: Layout) -> None:
        self.layout, self.length, self.device = layout, x.shape[1], x.device
        if layout.index is not None:
            x = x.index_select(1, layout.moves(x.device)[0])
        elif layout.blocks * layout.size > x.shape[1]:
            x = torch.nn.functional.pad(x, (0, 0, 0, layout.blocks * layout.size - x.shape[1]))
        self.blocks = x.unflatten(1, (layout.blocks, layout.size))

    @property
    def tokens(self) -> Tensor | None:
        """Which tokens `back` speaks of; None: all of them, in order."""
        if self.layout.index is None or self.layout.everyone:
            return None
        moves, back = self.layout.moves(self.device)
        return moves[back]

    def back(self, blocks: Tensor) -> Tensor:
        """(B blocks size ...) -> (B tokens ...)."""
        flat = blocks.flatten(1, 2)
        if self.layout.index is None:
            return flat[:, : self.length]
        return flat.index_select(1, self.layout.moves(self.device)[1])
