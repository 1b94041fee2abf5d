"""Random changes of gray images on their device, in constant shapes: geometry, gray levels, and a square cut out.

Images are floats (b height width) from 0 to 255; every image draws its own change. After AutoAugment (Cubuk et al. 2018,
arXiv:1805.09501), without its colours, and Cutout (DeVries, Taylor 2017, arXiv:1708.04552).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

WHITE = 255.0
GRAY = 127.5
GRAY_ROUNDS = 2  # changes of gray levels that are drawn for an image
CHANGED_SHARE = 0.5  # of images, in each round
CUT_SHARE = 0.5  # of images that lose a square

ImageChange = Callable[[Tensor, Tensor], Tensor]  # images (b h w) and strengths (b 1 1) from -1 to 1 -> images


def uniform(images: Tensor, low: float, high: float, generator: Generator | None) -> Tensor:
    """Draw one number for each image, (b 1 1)."""
    draws = torch.rand(len(images), 1, 1, device=images.device, generator=generator)
    return low + (high - low) * draws


def for_some(changed: Tensor, images: Tensor, share: float, generator: Generator | None) -> Tensor:
    """Take a share of the images as they were changed, the others as they were."""
    return torch.where(uniform(images, 0, 1, generator) < share, changed, images)


def flip(images: Tensor, generator: Generator | None) -> Tensor:
    """Mirror half of the images, left to right."""
    return for_some(images.flip(2), images, 0.5, generator)


def quarter_turns(images: Tensor, generator: Generator | None) -> Tensor:
    """Turn each square image by 0, 90, 180 or 270 degrees."""
    chosen = torch.randint(4, (len(images),), device=images.device, generator=generator)
    turned = torch.stack([images.rot90(number, (1, 2)) for number in range(4)])
    return turned[chosen, torch.arange(len(images), device=images.device)]


def affine(
    images: Tensor,
    generator: Generator | None,
    *,
    degrees: float,
    shift: float,
    scales: tuple[float, float],
    mode: str = "nearest",
) -> Tensor:
    """Turn, move and scale each image; what comes from outside is black. `shift` is a share of the side."""
    angle = uniform(images, -degrees, degrees, generator) * (math.pi / 180)
    size = uniform(images, *scales, generator)
    moved = [uniform(images, -2 * shift, 2 * shift, generator) for _ in range(2)]
    cos, sin = angle.cos() / size, angle.sin() / size
    rows = [torch.cat([cos, -sin, moved[0]], 2), torch.cat([sin, cos, moved[1]], 2)]
    grid = F.affine_grid(torch.cat(rows, 1), [len(images), 1, *images.shape[1:]], align_corners=False)
    return F.grid_sample(images[:, None], grid, mode=mode, align_corners=False)[:, 0]


def brightness(images: Tensor, strength: Tensor) -> Tensor:
    """Scale gray levels by 0.5 to 1.5."""
    return images * (1 + 0.5 * strength)


def contrast(images: Tensor, strength: Tensor) -> Tensor:
    """Scale the distance to the mean of the image by 0.3 to 1.7."""
    mean = images.mean((1, 2), keepdim=True)
    return mean + (images - mean) * (1 + 0.7 * strength)


def solarize(images: Tensor, strength: Tensor) -> Tensor:
    """Invert gray levels above a threshold; at full strength all."""
    return torch.where(images > WHITE * (1 - strength.abs()), WHITE - images, images)


def posterize(images: Tensor, strength: Tensor) -> Tensor:
    """Keep 4 to 7 bits of each gray level."""
    step = (1 + 3 * strength.abs()).round().exp2()
    return (images / step).floor() * step


def sharpness(images: Tensor, strength: Tensor) -> Tensor:
    """Blend with the mean of 3 x 3 pixels, or away from it."""
    smooth = F.avg_pool2d(F.pad(images[:, None], (1, 1, 1, 1), mode="replicate"), 3, stride=1)[:, 0]
    return smooth + (images - smooth) * (1 + 0.9 * strength)


def full_range(images: Tensor, strength: Tensor) -> Tensor:  # noqa: ARG001 - changes are called alike
    """Stretch gray levels from black to white."""
    low, high = images.amin((1, 2), keepdim=True), images.amax((1, 2), keepdim=True)
    return (images - low) * (WHITE / (high - low).clamp_min(1))


GRAY_CHANGES: tuple[ImageChange, ...] = (brightness, contrast, solarize, posterize, sharpness, full_range)


def change_grays(images: Tensor, generator: Generator | None, changes: Sequence[ImageChange] = GRAY_CHANGES) -> Tensor:
    """Change half of the images by one of the changes, with a random strength, in each of two rounds."""
    for _ in range(GRAY_ROUNDS):
        strength = uniform(images, -1, 1, generator)
        chosen = torch.randint(len(changes), (len(images),), device=images.device, generator=generator)
        made = torch.stack([change(images, strength) for change in changes]).clamp(0, WHITE)
        own = made[chosen, torch.arange(len(images), device=images.device)]
        images = for_some(own, images, CHANGED_SHARE, generator)
    return images


def cut_out(images: Tensor, generator: Generator | None, side: int) -> Tensor:
    """Make a square of half of the images gray; its middle lies anywhere, so that a part may be outside."""
    inside = torch.ones_like(images, dtype=torch.bool)
    for dim in (1, 2):
        shape = [1, 1, 1]
        shape[dim] = images.shape[dim]
        places = torch.arange(images.shape[dim], device=images.device).view(shape) + 0.5
        middle = uniform(images, 0, images.shape[dim], generator)
        inside = inside & ((places - middle).abs() < side / 2)
    return for_some(images.masked_fill(inside, GRAY), images, CUT_SHARE, generator)


def as_images(tokens: Tensor, height: int) -> Tensor:
    """Read pixels (b n), row by row, as images (b height width)."""
    return tokens.unflatten(1, (height, -1)).float()


def as_tokens(images: Tensor, like: Tensor) -> Tensor:
    """Write images as pixels (b n) of the type of others."""
    return images.round().clamp(0, WHITE).flatten(1).to(like.dtype)
