"""Batches as a function of seed and step: epochs are shuffled, each by its own seed, and its last examples are left out."""

from __future__ import annotations

import torch
from torch import Tensor


class EpochOrder:
    """The order of examples in the current epoch, on their device."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.order, self.epoch = torch.empty(0, dtype=torch.long), -1

    def rows(self, step: int, size: int, seed: int) -> Tensor:
        """Return the numbers of the examples of a step."""
        size = min(size, self.count)
        epoch, place = divmod(step, self.count // size)
        if epoch != self.epoch:
            drawn = torch.randperm(self.count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
            self.order, self.epoch = drawn.to(self.device), epoch
        return self.order[place * size : (place + 1) * size]
