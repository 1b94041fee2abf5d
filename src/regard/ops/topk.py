"""The largest of many scores, such as those of a vocabulary: on a CPU, the maxima of parts are found first."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.budget import budget

MIN_PARTS = 16  # fewer parts of the scores are no gain


def argmax_first(scores: Tensor) -> Tensor:
    """Return scores.argmax(-1) of (x v), the first of equals."""
    size = _part_size(scores)
    if size is None:
        return scores.argmax(-1)
    part = _part_maxima(scores, size).argmax(-1, keepdim=True)
    places = _candidates(scores, part, size)
    best = scores.gather(1, places).argmax(-1, keepdim=True)
    return places.gather(1, best)[:, 0]


def topk_by_part(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of (x v) in falling order, and their indices: they are in the k parts with the largest maxima."""
    size = _part_size(scores)
    if size is None or k > scores.shape[1] // size:
        best = scores.topk(k, dim=1)
        return best.values, best.indices
    parts = _part_maxima(scores, size).topk(k, dim=1).indices
    places = _candidates(scores, parts, size)
    best = scores.gather(1, places).topk(k, dim=1)
    return best.values, places.gather(1, best.indices)


def _part_size(scores: Tensor) -> int | None:
    """Scores in a part; None where parts are no gain."""
    size = budget(scores.device).topk_part
    if size is None or scores.shape[1] < MIN_PARTS * size:
        return None
    return size


def _part_maxima(scores: Tensor, size: int) -> Tensor:
    """The maximum of every whole part, (x v) -> (x parts)."""
    parts = scores.shape[1] // size
    return scores[:, : parts * size].unflatten(1, (parts, size)).amax(-1)


def _candidates(scores: Tensor, parts: Tensor, size: int) -> Tensor:
    """The indices of all scores of these parts (x p), and of those behind the last whole part."""
    v, device = scores.shape[1], scores.device
    inside = parts[..., None] * size + torch.arange(size, device=device)
    behind = torch.arange(v // size * size, v, device=device)
    return torch.cat([inside.flatten(1), behind.expand(len(scores), -1)], 1)
