"""CIFAR-10 in colour by its original pixels where they are there, else by a copy in JPEG files; a run keeps which."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from regard.data.colour_images import ImageSplits, read_colour_arrays, split_images
from regard.data.locate import find, stored_form
from regard.data.text_files import DataError
from regard.tasks.image_config import Images
from regard.tasks.image_labels import ColourTask, ImageTask

LOSSLESS, JPEG_COPY = "cifar10_colour", "cifar10_jpeg"
PIXELS = "pixels.json"  # of a run on the original pixels; other runs have none, and are on the copy


class CifarTask(ColourTask):
    """CIFAR-10 in colour. A run that is loaded reads what it was trained on, as scores of the two are not comparable."""

    def __init__(self, config: Images) -> None:
        super().__init__(config)
        self.form = ""  # of the data that was read, or that a run was trained on
        self.kept = ""  # that a run was trained on

    def images(self, folder: Path | None) -> ImageSplits:
        there = stored_form(LOSSLESS, folder)
        self.form = self.kept or there
        if self.form == JPEG_COPY:
            return super().images(folder)
        where = find(LOSSLESS, folder)
        if there != LOSSLESS:
            alone = f"{where} has their copy in JPEG files alone"
            raise DataError(f"this run is on the original pixels, and {alone}: regard prepare cifar10 cifar-10-binary.tar.gz")
        parts = read_colour_arrays(where)
        return split_images(parts["train"], parts["test"])

    def describe_data(self) -> list[str]:
        if self.form == JPEG_COPY:
            return super().describe_data()
        return [
            *ImageTask.describe_data(self),
            "the original pixels of CIFAR-10: accuracies are not those of the copy in JPEG files",
        ]

    def assets(self) -> dict[str, str]:
        return super().assets() | ({PIXELS: json.dumps(self.form)} if self.form == LOSSLESS else {})

    def restore(self, assets: Mapping[str, str]) -> None:
        super().restore(assets)
        self.form = self.kept = LOSSLESS if PIXELS in assets else JPEG_COPY
