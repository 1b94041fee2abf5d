"""Ranks of moves, and moves without a network: drawn among the allowed points, or at the most frequent offset from the last move.

Letters: n positions, p points of the board.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from regard.data.go_games import GoPositions

RANKED_AT_ONCE = 4096  # positions whose points are compared together


class MoveRanks(NamedTuple):
    """Count for each move (n) the points that are likelier, and those that are as likely, the move itself among them."""

    above: np.ndarray
    equal: np.ndarray

    def within(self, most: int) -> np.ndarray:
        """Return the probability (n) that a move is among the first `most` points, with equals in random order."""
        return np.clip((most - self.above) / self.equal, 0, 1)


def drawn_move_scores(asked: GoPositions, top: int = 5) -> tuple[float, float]:
    """Compute how often a point drawn among the allowed ones is the move, or one of `top` of them, in percent."""
    allowed = np.maximum((asked.kinds == 0).sum(1), 1)
    return _percent(1 / allowed), _percent(np.minimum(top, allowed) / allowed)


class MoveOffsets:
    """How often moves were so many rows and columns from the last one; from the centre where there was none.

    `last` and `move` (n) are points of a board of `side` x `side`; p is no last move.
    """

    def __init__(self, last: np.ndarray, move: np.ndarray, side: int) -> None:
        self.side = side
        self.counts = np.bincount(self._offsets(last.astype(int), move.astype(int)), minlength=(2 * side + 1) ** 2)

    def scores(self, asked: GoPositions, top: int = 5) -> tuple[float, float]:
        """Compute how often the allowed point with the most frequent offset is the move, or one of `top` points, in percent."""
        ranks = self.ranks(asked)
        return _percent(ranks.within(1)), _percent(ranks.within(top))

    def ranks(self, asked: GoPositions) -> MoveRanks:
        """Rank the offset of each move (n) among those of the allowed points."""
        points, above, equal = np.arange(self.side**2), [np.empty(0, int)], [np.empty(0, int)]
        for start in range(0, len(asked.move), RANKED_AT_ONCE):
            kinds, recent, move = (x[start : start + RANKED_AT_ONCE] for x in (asked.kinds, asked.recent, asked.move))
            offsets = self._offsets(recent[:, :1].astype(int), points[None])
            frequent = np.where(kinds == 0, self.counts[offsets], -1)
            own = np.take_along_axis(frequent, move[:, None].astype(int), 1)
            above.append((frequent > own).sum(1))
            equal.append((frequent == own).sum(1))
        return MoveRanks(np.concatenate(above), np.concatenate(equal))

    def _offsets(self, last: np.ndarray, point: np.ndarray) -> np.ndarray:
        """Number the rows and columns between two points."""
        side = self.side
        last = np.where(last == side * side, side * side // 2, last)
        return (point // side - last // side + side) * (2 * side + 1) + point % side - last % side + side


def _percent(share: np.ndarray) -> float:
    return 100 * float(share.mean()) if len(share) else 0.0
