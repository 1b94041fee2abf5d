"""Random changes of training images on their device, in constant shapes: crop, flip, cutout, colours, mixup.

Images are floats (b c height width) from 0 to 1. Every image draws its own change, from the generator or from that of its device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

LUMA = (0.299, 0.587, 0.114)  # red, green and blue in a gray level


class Augmentation(NamedTuple):
    """What training changes; 0 leaves a change out."""

    crop: int = 0  # pixels by which an image is moved at most, on each axis; what comes from outside is black
    flip: bool = False  # half of the images are mirrored, left to right
    cutout: int = 0  # side of the square that is set to gray
    colour: float = 0.0  # brightness, contrast and saturation are scaled by 1 - colour to 1 + colour
    mixup: float = 0.0  # alpha of the Beta distribution of the weights of two images

    def change(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        """Apply all changes but mixup, which changes labels too."""
        if self.crop:
            images = random_crop(images, self.crop, generator)
        if self.flip:
            images = random_flip(images, generator)
        if self.colour:
            images = scale_colours(images, self.colour, generator)
        if self.cutout:
            images = cutout(images, self.cutout, generator)
        return images


def _draws(images: Tensor, generator: Generator | None) -> Tensor:
    """Draw a number from 0 to 1 for each image, (b 1 1 1)."""
    return torch.rand(len(images), 1, 1, 1, device=images.device, generator=generator)


def _centres(count: int, images: Tensor, generator: Generator | None) -> Tensor:
    """Draw one of `count` places for each image, (b 1)."""
    return torch.randint(count, (len(images), 1), device=images.device, generator=generator)


def random_crop(images: Tensor, most: int, generator: Generator | None = None) -> Tensor:
    """Move each image by up to `most` pixels on each axis: a crop of the same size out of the image with a black frame."""
    b, c, height, width = images.shape
    framed = F.pad(images, (most, most, most, most))
    rows = _centres(2 * most + 1, images, generator) + torch.arange(height, device=images.device)
    columns = _centres(2 * most + 1, images, generator) + torch.arange(width, device=images.device)
    tall = framed.gather(2, rows[:, None, :, None].expand(b, c, height, framed.shape[3]))
    return tall.gather(3, columns[:, None, None].expand(b, c, height, width))


def random_flip(images: Tensor, generator: Generator | None = None) -> Tensor:
    """Mirror half of the images, left to right."""
    return torch.where(_draws(images, generator) < 0.5, images.flip(3), images)


def cutout(images: Tensor, side: int, generator: Generator | None = None) -> Tensor:
    """Set a square of each image to gray; its middle is any pixel, so that it may lie partly outside.

    DeVries, Taylor 2017, arXiv:1708.04552.
    """
    hidden = []
    for size in images.shape[2:]:
        first = _centres(size, images, generator) - side // 2
        at = torch.arange(size, device=images.device)
        hidden.append((at >= first) & (at < first + side))
    square = hidden[0][:, None, :, None] & hidden[1][:, None, None]
    return images.masked_fill(square, 0.5)


def scale_colours(images: Tensor, strength: float, generator: Generator | None = None) -> Tensor:
    """Scale brightness, contrast (the distance to the mean of an image) and saturation (that to its gray image)."""
    brightness, contrast, saturation = (1 + strength * (2 * _draws(images, generator) - 1) for _ in range(3))
    images = images * brightness
    mean = images.mean((1, 2, 3), keepdim=True)
    images = mean + (images - mean) * contrast
    if images.shape[1] == 3:
        gray = sum(share * images[:, i : i + 1] for i, share in enumerate(LUMA))
        images = gray + (images - gray) * saturation
    return images.clamp(0, 1)


class MixedImages(NamedTuple):
    """Images that are mixtures of two, with the place of the second in the batch, and the weight of the first."""

    images: Tensor  # (b c height width)
    other: Tensor  # (b)
    weight: Tensor  # (b)


def mixup(images: Tensor, alpha: float, generator: Generator | None = None) -> MixedImages:
    """Mix each image with another one of the batch: w x_i + (1 - w) x_j, w of Beta(alpha, alpha), one w for each image.

    Zhang et al. 2017, arXiv:1710.09412. A Beta variable is x / (x + y) of two Gamma variables.
    """
    shape = torch.full((2, len(images)), alpha, device=images.device)
    gamma = torch._standard_gamma(shape, generator=generator).clamp_min(1e-20)
    weight = gamma[0] / gamma.sum(0)
    other = torch.rand(len(images), device=images.device, generator=generator).argsort()
    wide = weight[:, None, None, None]
    return MixedImages(wide * images + (1 - wide) * images[other], other, weight)
