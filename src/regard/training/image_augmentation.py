"""Random changes of training images on their device, in constant shapes: crop, flip, cutout, colours, mixup, cutmix.

Images are floats (b c height width) from 0 to 1. Every image draws its own change, from the generator or from that of its device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from regard.training.trivial_augment import gray_level, trivial_augment


class Augmentation(NamedTuple):
    """What training changes; 0 leaves a change out."""

    crop: int = 0  # pixels by which an image is moved at most, on each axis; what comes from outside is black
    flip: bool = False  # half of the images are mirrored, left to right
    cutout: int = 0  # side of the square that is set to gray
    colour: float = 0.0  # brightness, contrast and saturation are scaled by 1 - colour to 1 + colour
    trivial: bool = False  # one of fourteen operations for each image: TrivialAugment

    def change(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        """Apply all changes; those that mix two images, and with them their labels, are of `mixed`."""
        if self.crop:
            images = random_crop(images, self.crop, generator)
        if self.flip:
            images = random_flip(images, generator)
        if self.trivial:
            images = trivial_augment(images, generator)
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
    hidden = [_segment(size, side, images, generator) for size in images.shape[2:]]
    square = hidden[0][:, None, :, None] & hidden[1][:, None, None]
    return images.masked_fill(square, 0.5)


def scale_colours(images: Tensor, strength: float, generator: Generator | None = None) -> Tensor:
    """Scale brightness, contrast (the distance to the mean of an image) and saturation (that to its gray image)."""
    brightness, contrast, saturation = (1 + strength * (2 * _draws(images, generator) - 1) for _ in range(3))
    images = images * brightness
    mean = images.mean((1, 2, 3), keepdim=True)
    images = mean + (images - mean) * contrast
    gray = gray_level(images)
    images = gray + (images - gray) * saturation
    return images.clamp(0, 1)


class MixedImages(NamedTuple):
    """Images that are mixtures of two, with the place of the second in the batch, and the weight of the first."""

    images: Tensor  # (b c height width)
    other: Tensor  # (b)
    weight: Tensor  # (b)


def mixed(images: Tensor, mixup: float, cutmix: float, generator: Generator | None = None) -> MixedImages:
    """Mix each image with another one of the batch, by mixup or by cutmix with these parameters, of which one is above 0.

    Where both are, each has about half of the images.
    """
    shape, device = (len(images),), images.device
    other = torch.rand(shape, device=device, generator=generator).argsort()
    blended = _blended(images, other, _beta(mixup, images, generator)) if mixup else None
    pasted = _pasted(images, other, _beta(cutmix, images, generator), generator) if cutmix else None
    if blended is None or pasted is None:
        found = pasted if blended is None else blended
        assert found is not None
        return found
    chosen = torch.rand(shape, device=device, generator=generator) < 0.5
    both = torch.where(chosen[:, None, None, None], blended.images, pasted.images)
    return MixedImages(both, other, torch.where(chosen, blended.weight, pasted.weight))


def _beta(alpha: float, images: Tensor, generator: Generator | None) -> Tensor:
    """Draw a number of Beta(alpha, alpha) for each image, (b): x / (x + y) of two Gamma variables."""
    shape = torch.full((2, len(images)), alpha, device=images.device)
    gamma = torch._standard_gamma(shape, generator=generator).clamp_min(1e-20)
    return gamma[0] / gamma.sum(0)


def _blended(images: Tensor, other: Tensor, weight: Tensor) -> MixedImages:
    """Mixup: w x_i + (1 - w) x_j. Zhang et al. 2017, arXiv:1710.09412."""
    wide = weight[:, None, None, None]
    return MixedImages(wide * images + (1 - wide) * images[other], other, weight)


def _pasted(images: Tensor, other: Tensor, weight: Tensor, generator: Generator | None) -> MixedImages:
    """Cutmix: a rectangle with a share 1 - w of the pixels comes from the other image, and w is what it leaves.

    Its sides are sqrt(1 - w) of those of the image and its middle is any pixel. Yun et al. 2019, arXiv:1905.04899.
    """
    inside = []
    for size in images.shape[2:]:
        side = ((1 - weight).sqrt() * size).long()[:, None]
        inside.append(_segment(size, side, images, generator))
    box = inside[0][:, None, :, None] & inside[1][:, None, None]
    left = 1 - box.to(images.dtype).mean((1, 2, 3))
    return MixedImages(torch.where(box, images[other], images), other, left)


def _segment(size: int, side: Tensor | int, images: Tensor, generator: Generator | None) -> Tensor:
    """Draw a segment of `side` pixels for each image whose middle is any of `size`: a mask (b size)."""
    first = _centres(size, images, generator) - side // 2
    at = torch.arange(size, device=images.device)
    return (at >= first) & (at < first + side)
