"""Batches of padded examples and their validity masks.

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
SPECIAL = ("<pad>", "<unknown>", "<begin>", "<end>", "<mask>")  # the first entries of every vocabulary
NO_LABEL = -100


class Batch(NamedTuple):
    """Padded tensors of several examples."""

    source: Tensor  # (b n) tokens, or (b n f) vectors
    source_valid: Tensor | None = None  # (b n); None: no padding
    # (b m) a sequence with its END; (b n) a label per token, NO_LABEL where there is none; (b) a label per sequence
    target: Tensor | None = None
    target_valid: Tensor | None = None  # (b m)
    extra: dict[str, Tensor] = {}  # noqa: RUF012 - tensors of one task alone; never changed in place

    def to(self, device: torch.device | str) -> Batch:
        source, source_valid, target, target_valid = (None if x is None else x.to(device, non_blocking=True) for x in self[:4])
        assert source is not None
        moved = {name: x.to(device, non_blocking=True) for name, x in self.extra.items()}
        return Batch(source, source_valid, target, target_valid, moved)

    def pin_memory(self) -> Batch:
        source, source_valid, target, target_valid = (None if x is None else x.pin_memory() for x in self[:4])
        assert source is not None
        pinned = {name: x.pin_memory() for name, x in self.extra.items()}
        return Batch(source, source_valid, target, target_valid, pinned)


def padded(rows: Sequence[Sequence[int]], fill: int = PAD, multiple: int = 1) -> tuple[Tensor, Tensor | None]:
    """Pad rows of tokens to one tensor (b n), and return it with its validity mask: None where nothing is padded.

    With a `multiple` above 1 the length is rounded up to a multiple of it and the mask is always a tensor: few shapes occur.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    longest = int(lengths.max(initial=0))
    rounded = -(-longest // multiple) * multiple
    real = np.arange(rounded) < lengths[:, None]
    tokens = np.full(real.shape, fill, np.int64)
    tokens[real] = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    mask = None if multiple == 1 and real.all() else torch.from_numpy(real)
    return torch.from_numpy(tokens), mask


def shifted(target: Tensor) -> Tensor:
    """Shift targets (b m) to decoder inputs for teacher forcing: BEGIN, then all but the last token."""
    return torch.cat([torch.full_like(target[:, :1], BEGIN), target[:, :-1]], 1)
