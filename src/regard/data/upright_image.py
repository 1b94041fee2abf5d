"""An image file whole and upright, and the middle square of it that models read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.colour_images import opened_upright


class UprightImage(NamedTuple):
    """Hold the pixels of a file, turned as its EXIF data say."""

    pixels: np.ndarray  # uint8 (height, width, 3)

    @classmethod
    def of(cls, image: Any) -> UprightImage:
        """Take all pixels of an image of Pillow, in colours."""
        return cls(np.asarray(image.convert("RGB")))

    @property
    def square(self) -> tuple[int, int, int]:
        """Return left, top and side of the square that `read_image` scales, in pixels of the file."""
        height, width = self.pixels.shape[:2]
        side = min(height, width)
        return (width - side) // 2, (height - side) // 2, side

    def placed(self, boxes: np.ndarray) -> np.ndarray:
        """Map boxes (k, 4) of left, top, right and bottom, from 0 to 1 of the square, to pixels of the file."""
        left, top, side = self.square
        return boxes * side + np.array([left, top, left, top])


def read_upright(path: Path | str) -> UprightImage:
    """Read all pixels of an image file in colours; every error names it."""
    with opened_upright(path) as image:
        return UprightImage.of(image)
