"""Whether an utterance was read from the first character to the last, and how far two utterances are apart.

Letters: m steps, n characters, t and u windows, f features.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

SLACK = 3  # characters that a path may leave out or go back, in texts of which some are not heard


class AlignmentFailure(NamedTuple):
    """Hold what went wrong with one utterance."""

    skips: bool  # the path leaves out more than `slack` characters in a row, at the ends too
    repeats: bool  # it goes back by more than `slack` characters
    endless: bool  # there was no stop

    @property
    def any(self) -> bool:
        return self.skips or self.repeats or self.endless


def alignment_failure(weights: Tensor, stopped: bool, *, slack: int = SLACK) -> AlignmentFailure:
    """Judge the path of weights (m n), which is the character of the largest weight at every step."""
    path = weights.argmax(1).tolist()
    n, farthest, back = weights.shape[1], -1, 0
    passed = []
    for at in path:
        passed.append(at - farthest - 1)
        farthest = max(farthest, at)
        back = max(back, farthest - at)
    passed.append(n - 1 - farthest)
    return AlignmentFailure(max(passed) > slack, back > slack, not stopped)


def diagonality(weights: Tensor) -> float:
    """Return the share of the weights (m n) within a tenth of the diagonal, 0 to 1."""
    m, n = weights.shape
    rows, columns = np.arange(m)[:, None] / max(1, m - 1), np.arange(n)[None] / max(1, n - 1)
    numbers = weights.double().numpy()
    return float((numbers * (abs(rows - columns) <= 0.1)).sum() / max(numbers.sum(), 1e-12))


def dtw_distance(a: Tensor, b: Tensor) -> float:
    """Compute the mean distance of features (t f) and (u f) along the path that joins them most cheaply: dynamic time warping.

    The distance of two windows is the mean absolute difference of their features. A path goes from the first windows to the
    last by steps of one in either or both, and its cost is the mean over its cells, of the path with the lowest sum.
    """
    apart = np.abs(a.double().numpy()[:, None] - b.double().numpy()[None]).mean(-1)
    sums = _lowest_sums(apart)
    path = [(len(a), len(b))]
    while path[-1] != (1, 1):
        i, j = path[-1]
        path.append(min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda cell: sums[cell]))
    return float(np.mean([apart[i - 1, j - 1] for i, j in path]))


def _lowest_sums(apart: np.ndarray) -> np.ndarray:
    """Sum costs (t u) along the cheapest path to each cell, (t + 1, u + 1): one diagonal after another."""
    t, u = apart.shape
    sums = np.full((t + 1, u + 1), np.inf)
    sums[0, 0] = 0
    for diagonal in range(2, t + u + 1):
        i = np.arange(max(1, diagonal - u), min(t, diagonal - 1) + 1)
        j = diagonal - i
        sums[i, j] = apart[i - 1, j - 1] + np.minimum(sums[i - 1, j - 1], np.minimum(sums[i - 1, j], sums[i, j - 1]))
    return sums
