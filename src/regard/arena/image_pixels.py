"""CIFAR-10 in gray, read pixel by pixel. Krizhevsky 2009; as a long sequence: Tay et al. 2020, arXiv:2011.04006."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from regard.arena.arena_task import ArenaBudget, Examples, ExamplesPart
from regard.arena.generated_task import new_rows
from regard.arena.image_changes import affine, as_images, as_tokens, change_grays, cut_out, flip
from regard.arena.read_task import SELECTION_SEED, ReadTask
from regard.arena.trivial_floors import most_frequent, nearest_mean, ridge
from regard.data.colour_images import CIFAR_CLASSES
from regard.data.gray_images import GRAY_LABELS, GRAY_SHAPE, LabelledImages, read_gray_images
from regard.data.locate import find

HELD_OUT_SHARE = 0.1  # of train, for validation
FOURIER_FEATURES = 2000
CUT_SIDE = 10  # pixels of the squares that training cuts out
FOURIER_WIDTH = 20.0  # of the Gaussian kernel, where pixels have unit variance


@dataclass(frozen=True)
class ImagePixels(ReadTask):
    """Classify gray images of 32 x 32 pixels, each pixel a token, row by row; 10 labels."""

    name: ClassVar[str] = "image"
    title: ClassVar[str] = "objects in gray images, pixel by pixel"
    source: ClassVar[str] = "CIFAR-10, Krizhevsky 2009; as a sequence: Tay et al. 2020, arXiv:2011.04006"
    techniques: ClassVar[tuple[str, ...]] = ("augmented",)
    slice_names: ClassVar[Mapping[str, Sequence[str]]] = {"class": CIFAR_CLASSES}
    needs: ClassVar[str] = "cifar10"

    augmented: bool = False  # training flips, moves and turns images, changes gray levels and cuts out squares

    @property
    def length(self) -> int:
        """Pixels of an image."""
        return 1024

    @property
    def vocab(self) -> int:
        """Return the number of gray levels; images are full, 0 is black."""
        return 256

    @property
    def classes(self) -> int:
        """Return the number of kinds of objects."""
        return GRAY_LABELS

    def read_examples(self, part: ExamplesPart) -> Examples:
        """Return one split; a tenth of train is for validation, by a fixed seed."""
        folder = find("cifar10")
        if part == "test":
            return self._chosen(part, read_gray_images(folder, "test"))
        train = read_gray_images(folder, "train")
        order = np.random.default_rng(SELECTION_SEED).permutation(len(train.labels))
        cut = round(HELD_OUT_SHARE * len(order))
        rows = np.sort(order[:cut] if part == "val" else order[cut:])
        test = read_gray_images(folder, "test")
        others = [test.images] if part == "val" else [test.images, train.images[order[:cut]]]
        taken: set[bytes] = set()
        for images in others:
            new_rows(torch.from_numpy(images), taken)
        fresh = rows[new_rows(torch.from_numpy(train.images[rows]), taken)]
        return self._chosen(part, LabelledImages(train.images[fresh], train.labels[fresh]))

    def _chosen(self, part: ExamplesPart, found: LabelledImages) -> Examples:
        rows = self.selection(part, len(found.labels))
        tokens = torch.from_numpy(found.images[rows].reshape(-1, self.length))
        targets = torch.from_numpy(found.labels[rows].astype(np.int64))
        contrast = tokens.float().std(1).div(20).int() * 20
        return Examples(tokens, targets, None, {"class": targets.int(), "contrast": contrast})

    def augment(self, tokens: Tensor, targets: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Change images, if that is asked for: mirrored, moved, turned and scaled by a tenth, other grays, a square cut out."""
        if not self.augmented:
            return tokens, targets
        images = flip(as_images(tokens, GRAY_SHAPE[0]), generator)
        images = affine(images, generator, degrees=10, shift=0.1, scales=(0.9, 1.1))
        images = cut_out(change_grays(images, generator), generator, CUT_SIDE)
        return as_tokens(images, tokens), targets

    def floors(self) -> dict[str, float]:
        """Score the most frequent label, nearest means, and ridge regressions of pixels and of random Fourier features."""
        train, test = self.examples("train"), self.examples("test")
        x, test_x = train.tokens.float(), test.tokens.float()
        mean, spread = x.mean(), x.std()
        features = [_fourier_features((part - mean) / spread) for part in (x, test_x)]
        return {
            "most frequent label": most_frequent(train.targets, test.targets),
            "nearest mean": nearest_mean(x, train.targets, test_x, test.targets),
            "pixels, ridge regression": ridge(x, train.targets, test_x, test.targets),
            "random Fourier features, ridge regression": ridge(features[0], train.targets, features[1], test.targets),
        }

    def budget(self) -> ArenaBudget:
        """Return the budget of the published re-run: 35,000 steps of 256."""
        return ArenaBudget(steps=35000, batch=256)


def _fourier_features(x: Tensor) -> Tensor:
    """Return cosines of random projections, whose products estimate a Gaussian kernel. Rahimi, Recht 2007."""
    generator = torch.Generator().manual_seed(SELECTION_SEED)
    weights = torch.randn(x.shape[1], FOURIER_FEATURES, generator=generator) / FOURIER_WIDTH
    phases = torch.rand(FOURIER_FEATURES, generator=generator) * (2 * math.pi)
    return (x @ weights + phases).cos()
