"""Images in colour: CIFAR-10 as arrays or as a tar archive of JPEG files, files of a user, and splits of a labelled set.

Images are uint8 arrays (examples, channels, height, width). Reading JPEG and PNG needs Pillow.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from regard.data.gray_images import GRAY_SHAPE, LabelledImages, read_image_arrays
from regard.data.locate import file
from regard.data.text_files import DataError, read_binary, why_no_archive

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SPLIT_SEED = 20_251_116
HELD_OUT_IMAGES = 0.1  # share of the training images that are for validation
IMAGE_FILES = ".png .jpg .jpeg .bmp .webp .gif"


class ImageSplits(NamedTuple):
    """Hold the images of training, validation and test."""

    train: LabelledImages
    val: LabelledImages
    test: LabelledImages


def pillow_image() -> ModuleType:
    """Import Pillow's Image; raise with how to install it where it is missing."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ModuleNotFoundError("image files need Pillow: pip install 'regard[images]'", name="PIL") from None
    return Image


def read_colour_images(folder: Path) -> dict[str, LabelledImages]:
    """Read train and test of cifar10_jpeg.tar: {train,test}/CLASS/NUMBER.jpg, in the order of their names.

    The JPEG files are a lossy copy (quality 75) of CIFAR-10, so that accuracies are not those of the original pixels.
    """
    path, pillow = file(folder, "cifar10_jpeg.tar"), pillow_image()
    found: dict[str, list[tuple[str, np.ndarray, int]]] = {"train": [], "test": []}
    try:
        with tarfile.open(fileobj=io.BytesIO(read_binary(path))) as archive:
            for member in archive:
                if member.isfile():
                    part, label = _place(member.name, path)
                    data = archive.extractfile(member)
                    assert data is not None
                    image = _decoded_image(pillow, data.read(), f"{path}: {member.name}")
                    found[part].append((member.name, image, label))
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{path} is not a whole tar archive: {why_no_archive(error)}") from None
    return {part: _joined(part, rows, path) for part, rows in found.items()}


def read_colour_arrays(folder: Path) -> dict[str, LabelledImages]:
    """Read train and test of colour_*.npy, the pixels of CIFAR-10 without loss, in its own order."""
    return {part: read_image_arrays(folder, "colour", part, (3, *GRAY_SHAPE)) for part in ("train", "test")}


def _place(name: str, path: Path) -> tuple[str, int]:
    """Read the part and the class in the name of a file."""
    words = name.removeprefix("./").split("/")
    if len(words) != 3 or words[0] not in ("train", "test") or words[1] not in CIFAR_CLASSES:
        raise DataError(f"{path}: {name} is not train/CLASS/FILE or test/CLASS/FILE with one of the ten classes")
    return words[0], CIFAR_CLASSES.index(words[1])


@contextmanager
def _decoding(where: str) -> Iterator[None]:
    """Turn what Pillow raises for damaged files, and for images of hundreds of millions of pixels, into a sentence."""
    pillow = pillow_image()
    try:
        yield
    except pillow.DecompressionBombError as error:
        raise DataError(f"{where} is too large: {error}") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{where} is not a whole image: {error}") from None


def _decoded_image(pillow: ModuleType, data: bytes, where: str) -> np.ndarray:
    with _decoding(where), pillow.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB"))
    if pixels.shape[:2] != GRAY_SHAPE:
        raise DataError(f"{where} has {pixels.shape[1]} x {pixels.shape[0]} pixels, not 32 x 32")
    return pixels.transpose(2, 0, 1)


def _joined(part: str, rows: list[tuple[str, np.ndarray, int]], path: Path) -> LabelledImages:
    if not rows:
        raise DataError(f"{path} has no images of {part}")
    rows.sort(key=lambda row: row[0])
    return LabelledImages(np.stack([image for _, image, _ in rows]), np.array([label for *_, label in rows], np.uint8))


def split_images(train: LabelledImages, test: LabelledImages) -> ImageSplits:
    """Hold out a tenth of train for validation, by a fixed seed, and drop what is the same image in test or twice in train."""
    seen = {image.tobytes() for image in test.images}
    order = np.random.default_rng(SPLIT_SEED).permutation(len(train.labels))
    kept = []
    for place in order.tolist():
        key = train.images[place].tobytes()
        if key not in seen:
            seen.add(key)
            kept.append(place)
    cut = round(HELD_OUT_IMAGES * len(order))
    return ImageSplits(_rows_of(train, kept[cut:]), _rows_of(train, kept[:cut]), test)


def some_images(part: LabelledImages, share: float) -> LabelledImages:
    """Take a share of the images of every class, at least one; a smaller share is a part of a larger one."""
    places: list[int] = []
    for label in np.unique(part.labels).tolist():
        own = np.flatnonzero(part.labels == label)
        places += own[: max(1, round(share * len(own)))].tolist()
    return _rows_of(part, places)


def image_floors(train: LabelledImages, test: LabelledImages) -> dict[str, float]:
    """Compute the accuracy on test, in per cent, of one label for all, and of the label whose mean image is nearest."""
    labels = np.unique(train.labels)
    pixels = test.images.reshape(len(test.labels), -1).astype(np.float32)
    means = np.stack([train.images[train.labels == label].mean(0, dtype=np.float64).ravel() for label in labels]).astype(
        np.float32
    )
    distances = (means**2).sum(1) - 2 * pixels @ means.T  # and |x|^2, the same for all means
    said = {
        "one label for all": np.bincount(train.labels).argmax(),
        "the nearest mean image": labels[distances.argmin(1)],
    }
    return {name: 100 * float((found == test.labels).mean()) for name, found in said.items()}


def _rows_of(part: LabelledImages, places: Sequence[int]) -> LabelledImages:
    index = np.sort(np.asarray(places, np.int64))
    return LabelledImages(part.images[index], part.labels[index])


@contextmanager
def opened_upright(path: Path | str) -> Iterator[Any]:
    """Open an image file of a user: upright, with levels from 0 to 255. Errors of it, and of what is done with it, name it."""
    pillow = pillow_image()
    from PIL import ImageOps

    if not Path(path).is_file():
        raise DataError(f"there is no file {path}")
    with _decoding(str(path)), pillow.open(path) as stored:
        yield _eight_bits(pillow, ImageOps.exif_transpose(stored))  # cameras store an image as it was held, and how


def read_image(path: Path | str, side: int, gray: bool) -> np.ndarray:
    """Read an image file as (channels, side, side): the middle square of it, upright, resized."""
    with opened_upright(path) as image:
        return middle_square(image, side, gray)


def middle_square(image: Any, side: int, gray: bool) -> np.ndarray:
    """Return the middle square of an image of Pillow, resized, as (channels, side, side)."""
    square = min(image.size)
    left, top = ((size - square) // 2 for size in image.size)
    box = (left, top, left + square, top + square)
    small = image.convert("L" if gray else "RGB").resize((side, side), pillow_image().Resampling.BOX, box=box)
    pixels = np.asarray(small)
    return pixels[None] if gray else pixels.transpose(2, 0, 1)


def _eight_bits(pillow: ModuleType, image: Any) -> Any:
    """Return an image whose levels are 0 to 255; Pillow would cut those of 16 bits there."""
    return pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if image.mode.startswith("I;16") else image
