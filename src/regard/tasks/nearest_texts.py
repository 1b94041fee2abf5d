"""The nearest text of a training part, for floors that repeat what was learned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regard.scores import edits

NEAR_COUNTS = 20  # texts with the nearest counts of characters, among which edits decide


def nearest_texts(texts: Sequence[str], train: Sequence[str]) -> list[int]:
    """Find the place in `train` of the text with the fewest edits from each, of those with the nearest counts of characters."""
    signs = sorted(set("".join(train)) | set("".join(texts)))
    learned = np.array([[text.count(sign) for sign in signs] for text in train])
    found = []
    for text in texts:
        apart = np.abs(learned - np.array([text.count(sign) for sign in signs])).sum(1)
        near = np.argsort(apart, kind="stable")[:NEAR_COUNTS].tolist()
        found.append(min(near, key=lambda at: edits(train[at], text)))
    return found
