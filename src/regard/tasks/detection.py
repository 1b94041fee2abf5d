"""Detection: label and box of every digit in a scene, as a set from object queries, or from every cell of a feature map."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from regard.checks import need
from regard.data.batch import Batch
from regard.data.box_picture import draw_boxes
from regard.data.colour_images import IMAGE_FILES, middle_square, opened_upright
from regard.data.detection_score import Objects, detection_floors, detection_scores
from regard.data.digit_scenes import NO_DIGIT, SPLIT_NAMES, SceneMaker, Scenes, read_digits, split_digits
from regard.data.upright_image import UprightImage
from regard.models.boxes import box_corners, box_middles, suppressed
from regard.models.build import added
from regard.models.detector import DenseDetector, Detected, QueryDetector, equal_convolutions
from regard.models.image_embedding import ImageEmbedding
from regard.options import check_choice
from regard.positions.grid_positions import on_grid
from regard.tasks.detection_config import Detection
from regard.tasks.image_stem import image_stem
from regard.tasks.support import device_under, evaluating, kept_labels
from regard.tasks.task import ENCODER_NAT_DECODER, Body, Task
from regard.training.learnable import Step
from regard.training.losses import Loss
from regard.training.set_loss import SetWeights, match, set_loss

DETECTION_HEADS = ("queries", "dense")
QUERY_BEGINNINGS = ("learned", "cells")
SCORED_SCENES = 256  # of a batch when nothing is kept for a backward pass
BEST_SLOTS = 32  # detections of an image, at most
FLOOR_SCENES = 2000  # of training, for the floors
WITHOUT_ATTENTION = ("mixer", "heads", "cross", "wiring", "positions", "norm", "activation", "gated", "weight_dropout")


class DetectionTask(Task):
    """Digits in scenes; scored by mean average precision, and by how often their number is right.

    An example is the number of a scene, which is made when a batch needs it. `predict` takes the paths of image files.
    """

    best = ("map50", "max")
    bodies: tuple[Body, ...] = ENCODER_NAT_DECODER
    answering = ("sure", "nms", "draw")
    file_ending = IMAGE_FILES
    config: Detection

    def __init__(self, config: Detection) -> None:
        super().__init__(config)
        check_choice("head", config.head, DETECTION_HEADS)
        check_choice("begin", config.begin, QUERY_BEGINNINGS)
        for name in ("objects", "scenes", "held_out", "depth"):
            need(name, getattr(config, name))
        need("canvas", config.canvas, 16)
        for name in ("sure", "nms", "no_object"):
            if not 0 <= getattr(config, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(config, name)!r}")
        for name in ("distance", "overlap"):
            if getattr(config, name) < 0:
                raise ValueError(f"{name} must not be below 0, but it is {getattr(config, name)!r}")
        if config.smoothing:
            raise ValueError("smoothing is not a part of the loss of a set: use smoothing=0")
        if config.draw and not Path(config.draw).is_dir():
            raise ValueError(f"cannot draw into {config.draw}: there is no such folder")
        if config.head == "dense":
            self.bodies = ()
        self.weights = SetWeights(1.0, config.distance, config.overlap, config.no_object)
        self.makers: dict[str, SceneMaker] = {}
        self.labels: list[str] = []
        self._rendered: dict[str, Scenes] = {}
        self.embedding()  # which refuses a stem that does not fit the canvas
        slots = config.queries if config.head == "queries" else self.grid[0] * self.grid[1]
        if config.begin == "cells" and config.queries > self.grid[0] * self.grid[1]:
            raise ValueError(
                f"begin=cells has {self.grid[0] * self.grid[1]} cells for {config.queries} queries: use fewer queries"
            )
        if slots < config.objects:
            raise ValueError(f"{slots} {config.head} cannot answer with {config.objects} objects: use more, or fewer objects")

    def unused(self) -> dict[str, str]:
        found = super().unused() | {"max_len": "texts: an image has as many tokens as its stem makes", "share": "words"}
        found |= {"smoothing": "labels of a fixed place"}
        if self.config.head == "queries":
            return found | {"nms": "head=dense: queries see each other"}
        found |= dict.fromkeys((*WITHOUT_ATTENTION, "queries", "begin", "auxiliary"), "head=queries")
        return {name: why for name, why in found.items() if name != "decoder_depth"}  # which counts for the size

    def read(self, folder: Path | None = None) -> None:
        parts, config = split_digits(read_digits(folder)), self.config
        options = {"side": config.canvas, "most": config.objects, "clutter": config.clutter}
        self.makers = {name: SceneMaker(parts[name], name, **options) for name in SPLIT_NAMES}  # type: ignore[arg-type]
        ends = np.cumsum([0, config.scenes, config.held_out, config.held_out]).tolist()
        self.splits = {name: range(a, b) for name, a, b in zip(SPLIT_NAMES, ends, ends[1:], strict=False)}
        self.starts = dict(zip(SPLIT_NAMES, ends, strict=False))
        self.labels, self._rendered = [str(label) for label in range(10)], {}
        self.sample = "scene.png"

    def describe_data(self) -> list[str]:
        pictures = ", ".join(f"{len(maker.digits.labels):,} {name}" for name, maker in self.makers.items())
        scenes = ", ".join(f"{len(part):,} {name}" for name, part in self.splits.items())
        floors = ", ".join(f"{name} {score:.1f} %" for name, score in self.floors("val").items())
        return [f"pictures of digits: {pictures}; scenes: {scenes}", f"floors on val: {floors}"]

    def floors(self, split: str) -> dict[str, float]:
        """Score answers that see no image on a split."""
        seen = self.splits["train"][:FLOOR_SCENES]
        return detection_floors(_objects(self.made(seen)), _objects(self.made(self.splits[split])))

    def assets(self) -> dict[str, str]:
        return {"labels.json": json.dumps(self.labels)}

    def restore(self, assets: Mapping[str, str]) -> None:
        self.labels = kept_labels(assets, "labels.json")

    def size(self, example: int) -> int:  # noqa: ARG002 - a batch counts scenes
        return 1

    def made(self, examples: Sequence[int]) -> Scenes:
        """Make scenes by their numbers, in any mixture of splits."""
        last = max((name for name in SPLIT_NAMES if self.starts[name] <= examples[0]), key=self.starts.__getitem__)
        run = next((i for i, number in enumerate(examples) if number not in self.splits_of(last)), len(examples))
        first = self.makers[last]([number - self.starts[last] for number in examples[:run]])
        if run == len(examples):
            return first
        rest = self.made(examples[run:])
        return Scenes(*(np.concatenate(pair) for pair in zip(first, rest, strict=True)))

    def splits_of(self, name: str) -> range:
        """Return the numbers of all scenes of a split."""
        config = self.config
        return range(self.starts[name], self.starts[name] + (config.scenes if name == "train" else config.held_out))

    def batch(self, examples: Sequence[int]) -> Batch:
        return self.batch_of(self.made(examples))

    def batch_of(self, scenes: Scenes) -> Batch:
        """Return the tensors of scenes; those of a dense head have the cell of every object."""
        boxes = box_middles(torch.from_numpy(scenes.boxes))
        extra = {"boxes": boxes}
        if self.config.head == "dense":
            extra["cells"] = nearest_cells(boxes, scenes.labels, self.grid)
        return Batch(torch.from_numpy(scenes.images), None, torch.from_numpy(scenes.labels), None, extra)

    def embedding(self) -> ImageEmbedding:
        """Build the stem, with the positions that are added to its tokens."""
        config = self.config
        bare = image_stem(config.options("stem"), 1, config.width, dropout=config.dropout)
        self.grid = bare.grid(config.canvas, config.canvas)
        rows, columns = self.grid
        self.sized = dataclasses.replace(config, max_len=rows * columns, positions=on_grid(config.positions, columns, 0))
        if config.head == "queries":
            bare.positions = added(self.sized)
        return bare

    def model(self) -> nn.Module:
        """Build the stem and the head: an encoder and a decoder of queries, or convolutions of about as many weights."""
        embed, config, classes = self.embedding(), self.config, len(self.labels)
        if config.head == "queries":
            chosen = config.begin == "cells"
            return QueryDetector(self.sized, embed, classes=classes, queries=config.queries, grid=self.grid, chosen=chosen)
        count = equal_convolutions(config)
        return DenseDetector(embed, classes=classes, convolutions=count, grid=self.grid, norm="group")

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        assert batch.target is not None
        layers = self.detected(model, batch.source)
        if not self.config.auxiliary:  # cells that a decoder begins with are trained in any case
            layers = layers[: int(self.config.begin == "cells")] + layers[-1:]
        boxes = batch.extra["boxes"]
        dense = self.config.head == "dense"
        slots = [batch.extra["cells"]] if dense else match(layers, batch.target, boxes, self.weights)
        return set_loss(layers, slots, batch.target, boxes, self.weights)

    def detected(self, model: nn.Module, images: Tensor) -> list[Detected]:
        """Return the answers to images (b 1 side side) of bytes, behind every layer that has a head."""
        weight = next(model.parameters())
        return model((images.to(weight.dtype) / 255 - 0.25) / 0.25)  # about the mean and deviation of scenes

    def answers(self, model: nn.Module, images: Tensor) -> list[Objects]:
        """Return the best detections of each image, the best first; of a dense head those that no better one suppresses."""
        found = self.detected(model, images.to(device_under(model)))[-1]
        probabilities, labels = found.scores.float().softmax(-1)[..., :-1].max(-1)
        best = probabilities.topk(min(BEST_SLOTS, probabilities.shape[1]), -1)
        labels = labels.gather(1, best.indices)
        boxes = box_corners(found.boxes.float()).gather(1, best.indices[..., None].expand(-1, -1, 4)).clamp(0, 1)
        kept = torch.ones_like(labels, dtype=torch.bool)
        if self.config.head == "dense":
            kept = suppressed(boxes, best.values, self.config.nms)
        rows = zip(*(x.cpu().numpy() for x in (labels, boxes, best.values, kept)), strict=True)
        return [Objects(label[keep], box[keep], score[keep]) for label, box, score, keep in rows]

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        rows = self.splits[split]
        if split not in self._rendered or len(self._rendered[split].images) != len(rows):
            self._rendered[split] = self.made(rows)
        scenes = self._rendered[split]
        with evaluating(model):
            parts = torch.from_numpy(scenes.images).split(SCORED_SCENES)
            found = [objects for part in parts for objects in self.answers(model, part)]
        return {**detection_scores(found, _objects(scenes), self.config.sure), "scenes": float(len(rows))}

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        return [self._described(model, line.strip()) if line.strip() else "" for line in lines]

    def _described(self, model: nn.Module, path: str) -> str:
        """Write label, score and corners of every sure detection, in pixels of the file, and draw them where that is set."""
        with opened_upright(path) as opened:
            pixels, image = middle_square(opened, self.config.canvas, True), UprightImage.of(opened)
        with evaluating(model):
            found = self.answers(model, torch.from_numpy(pixels.copy())[None])[0]
        sure = found.scores >= self.config.sure
        found = Objects(found.labels[sure], image.placed(found.boxes[sure]), found.scores[sure])
        if self.config.draw:
            draw_boxes(image, found, self.labels, Path(self.config.draw) / f"{Path(path).stem}_boxes.png")
        corners = [" ".join(f"{x:.0f}" for x in box) for box in found.boxes]
        rows = zip(found.labels.tolist(), found.scores.tolist(), corners, strict=True)
        return "; ".join(f"{self.labels[label]} {score:.2f} at {where}" for label, score, where in rows) or "no digit"


def _objects(scenes: Scenes) -> list[Objects]:
    """Return the true objects of scenes."""
    real = scenes.labels != NO_DIGIT
    rows = zip(scenes.labels, scenes.boxes, real, strict=True)
    return [Objects(labels[keep], boxes[keep], np.ones(int(keep.sum()))) for labels, boxes, keep in rows]


def nearest_cells(boxes: Tensor, labels: np.ndarray, grid: tuple[int, int]) -> Tensor:
    """Match objects to the cells of a grid, one to one, so that the sum of the distances of their middles is the least: (b k)."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = grid
    y, x = np.divmod(np.arange(rows * columns), columns)
    middles = np.stack([(x + 0.5) / columns, (y + 0.5) / rows], 1)
    found = np.zeros(labels.shape, np.int64)
    for row, count in enumerate((labels != NO_DIGIT).sum(1).tolist()):
        away = np.square(boxes[row, :count, None, :2].numpy() - middles).sum(-1)
        objects, cells = linear_sum_assignment(away)
        found[row, objects] = cells
    return torch.from_numpy(found)
