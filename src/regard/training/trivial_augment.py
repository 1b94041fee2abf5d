"""Random changes of training images, one of fourteen operations of random strength for each: TrivialAugment.

Mueller, Hutter 2021, arXiv:2103.10158. Constant shapes, on the device of the images, without a branch: a captured step can have
it. The ranges are those of RandAugment (Cubuk et al. 2019, arXiv:1909.13719), for images of any size; strengths are continuous.
Images are floats (b c height width) from 0 to 1. What a geometric operation brings from outside is gray.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

LUMA = (0.299, 0.587, 0.114)  # red, green and blue in a gray level
GRAY_LEVELS = 256
COLOUR_RANGE = 0.9  # brightness, contrast, saturation and sharpness are scaled by 1 - range to 1 + range
FEWEST_BITS, MOST_BITS = 4, 8  # of posterize
ANGLE = torch.pi / 6  # of a rotation, at most
SHEAR = 0.3  # pixels a pixel
SHIFT = 10 / 32  # of the side of an image
OUTSIDE = 0.5

Change = Callable[[Tensor, Tensor, Tensor], Tensor]  # of images, strengths from 0 to 1, and those with a random sign


def gray_level(images: Tensor) -> Tensor:
    """Return the gray levels (b 1 height width) of images in colour; images in gray are their own."""
    if images.shape[1] != 3:
        return images
    return sum(share * images[:, i : i + 1] for i, share in enumerate(LUMA))  # type: ignore[return-value]


def _towards(base: Tensor, images: Tensor, signed: Tensor) -> Tensor:
    """Scale the distance of images to a base, by 1 plus or minus a share of the range."""
    return (base + (images - base) * (1 + COLOUR_RANGE * signed)).clamp(0, 1)


def _brightness(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:  # noqa: ARG001 - one form for all operations
    return _towards(torch.zeros_like(images), images, signed)


def _contrast(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:  # noqa: ARG001
    return _towards(gray_level(images).mean((1, 2, 3), keepdim=True), images, signed)


def _saturation(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:  # noqa: ARG001
    return _towards(gray_level(images), images, signed)


def _sharpness(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:  # noqa: ARG001
    """Scale the distance to a blurred image, whose pixels are means of 3 x 3 with five times the weight in the middle."""
    inner = (9 * F.avg_pool2d(images, 3, stride=1) + 4 * images[:, :, 1:-1, 1:-1]) / 13
    blurred = images.clone()
    blurred[:, :, 1:-1, 1:-1] = inner
    return _towards(blurred, images, signed)


def _posterize(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:  # noqa: ARG001
    """Keep the first four to eight bits of each level."""
    dropped = (strength * (MOST_BITS - FEWEST_BITS + 1)).floor().clamp_max(MOST_BITS - FEWEST_BITS)
    step = torch.exp2(dropped)
    return (_levels(images) / step).floor() * step / (GRAY_LEVELS - 1)


def _solarize(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:  # noqa: ARG001
    """Invert levels from a threshold on: none of them at strength 0, all at 1."""
    return torch.where(images >= 1 - strength, 1 - images, images)


def _autocontrast(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:  # noqa: ARG001
    """Stretch each channel to all levels."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp_min(1e-6), images)


def _equalize(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:  # noqa: ARG001
    """Map the levels of each channel so that all are about as frequent: the table of Pillow's `ImageOps.equalize`."""
    levels = _levels(images).flatten(2).long()
    counts = torch.zeros(*levels.shape[:2], GRAY_LEVELS, device=images.device)
    counts = counts.scatter_add(2, levels, torch.ones_like(levels, dtype=counts.dtype))
    brightest = counts.gather(2, levels.amax(2, keepdim=True))
    step = ((levels.shape[2] - brightest) / (GRAY_LEVELS - 1)).floor()
    before = counts.cumsum(2) - counts
    table = (((step / 2).floor() + before) / step.clamp_min(1)).floor().clamp_max(GRAY_LEVELS - 1)
    table = torch.where(step > 0, table, torch.arange(GRAY_LEVELS, device=images.device, dtype=table.dtype))
    return (table.gather(2, levels) / (GRAY_LEVELS - 1)).reshape(images.shape)


def _levels(images: Tensor) -> Tensor:
    return (images * (GRAY_LEVELS - 1)).round()


COLOUR_CHANGES: tuple[Change, ...] = (
    _brightness,
    _contrast,
    _saturation,
    _sharpness,
    _posterize,
    _solarize,
    _autocontrast,
    _equalize,
)
ROTATION, SHEAR_X, SHEAR_Y, SHIFT_X, SHIFT_Y = range(1 + len(COLOUR_CHANGES), 6 + len(COLOUR_CHANGES))  # 0 changes nothing
OPERATIONS = 1 + SHIFT_Y


def trivial_augment(images: Tensor, generator: Generator | None = None) -> Tensor:
    """Change each image by one operation, or not at all."""
    b = len(images)
    chosen = torch.randint(OPERATIONS, (b, 1, 1, 1), device=images.device, generator=generator)
    strength = torch.rand(b, 1, 1, 1, device=images.device, generator=generator)
    negative = torch.rand(b, 1, 1, 1, device=images.device, generator=generator) < 0.5
    return changed(images, chosen, strength, torch.where(negative, -strength, strength))


def changed(images: Tensor, chosen: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    """Change each image by the operation of its number (b 1 1 1), with strengths from 0 to 1 and strengths with a sign."""
    found = images
    for number, change in enumerate(COLOUR_CHANGES, 1):
        found = torch.where(chosen == number, change(images, strength, signed), found)
    return torch.where(chosen >= ROTATION, moved(images, chosen, signed), found)


def moved(images: Tensor, chosen: Tensor, signed: Tensor) -> Tensor:
    """Rotate, shear or shift each image by bilinear interpolation."""
    height, width = images.shape[2:]
    kind, signed = chosen.flatten(1), signed.flatten(1)  # (b 1)
    angle = (ANGLE * signed).masked_fill(kind != ROTATION, 0)
    shear_x, shear_y = ((SHEAR * signed).masked_fill(kind != name, 0) for name in (SHEAR_X, SHEAR_Y))
    shift_x, shift_y = ((SHIFT * signed).masked_fill(kind != name, 0) for name in (SHIFT_X, SHIFT_Y))
    x = (torch.arange(width, device=images.device) - (width - 1) / 2)[None, None]  # pixels from the middle
    y = (torch.arange(height, device=images.device) - (height - 1) / 2)[None, :, None]
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    from_x = cos * x + (shear_x[..., None] - sin) * y + width * shift_x[..., None]
    from_y = (shear_y[..., None] + sin) * x + cos * y + height * shift_y[..., None]
    grid = torch.stack([from_x * (2 / width), from_y * (2 / height)], 3)  # of -1 to 1; sums alone, which autocast does not round
    return F.grid_sample(images - OUTSIDE, grid, align_corners=False) + OUTSIDE
