"""Boxes of images: intersection over union, its generalisation, and suppression of boxes that overlap a better one.

A box is (left, top, right, bottom), or (x, y, width, height) with its middle first, in sides of the image. Letters: b images,
n boxes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def box_corners(boxes: Tensor) -> Tensor:
    """Return (left, top, right, bottom) of boxes (... 4) given by their middle and size."""
    middle, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([middle - half, middle + half], -1)


def box_middles(boxes: Tensor) -> Tensor:
    """Return (x, y, width, height) of boxes (... 4) given by their corners."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(low + high) / 2, high - low], -1)


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp_min(0).prod(-1)


def _shared(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the areas of intersection and union of boxes (... 4), which are broadcast."""
    low = torch.maximum(one[..., :2], other[..., :2])
    high = torch.minimum(one[..., 2:], other[..., 2:])
    both = (high - low).clamp_min(0).prod(-1)
    return both, _areas(one) + _areas(other) - both


def box_iou(one: Tensor, other: Tensor) -> Tensor:
    """Compute intersection over union of boxes (... 4), which are broadcast: from 0 to 1."""
    both, union = _shared(one, other)
    return both / union.clamp_min(1e-9)


def generalised_iou(one: Tensor, other: Tensor) -> Tensor:
    """Compute IoU - (hull - union) / hull of boxes (... 4), from -1 to 1: it has a gradient where boxes do not meet, too.

    The hull is the smallest box around both. Rezatofighi et al. 2019, arXiv:1902.09630.
    """
    both, union = _shared(one, other)
    low = torch.minimum(one[..., :2], other[..., :2])
    high = torch.maximum(one[..., 2:], other[..., 2:])
    hull = (high - low).clamp_min(0).prod(-1).clamp_min(1e-9)
    return both / union.clamp_min(1e-9) - (hull - union) / hull


def suppressed(boxes: Tensor, scores: Tensor, most: float) -> Tensor:
    """Return which boxes (b n 4) remain, (b n): those whose IoU with no better one that remains is above `most`."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ordered = boxes.gather(1, order[..., None].expand_as(boxes))
    near = box_iou(ordered[:, :, None], ordered[:, None]) > most
    kept = torch.ones_like(order, dtype=torch.bool)
    for place in range(1, boxes.shape[1]):
        kept[:, place] = ~(near[:, place, :place] & kept[:, :place]).any(1)
    return torch.zeros_like(kept).scatter(1, order, kept)
