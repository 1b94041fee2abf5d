"""A batch: the only place where masks are born.

Letters: b examples, n source tokens, m target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PAD, UNKNOWN, BEGIN, END, MASK = range(5)
SPECIAL = ("<pad>", "<unknown>", "<begin>", "<end>", "<mask>")  # the first words of every vocabulary
NO_LABEL = -100


class Batch(NamedTuple):
    """Some examples side by side."""

    source: Tensor  # (b n) tokens, or (b n f) vectors
    source_valid: Tensor | None = None  # (b n); None: all are real
    target: Tensor | None = (
        None  # (b m) a sequence with its END; (b n) a label per token, NO_LABEL where none; (b) one per sequence
    )
    target_valid: Tensor | None = None  # (b m)
    extra: dict[str, Tensor] = {}  # noqa: RUF012 - what only one task knows; never changed

    def to(self, device: torch.device | str) -> Batch:
        source, source_valid, target, target_valid = (None if x is None else x.to(device, non_blocking=True) for x in self[:4])
        assert source is not None
        moved = {name: x.to(device, non_blocking=True) for name, x in self.extra.items()}
        return Batch(source, source_valid, target, target_valid, moved)

    def pin_memory(self) -> Batch:
        source, source_valid, target, target_valid = (None if x is None else x.pin_memory() for x in self[:4])
        assert source is not None
        return Batch(source, source_valid, target, target_valid, {name: x.pin_memory() for name, x in self.extra.items()})


def padded(rows: Sequence[Sequence[int]], fill: int = PAD, multiple: int = 1) -> tuple[Tensor, Tensor | None]:
    """Rows of tokens as one tensor (b n), and which are real: None where all are.

    With a `multiple` above 1 its length is one of it and the mask is always there, so that few shapes occur.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    longest = -(-int(lengths.max(initial=0)) // multiple) * multiple
    real = np.arange(longest) < lengths[:, None]
    tokens = np.full(real.shape, fill, np.int64)
    tokens[real] = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    return torch.from_numpy(tokens), None if multiple == 1 and real.all() else torch.from_numpy(real)


def shifted(target: Tensor) -> Tensor:
    """What a decoder is told while it learns to say `target` (b m): the begin, and all but the last."""
    return torch.cat([torch.full_like(target[:, :1], BEGIN), target[:, :-1]], 1)
