"""An image file whole and upright, and the middle square of it that models read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.colour_images import decoding_image, eight_bit_levels, pillow_image
from regard.data.text_files import DataError


class UprightImage(NamedTuple):
    """Hold the pixels of a file, turned as its EXIF data say."""

    pixels: np.ndarray  # uint8 (height, width, 3)

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
    pillow = pillow_image()
    from PIL import ImageOps

    if not Path(path).is_file():
        raise DataError(f"there is no file {path}")
    with decoding_image(str(path)), pillow.open(path) as stored:
        image = eight_bit_levels(pillow, ImageOps.exif_transpose(stored))
        return UprightImage(np.asarray(image.convert("RGB")))
