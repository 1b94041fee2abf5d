"""CTC decoding: the likeliest path, and prefix beam search, which sums over all paths of an output.

Letters: b batch, t slots, v classes, the blank among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from regard.checks import need

CTC_BLANK = 0  # the class of blanks; the same number as PAD, which no output has
IMPOSSIBLE = -math.inf


class CtcAnswer(NamedTuple):
    """Hold an output and the log of its probability, summed over the paths that the search has kept."""

    tokens: tuple[int, ...]
    log: float


class _Prefix(NamedTuple):
    """Logs of the probability of a prefix, by whether its last slot is a blank."""

    blank: float
    token: float

    @property
    def total(self) -> float:
        return _log_add(self.blank, self.token)


def ctc_greedy(logs: Tensor, lengths: Sequence[int], blank: int = CTC_BLANK) -> list[list[int]]:
    """Return the outputs of the likeliest path of every row of log-probabilities (b t v): repetitions merged, blanks removed."""
    found = []
    for row, length in zip(logs.argmax(-1).tolist(), lengths, strict=True):
        path = row[:length]
        found.append([now for before, now in zip([blank, *path], path, strict=False) if now not in (blank, before)])
    return found


def ctc_prefix_beam(logs: Tensor, *, width: int = 10, best: int = 1, blank: int = CTC_BLANK) -> list[CtcAnswer]:
    """Search the `best` outputs of log-probabilities (t v) of one row, the likeliest first. Graves 2008; Hannun et al. 2014.

    The `width` likeliest prefixes are kept after every slot, each with the sum over all of its paths that went through kept
    prefixes: with a width of all prefixes, that is the exact probability of every output.
    """
    if logs.dim() != 2:
        raise ValueError(f"one row of log-probabilities has the shape (slots, classes), not {tuple(logs.shape)}")
    need("width", width)
    need("best", best)
    beam = CtcBeam(width, blank)
    beam.extend(logs)
    return beam.answers(best)


class CtcBeam:
    """Search in slots as they come: `extend` reads more of them, `answers` are those of all slots so far.

    With `within`, prefixes whose log is that much below the best one's are given up too.
    """

    def __init__(self, width: int = 10, blank: int = CTC_BLANK, *, within: float = math.inf) -> None:
        self.width, self.blank, self.within = need("width", width), blank, within
        self.prefixes: dict[tuple[int, ...], _Prefix] = {(): _Prefix(0.0, IMPOSSIBLE)}

    def extend(self, logs: Tensor) -> None:
        """Read further slots (t v)."""
        rows = logs.detach().double().cpu()
        count = min(rows.shape[1], self.width + 2)  # another class extends a prefix to one that `width` others are better than
        for row, top in zip(rows.tolist(), rows.topk(count, dim=1).indices.tolist(), strict=True):
            classes = {*top, *(prefix[-1] for prefix in self.prefixes if prefix)} - {self.blank}
            self._slot({k: row[k] for k in sorted(classes)}, row[self.blank])

    def _slot(self, tokens: dict[int, float], blank: float) -> None:
        """Extend all prefixes by one slot: with the blank or with one of these tokens."""
        grown: dict[tuple[int, ...], _Prefix] = {}

        def add(prefix: tuple[int, ...], *, blank: float = IMPOSSIBLE, token: float = IMPOSSIBLE) -> None:
            old = grown.get(prefix, _Prefix(IMPOSSIBLE, IMPOSSIBLE))
            grown[prefix] = _Prefix(_log_add(old.blank, blank), _log_add(old.token, token))

        for prefix, logs in self.prefixes.items():
            add(prefix, blank=logs.total + blank)
            for k, here in tokens.items():
                if prefix and prefix[-1] == k:
                    add(prefix, token=logs.token + here)
                    add((*prefix, k), token=logs.blank + here)
                else:
                    add((*prefix, k), token=logs.total + here)
        best = max(logs.total for logs in grown.values())
        possible = [pair for pair in grown.items() if pair[1].total > max(IMPOSSIBLE, best - self.within)]
        self.prefixes = dict(sorted(possible, key=lambda pair: -pair[1].total)[: self.width])

    def answers(self, best: int = 1) -> list[CtcAnswer]:
        """Return the likeliest outputs of the slots so far."""
        ordered = sorted(self.prefixes.items(), key=lambda pair: -pair[1].total)
        return [CtcAnswer(prefix, logs.total) for prefix, logs in ordered[:best]]

    def agreed(self) -> tuple[int, ...]:
        """Return the tokens that all kept prefixes begin with: later slots cannot change them."""
        first, *others = self.prefixes
        for other in others:
            same = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
            first = first[:same]
        return first


def _log_add(a: float, b: float) -> float:
    if a < b:
        a, b = b, a
    return a if b == IMPOSSIBLE else a + math.log1p(math.exp(b - a))
