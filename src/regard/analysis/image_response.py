"""How a classifier of images answers when one image is shifted, scaled or rotated, and what its filters make of an image.

Letters: b batch, c channels, h height, w width, f filters, m images of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHIFTS = (-12, -8, -4, -2, 0, 2, 4, 8, 12)  # pixels to the right
SCALES = (0.4, 0.55, 0.7, 0.85, 1.0, 1.2, 1.45, 1.75, 2.1)
DEGREES = (-90, -60, -30, -15, 0, 15, 30, 60, 90)


class ResponseRow(NamedTuple):
    """One kind of change: images with more and more of it, and the probability of the label for each."""

    name: str
    values: tuple[float, ...]
    images: Tensor  # (m c h w)
    probabilities: Tensor  # (m)


def moved_image(image: Tensor, *, right: float = 0.0, scale: float = 1.0, degrees: float = 0.0) -> Tensor:
    """Shift an image (c h w) by pixels to the right, scale it, or rotate it counter-clockwise about its middle; the same size.

    What comes from outside repeats the border.
    """
    _, h, w = image.shape
    angle = math.radians(degrees)
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    rows = [[cos, -sin * h / w, -2 * right / w], [sin * w / h, cos, 0.0]]
    theta = torch.tensor([rows], dtype=image.dtype, device=image.device)
    grid = F.affine_grid(theta, [1, *image.shape], align_corners=False)
    return F.grid_sample(image[None], grid, padding_mode="border", align_corners=False)[0]


@torch.no_grad()
def image_response(
    answer: Callable[[Tensor], Tensor],
    image: Tensor,
    label: int,
    *,
    shifts: Sequence[float] = SHIFTS,
    scales: Sequence[float] = SCALES,
    degrees: Sequence[float] = DEGREES,
) -> list[ResponseRow]:
    """Compute the probability of a label for an image (c h w) that is shifted, scaled and rotated.

    `answer` maps images (b c h w) to scores (b labels).
    """
    kinds: dict[str, tuple[Sequence[float], Callable[[float], Tensor]]] = {
        "shifted, in pixels": (shifts, lambda value: moved_image(image, right=value)),
        "scaled": (scales, lambda value: moved_image(image, scale=value)),
        "rotated, in degrees": (degrees, lambda value: moved_image(image, degrees=value)),
    }
    found = []
    for name, (values, change) in kinds.items():
        images = torch.stack([change(value) for value in values])
        probabilities = answer(images).float().softmax(-1)[:, label]
        found.append(ResponseRow(name, tuple(values), images, probabilities))
    return found


class FilterMaps(NamedTuple):
    """Filters of a convolution and their feature maps of one image."""

    filters: Tensor  # (f c kernel kernel)
    maps: Tensor  # (f h' w')


@torch.no_grad()
def filter_maps(conv: nn.Conv2d, image: Tensor) -> FilterMaps:
    """Compute the feature map of every filter of a convolution on an image (c h w)."""
    if image.dim() != 3 or image.shape[0] != conv.in_channels:
        raise ValueError(f"an image has shape ({conv.in_channels}, height, width), not {tuple(image.shape)}")
    return FilterMaps(conv.weight.detach(), conv(image[None])[0])


def first_convolution(model: nn.Module) -> nn.Conv2d:
    """Find the first convolution of a model."""
    found = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no convolution")
    return found
