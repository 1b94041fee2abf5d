"""Tuning constants of all operations, one value for each kind of device: how much is computed at a time.

A budget changes speed and memory, never a result beyond rounding. `budget(device)` is the one place that tests for a device type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Budget:
    """How many elements of which tensor are in use at a time: what fits the caches of a CPU, or keeps a GPU busy."""

    # block-sparse attention
    tile_scores: int = 1 << 26  # scores of a batch of tiles; half as many in the backward pass
    tile_queries: int | None = None  # elements of the queries of the heads that are computed together; None: all
    few_queries: int = 16  # queries up to which all keys of a KV cache are scored
    # strips of a dimension: see `regard.ops.strip`
    strip: int = 1 << 26  # elements of the largest tensor of a strip
    softmax_strip: int = 1 << 25  # elements of the scores of a strip of queries, where all pairs are scored
    edge_strip: int = 1 << 26  # elements of the largest tensor of a strip of edges
    pair_strip: int = 1 << 22  # pairs of a strip that are tested one by one for being in a pattern
    triangle_rows: int = 1024  # rows of a triangular matrix that are multiplied together; what is above them is never touched
    conv_tokens: int = 1024  # tokens of a sequence that a dense convolution takes together
    compiled_strips: int = 4  # strips that torch.compile makes one of, so that short sequences have one graph
    # linear attention and the delta rule
    features: int = 1 << 26  # elements of the features of one run of tokens
    chunk: int = 64  # tokens in a chunk; a power of two
    prefix_steps: int = 16  # steps of a prefix scan that are taken one after the other, all blocks at the same time
    compiled_chunks: int = 8  # chunks that a graph of torch.compile has steps for, at least
    # search in a vocabulary
    topk_part: int | None = None  # tokens of a part whose maximum is found first; None: all at once


DEVICES: dict[str, Budget] = {
    "cpu": Budget(
        tile_scores=1 << 20,
        tile_queries=1 << 21,
        strip=1 << 21,
        softmax_strip=1 << 22,
        edge_strip=1 << 18,
        features=1 << 20,
        topk_part=64,
    ),
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
