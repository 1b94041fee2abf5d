"""Length bucketing: batches of examples of similar size, as a pure function of a seed and a step number.

There is no state: a run resumed at step 12,345 takes batch 12,345.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


class Batches:
    """Group indices of examples into batches with (examples in a batch) x (largest size among them) <= batch_tokens.

    Sizes are rounded up to one of 16 per power of two, at most 1/16 more. Examples of one rounded size are shuffled, rounded
    sizes are sorted, the sequence is cut into batches, and the batches are shuffled: little padding, different batches in every
    epoch, and the same number of them. With `alone`, an example larger than batch_tokens is a batch of its own.
    """

    def __init__(
        self, sizes: Sequence[int], batch_tokens: int, seed: int = 1, shuffle: bool = True, *, alone: bool = False
    ) -> None:
        given = np.asarray(sizes)
        self.sizes, self.batch_tokens, self.seed, self.shuffle = given.astype(np.int64), batch_tokens, seed, shuffle
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, not {batch_tokens!r}")
        if seed < 0:
            raise ValueError(f"the seed must not be below 0, but it is {seed!r}")
        whole = not len(given) or given.dtype.kind in "iu"
        if given.ndim != 1 or not whole or (self.sizes < 0).any():
            raise ValueError("sizes are one whole number for each example, none of them below 0")
        if not alone and len(self.sizes) and self.sizes.max() > batch_tokens:
            worst = int(self.sizes.argmax())
            raise ValueError(
                f"example {worst} has {self.sizes[worst]:,} tokens, but a batch has {batch_tokens:,} at most: "
                "raise batch_tokens, shorten the example, or give it a batch of its own (alone=True)"
            )
        self._rounded = np.minimum(_rounded_up(self.sizes), np.maximum(self.sizes, batch_tokens))
        self._cuts = self._cut(np.sort(self._rounded))
        self._last: tuple[int, list[list[int]]] | None = None

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._cuts) - 1

    def epoch(self, number: int) -> list[list[int]]:
        """Return all batches of an epoch: every example once. Without `shuffle` all epochs are alike, small examples first."""
        if number < 0:
            raise ValueError(f"epochs are counted from 0, not from {number!r}")
        if not self.shuffle:
            return self._batches(np.argsort(self._rounded, kind="stable"))
        rng = np.random.default_rng([self.seed, number])
        order = np.lexsort((rng.permutation(len(self.sizes)), self._rounded))
        batches = self._batches(order)
        return [batches[place] for place in rng.permutation(len(batches))]

    def at(self, step: int) -> list[int]:
        """Return the batch of a step, counted from 0 across epochs."""
        if not len(self):
            raise ValueError("there is no batch, because there are no examples")
        if step < 0:
            raise ValueError(f"steps are counted from 0, not from {step!r}")
        number, place = divmod(step, len(self))
        if self._last is None or self._last[0] != number:
            self._last = number, self.epoch(number)
        return self._last[1][place]

    def _batches(self, order: np.ndarray) -> list[list[int]]:
        return [order[first:end].tolist() for first, end in pairwise(self._cuts)]

    def _cut(self, ascending: np.ndarray) -> list[int]:
        """Return the boundaries of batches. They depend on the rounded sizes alone, so they are the same in every epoch."""
        cuts = [0]
        for place, size in enumerate(ascending.tolist()):
            if place > cuts[-1] and (place + 1 - cuts[-1]) * size > self.batch_tokens:
                cuts.append(place)
        return cuts if cuts[-1] == len(ascending) else [*cuts, len(ascending)]


def _rounded_up(sizes: np.ndarray) -> np.ndarray:
    """Round sizes up to 1, 2, ..., 32, 34, ..., 64, 68, ...: small sizes stay exact, large ones share buckets."""
    powers = np.frexp(np.maximum(sizes, 1).astype(np.float64))[1]  # 2**(powers - 1) <= size
    step = 2 ** np.maximum(powers.astype(np.int64) - 5, 0)
    return np.maximum(-(-sizes // step) * step, 1)
