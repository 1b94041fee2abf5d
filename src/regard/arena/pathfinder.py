"""Pathfinder: are two dots joined by a dashed path? Linsley et al. 2018, arXiv:1805.08315; as a sequence: Tay et al. 2020.

Each image has two long paths that begin near each other, shorter ones that distract, and a dot at two of the four ends: of one
path (label 1) or of both (label 0). Sizes are those published for 32 x 32 pixels (`Pathfinder32`) and for 128 x 128 (Path-X).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from regard.arena.arena_task import ArenaBudget, Examples
from regard.arena.dashed_paths import Canvas, PathStyle
from regard.arena.generated_task import GeneratedTask
from regard.arena.image_changes import affine, as_images, as_tokens, flip, for_some, quarter_turns
from regard.arena.trivial_floors import most_frequent, nearest_mean, ridge, threshold

STYLES = {
    32: PathStyle(32, dash=2, thickness=0.5, margin=1, turn=1.0, seeds=7, dot=1.5, bright=1.5, cells=2),
    128: PathStyle(128, dash=5, thickness=1.5, margin=2.5, turn=1.8, seeds=20, dot=3, bright=0.9, cells=1),
}
DISTRACTING_DASHES = {32: 20, 128: 35}
BATCHES = {32: 2048, 128: 512}  # images begun at a time
DISTRACTOR_ROUNDS = 2  # for each distractor
FITTED = 10000  # images of train that floors are fitted to
MOVED = 0.05  # share of the side that augmented images are moved by, at most: dots stay inside
POOLED = 8  # squares each way that the floors average pixels of


@dataclass(frozen=True)
class Pathfinder(GeneratedTask):
    """Decide whether one dashed path joins two dots; each pixel is a token, row by row."""

    name: ClassVar[str] = "pathfinder"
    title: ClassVar[str] = "dots joined by a dashed path, pixel by pixel"
    source: ClassVar[str] = "Linsley et al. 2018, arXiv:1805.08315; as a sequence: Tay et al. 2020, arXiv:2011.04006"
    techniques: ClassVar[tuple[str, ...]] = ("augmented",)

    train: int = 160000  # examples
    val: int = 20000  # examples
    test: int = 20000  # examples
    size: int = 32  # pixels of a row: 32 or 128
    contour: int = 14  # dashes of the two long paths: 6, 9 and 14 are published
    augmented: bool = False  # training flips images, turns them by right angles, and some of them a little

    def check(self) -> None:
        """Refuse sizes that are not published, and paths too long to fit."""
        super().check()
        if self.size not in STYLES:
            raise ValueError(f"size must be one of {', '.join(map(str, STYLES))}, not {self.size}")
        if not 3 <= self.contour <= 20:
            raise ValueError(f"contour must be from 3 to 20 dashes, not {self.contour}")

    @property
    def length(self) -> int:
        """Pixels of an image."""
        return self.size * self.size

    @property
    def vocab(self) -> int:
        """Return the number of gray levels; images are full, 0 is black."""
        return 256

    @property
    def classes(self) -> int:
        """Return the number of labels: apart, joined."""
        return 2

    def draws(self, generator: np.random.Generator) -> Iterator[Examples]:
        """Iterate over batches of images."""
        style = STYLES[self.size]
        short = self.contour // 3
        count = DISTRACTING_DASHES[self.size] // short
        while True:
            canvas = Canvas(generator, style, BATCHES[self.size])
            ends = canvas.long_paths(self.contour)
            distractors = canvas.distractors(count, short, DISTRACTOR_ROUNDS * count)
            labels = generator.integers(2, size=len(ends))
            dots = np.stack([ends[:, 0, 0], np.where(labels[:, None] == 1, ends[:, 0, 1], ends[:, 1, 1])], 1)
            images = torch.from_numpy(canvas.draw(dots)).flatten(1)
            far = torch.from_numpy(np.linalg.norm(dots[:, 0] - dots[:, 1], axis=-1))
            slices = {
                "distance": (far * 8 / self.size).int() * (self.size // 8),
                "distractors": torch.from_numpy(distractors).int(),
            }
            yield Examples(images, torch.from_numpy(labels), None, slices)

    def augment(self, tokens: Tensor, targets: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Change images, if that is asked for: mirrored, turned by right angles, and half of them a little, moved and smaller."""
        if not self.augmented:
            return tokens, targets
        images = quarter_turns(flip(as_images(tokens, self.size), generator), generator)
        moved = affine(images, generator, degrees=10, shift=MOVED, scales=(0.9, 1.0), mode="bilinear")
        return as_tokens(for_some(moved, images, 0.5, generator), tokens), targets

    def floors(self) -> dict[str, float]:
        """Score the most frequent label, the distance of the dots, nearest means, and ridge regressions of averaged pixels."""
        train, test = self.train_and_test(FITTED)
        far = [x.slices["distance"].float() for x in (train, test)]
        pooled = [_square_means(x.tokens, self.size) for x in (train, test)]
        return {
            "most frequent label": most_frequent(train.targets, test.targets),
            "distance of the dots": threshold(far[0], train.targets, far[1], test.targets),
            "nearest mean": nearest_mean(pooled[0], train.targets, pooled[1], test.targets),
            "averaged pixels, ridge regression": ridge(pooled[0], train.targets, pooled[1], test.targets),
        }

    def budget(self) -> ArenaBudget:
        """Return the budget of the published re-run: 62,000 steps of 256."""
        return ArenaBudget(steps=62000, batch=256)


def _square_means(tokens: Tensor, size: int) -> Tensor:
    """Return the means of squares of pixels, (examples, squares)."""
    side = size // POOLED
    parts = [part.view(-1, POOLED, side, POOLED, side).float().mean((2, 4)).flatten(1) for part in tokens.split(1000)]
    return torch.cat(parts)
