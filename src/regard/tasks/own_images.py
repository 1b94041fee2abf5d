"""A label for every image of a user's folders, with all models of the other image tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from regard.checks import need
from regard.data.colour_images import ImageSplits, image_floors, some_images
from regard.data.gray_images import LabelledImages
from regard.data.image_folders import image_array, read_image_folder, split_image_files
from regard.data.own_files import in_train
from regard.data.text_files import DataError
from regard.tasks.image_config import PatchStem
from regard.tasks.image_labels import ImageTask
from regard.tasks.label_counts import label_line, train_alone
from regard.tasks.own_data_config import OwnImages
from regard.tasks.own_file import OwnFiles
from regard.text import unknown

LARGEST_SIDE = 4096  # pixels


class OwnImagesTask(ImageTask):
    """Labels for a user's images; scored by accuracy, beside that of the most frequent label and of the nearest mean image."""

    config: OwnImages

    def __init__(self, config: OwnImages) -> None:
        self.side, self.channels = need("side", config.side, 1, LARGEST_SIDE), 1 if config.gray else 3
        stem = config.options("stem")
        if isinstance(stem, PatchStem) and config.side % stem.side:
            near = [
                str(side) for side in (config.side // stem.side * stem.side, -(-config.side // stem.side) * stem.side) if side
            ]
            raise ValueError(
                f"{config.side} pixels do not divide into patches of {stem.side}: use side={' or '.join(near)}, or other patches "
                f"(stem=patches(side=...))"
            )
        super().__init__(config)
        self.files = OwnFiles([config.folder] if config.folder else [], config.valid, config.test, folder=True)
        self.repeated: dict[str, int] = {}  # images of val and test that train has too
        self.own_floors: dict[str, list[float]] = {}  # of val and test: the most frequent label, the nearest mean image

    def images(self, folder: Path | None) -> ImageSplits:
        if not self.files.files:
            raise DataError("which folder has the images? Give --folder FOLDER, which has a folder for each label")
        paths = self.files.find_single(folder)
        found = {split: read_image_folder(path, self.side, self.config.gray) for split, path in paths.items()}
        parts = split_image_files(found.pop("train"), paths["train"], self.files.held)._replace(**found)
        self.repeated = in_train(parts, lambda x: x.digest)
        self.labels = self.labels or sorted({x.label for x in parts.train})
        places = {label: place for place, label in enumerate(self.labels)}
        if lacking := next((x.label for part in parts for x in part if x.label not in places), None):
            raise DataError(unknown("no training image has the label", lacking, self.labels))
        arrays = ImageSplits(*(image_array(part, places) for part in parts))
        train = some_images(arrays.train, self.config.fraction)
        self.own_floors = {name: _floors(train, getattr(arrays, name)) for name in ("val", "test")}
        return arrays

    def describe_data(self) -> list[str]:
        counts = {name: Counter(label for _, label in part) for name, part in self.splits.items()}
        how, totals = self.files.chosen("by a hash of each file"), {name: part.total() for name, part in counts.items()}
        most, nearest = (
            " and ".join(f"{floors[kind]:.1f} % of {name}" for name, floors in self.own_floors.items()) for kind in (0, 1)
        )
        frequent = max(sorted(counts["train"]), key=counts["train"].__getitem__)
        return [
            self.files.describe(totals, "images", how),
            *self.files.repeats(self.repeated, "images"),
            *self.files.beside(),
            label_line(counts, self.labels),
            *(line for line, _ in train_alone(counts, self.labels)),
            f"floor: the most frequent label, {self.labels[frequent]}, is right for {most}",
            f"floor: the label whose mean image is nearest is right for {nearest}",
        ]

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        return {**super().score(model, split), **dict(zip(("floor", "nearest_mean"), self.own_floors[split], strict=True))}

    def assets(self) -> dict[str, str]:
        return {**super().assets(), **self.files.assets()}

    def restore(self, assets: Mapping[str, str]) -> None:
        super().restore(assets)
        self.files.restore(assets)


def _floors(train: LabelledImages, part: LabelledImages) -> list[float]:
    """Return the accuracy of the most frequent label, and of that of the nearest mean image, in percent."""
    return [*image_floors(train, part).values()]
