"""Tuning constants of all operations, one value for each kind of device: how much is computed at a time.

A budget changes speed and memory, never a result beyond rounding. `budget(device)` is the one place that tests for a device type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Budget:
    """How many elements of which tensor are in use at a time."""

    tile_scores: int = 1 << 26  # scores of a batch of tiles; half as many in the backward pass
    tile_queries: int | None = None  # elements of the queries of the heads that are computed together; None: all
    strip: int = 1 << 26  # elements of the largest tensor of a strip
    softmax_strip: int = 1 << 22  # elements of the scores of a strip of queries
    edge_strip: int = 1 << 26  # elements of the largest tensor of a strip of edges
    features: int = 1 << 26  # elements of the features of one run of kernelized attention
    chunk: int = 64  # tokens in a chunk of linear attention and the delta rule; a power of two
    few_queries: int = 16  # queries up to which all keys of a KV cache are scored


DEVICES: dict[str, Budget] = {
    "cpu": Budget(tile_scores=1 << 20, tile_queries=1 << 21, strip=1 << 21, edge_strip=1 << 18, features=1 << 20),
}
DEFAULT = Budget()


def budget(device: torch.device) -> Budget:
    """Return the budget of a device's type."""
    return DEVICES.get(device.type, DEFAULT)


def set_budget(kind: str, **changes: Any) -> Budget:
    """Change constants of one device type, "cpu" or "cuda"; return the budget as it was."""
    before = DEVICES.get(kind, DEFAULT)
    DEVICES[kind] = replace(before, **changes)
    return before
