"""The order of training examples: which are in the batch of a step, and how long that batch is. A function of seed and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDED_LENGTH = 64  # padded lengths are multiples of this


class BatchGroup(NamedTuple):
    """Hold the examples whose batches are padded to one length."""

    length: int | None  # None: that of the task
    rows: Tensor  # numbers of the examples, on the host


def one_group(count: int) -> list[BatchGroup]:
    """Put all examples into one group, padded to the length of the task."""
    return [BatchGroup(None, torch.arange(count))]


def length_groups(lengths: Tensor, buckets: int, batch: int, longest: int) -> list[BatchGroup]:
    """Divide examples by their lengths (examples,) into groups of about equal numbers, the longest ones last.

    There are fewer groups than asked for where rounded lengths are equal, or where a group would have less than a batch.
    """
    ranked = lengths.long().cpu().sort(stable=True)
    cuts = [len(lengths) * number // buckets for number in range(1, buckets + 1)]
    ends = sorted({min(longest, _rounded(int(ranked.values[cut - 1]))) for cut in cuts if cut})
    found: list[BatchGroup] = []
    first = 0
    for end in ends:
        last = int(torch.searchsorted(ranked.values, end, right=True))
        if last - first >= batch or end == ends[-1]:
            found.append(BatchGroup(end, ranked.indices[first:last].sort().values))
            first = last
    if len(found) > 1 and len(found[-1].rows) < batch:
        rest = found.pop()
        found[-1] = BatchGroup(rest.length, torch.cat([found[-1].rows, rest.rows]).sort().values)
    return found


def _rounded(length: int) -> int:
    return max(1, -(-length // ROUNDED_LENGTH)) * ROUNDED_LENGTH


class BatchOrder:
    """Give the numbers of the examples of each batch: permutations an epoch, all examples of a batch from one group.

    What is left of a group behind its last whole batch is left out of that epoch.
    """

    def __init__(self, groups: Sequence[BatchGroup], batch: int, seed: int, device: torch.device) -> None:
        self.groups, self.seed, self.device = groups, seed, device
        self.batch = min(batch, max(len(group.rows) for group in groups))
        counts = [len(group.rows) // self.batch for group in groups]
        self.in_epoch = sum(counts)
        self.owners = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
        self.epoch, self.order, self.owner = -1, torch.empty(0), torch.empty(0)

    def __call__(self, step: int) -> Tensor:
        """Return the numbers of the examples of a step, on the device."""
        inside = self._inside(step)
        return self.order[inside]

    def length(self, step: int) -> int | None:
        """Return the padded length of the batch of a step; None: that of the task."""
        if len(self.groups) == 1:
            return self.groups[0].length
        inside = self._inside(step)
        return self.groups[int(self.owner[inside])].length

    def _inside(self, step: int) -> int:
        """Draw the epoch of a step, unless it is the one that was drawn last; returns the number of the batch in it."""
        epoch, inside = divmod(step, self.in_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            parts = [self._batches(group.rows, generator) for group in self.groups]
            mixed = torch.randperm(self.in_epoch, generator=generator) if len(parts) > 1 else torch.arange(self.in_epoch)
            self.epoch, self.order, self.owner = epoch, torch.cat(parts)[mixed].to(self.device), self.owners[mixed]
        return inside

    def _batches(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Permute examples and cut them into whole batches, (batches, batch)."""
        mixed = rows[torch.randperm(len(rows), generator=generator)]
        return mixed[: len(rows) // self.batch * self.batch].view(-1, self.batch)
