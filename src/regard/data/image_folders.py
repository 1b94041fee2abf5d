"""Folders of a user's images: one folder for each label, one image in each file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.colour_images import read_image
from regard.data.datasets import LabelledText, Splits
from regard.data.gray_images import LabelledImages
from regard.data.own_files import HELD, file_digest, split_labelled
from regard.data.own_folders import files_by_label
from regard.data.text_files import DataError

DAMAGED_SHOWN = 5  # files that are named because they cannot be read


class ImageFile(NamedTuple):
    """Hold the image of a file, its label, and the SHA-256 of the file."""

    pixels: np.ndarray  # uint8 (channels, side, side)
    label: str
    digest: str


def read_image_folder(folder: Path, side: int, gray: bool) -> list[ImageFile]:
    """Read the middle square of every file in the folders of `folder`, whose names are labels, in the order of their names.

    All files that are no images are refused in one sentence.
    """
    found, damaged = [], []
    for label, paths in files_by_label(folder, "an image").items():
        if not paths:
            raise DataError(f"{folder / label} has no image in it: put some there, or delete the folder")
        for path in paths:
            try:
                found.append(ImageFile(read_image(path, side, gray), label, file_digest(path)))
            except DataError as error:
                damaged.append(str(error))
    if damaged:
        more = f"; and {len(damaged) - DAMAGED_SHOWN:,} more" if len(damaged) > DAMAGED_SHOWN else ""
        advice = "Delete this file, or move it away" if len(damaged) == 1 else "Delete these files, or move them away"
        raise DataError(f"{'; '.join(damaged[:DAMAGED_SHOWN])}{more}. {advice}")
    return found


def split_image_files(files: Sequence[ImageFile], where: Path, held: Sequence[str] = HELD) -> Splits[list[ImageFile]]:
    """Split images as texts are split (`split_labelled`), by the SHA-256 of each file: files of one content are in one split."""
    image_of = {x.digest: x.pixels for x in files}
    parts = split_labelled([LabelledText(x.digest, x.label) for x in files], where, held, "image")
    return Splits(*([ImageFile(image_of[x.text], str(x.label), x.text) for x in part] for part in parts))


def image_array(files: Sequence[ImageFile], places: dict[str, int]) -> LabelledImages:
    """Join images to one array, with the place of each label."""
    return LabelledImages(np.stack([x.pixels for x in files]), np.array([places[x.label] for x in files], np.int64))
