"""CIFAR-10 in gray: images of 32 x 32 pixels and their labels, as arrays. Krizhevsky 2009."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.locate import file
from regard.data.text_files import DataError, read_binary, why_no_array

GRAY_SHAPE = (32, 32)
GRAY_LABELS = 10


class LabelledImages(NamedTuple):
    """Hold images and one label for each."""

    images: np.ndarray  # uint8 (examples, 32, 32), in colour (examples, 3, 32, 32)
    labels: np.ndarray  # uint8 (examples,)


def read_gray_images(folder: Path, part: str) -> LabelledImages:
    """Read train (50,000 images) or test (10,000)."""
    return read_image_arrays(folder, "gray", part, GRAY_SHAPE)


def read_image_arrays(folder: Path, kind: str, part: str, shape: tuple[int, ...]) -> LabelledImages:
    """Read images of a shape and their labels from KIND_PART_images.npy and KIND_PART_labels.npy."""
    images, labels = (_array(file(folder, f"{kind}_{part}_{what}.npy")) for what in ("images", "labels"))
    if images.shape[1:] != shape or images.shape[:1] != labels.shape:
        wanted = ", ".join(map(str, shape))
        raise DataError(f"{folder}: images of {part} are {images.shape} and labels {labels.shape}, not (n, {wanted}) and (n,)")
    if len(labels) and labels.max() >= GRAY_LABELS:
        raise DataError(f"{folder}: labels of {part} go up to {labels.max()}, not to {GRAY_LABELS - 1}")
    return LabelledImages(images, labels)


def _array(path: Path) -> np.ndarray:
    try:
        found = np.load(io.BytesIO(read_binary(path)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not a whole .npy file: {why_no_array(error)}") from None
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8:
        raise DataError(f"{path} holds {getattr(found, 'dtype', type(found).__name__)}, not uint8")
    return found
