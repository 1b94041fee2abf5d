"""The number of tokens up to which the scores of all pairs may be made at once."""

from __future__ import annotations

import torch

DENSE_LIMIT = 8192


def dense_refused(n: int, m: int) -> str | None:
    """Return why a definition, which makes the scores of n queries and m keys at once, does not take a call; None: it does."""
    if torch.compiler.is_compiling() or min(n, m) <= DENSE_LIMIT:  # while compiling, sizes may be symbols
        return None
    return f"it makes all scores of {n:,} queries and {m:,} keys at once, and takes up to {DENSE_LIMIT:,} tokens"
