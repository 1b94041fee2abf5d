"""CIFAR-10 as it is downloaded, in records of a label and three planes, converted to arrays. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from regard.data.gray_images import GRAY_LABELS, GRAY_SHAPE
from regard.data.prepared_files import PreparedFile, one_array
from regard.data.source_files import source_files
from regard.data.text_files import DataError

CIFAR_PLANES = 3  # red, green, blue
CIFAR_RECORD = 1 + CIFAR_PLANES * GRAY_SHAPE[0] * GRAY_SHAPE[1]  # bytes
CIFAR_BATCHES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
_BATCH = re.compile(r"(?:^|/)((?:data_batch_[1-5]|test_batch)\.bin)$")
_LUMA, _LUMA_BITS = (19_595, 38_470, 7_471), 16  # 0.299, 0.587 and 0.114 of ITU-R 601 as integers over 2^16


def cifar_arrays(source: Path) -> dict[str, PreparedFile]:
    """Read cifar-10-binary.tar.gz, or the folder cifar-10-batches-bin in it, in the order of its records."""
    batches: dict[str, np.ndarray] = {}
    for name, data in source_files(source, _BATCH):
        found = _BATCH.search(name)
        assert found is not None  # it was wanted
        batches[found[1]] = _records(data, f"{source}, {name}")
    made: dict[str, PreparedFile] = {}
    for part, names in CIFAR_BATCHES.items():
        if missing := [name for name in names if name not in batches]:
            raise DataError(f"{source} has no {', '.join(missing)}: is it the binary version of CIFAR-10?")
        records = np.concatenate([batches.pop(name) for name in names])
        labels = np.ascontiguousarray(records[:, 0])
        images = records[:, 1:].reshape(-1, CIFAR_PLANES, *GRAY_SHAPE)
        count = f"{len(labels):,} images"
        for kind, pixels in (("colour", images), ("gray", luma(images))):
            made[f"{kind}_{part}_images.npy"] = one_array(np.ascontiguousarray(pixels), count)
            made[f"{kind}_{part}_labels.npy"] = one_array(labels, f"{len(labels):,} labels")
    return made


def _records(data: bytes, where: str) -> np.ndarray:
    if not data or len(data) % CIFAR_RECORD:
        raise DataError(f"{where} has {len(data):,} bytes, which is no number of records of {CIFAR_RECORD:,} bytes")
    records = np.frombuffer(data, np.uint8).reshape(-1, CIFAR_RECORD)
    if (most := int(records[:, 0].max())) >= GRAY_LABELS:
        raise DataError(f"{where}: labels go up to {most}, not to {GRAY_LABELS - 1}")
    return records


def luma(images: np.ndarray) -> np.ndarray:
    """Convert uint8 images (n, 3, height, width) to gray (n, height, width), rounded as Pillow's convert("L") does."""
    gray = np.full((len(images), *images.shape[2:]), 1 << (_LUMA_BITS - 1), np.uint32)
    for plane, share in enumerate(_LUMA):
        gray += images[:, plane].astype(np.uint32) * np.uint32(share)
    return (gray >> _LUMA_BITS).astype(np.uint8)
