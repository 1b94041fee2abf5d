"""One label for an image: CIFAR-10 in colour and in gray, with a CNN, a ViT, or any mechanism over patches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.colour_images import (
    CIFAR_CLASSES,
    IMAGE_FILES,
    ImageSplits,
    image_floors,
    read_colour_images,
    read_image,
    some_images,
    split_images,
)
from regard.data.gray_images import LabelledImages, read_gray_images
from regard.data.locate import find
from regard.models.build import added, encoder
from regard.models.encoder_head import Reader
from regard.models.grid_patterns import check_grid
from regard.models.heads import POOLS, PerSequence
from regard.models.image_embedding import ImageEmbedding, ImageReader
from regard.options import check_choice
from regard.positions.grid_positions import on_grid
from regard.tasks.image_attention import ImageAttention, image_attention
from regard.tasks.image_config import Images
from regard.tasks.image_stem import image_stem
from regard.tasks.support import device_under, evaluating, kept_labels
from regard.tasks.task import Task
from regard.training.image_augmentation import Augmentation, mixed
from regard.training.learnable import Step
from regard.training.losses import Loss, check_smoothing

INFERENCE_IMAGES = 512  # images of a batch when nothing is kept for a backward pass
PIXEL_MEAN, PIXEL_SPREAD = 0.4734, 0.2516  # of the pixels of CIFAR-10's training images, over all channels

ImageExample = tuple[np.ndarray, int]  # uint8 (channels, height, width), and the place of its label


class ImageTask(Task):
    """One of several labels for every image; scored by the share that is right. `predict` takes the paths of image files."""

    best = ("accuracy", "max")
    steady = True
    answering = ("views",)
    file_ending = IMAGE_FILES
    channels = 3
    side = 32  # pixels
    config: Images

    def __init__(self, config: Images) -> None:
        super().__init__(config)
        check_choice("pool", config.pool, POOLS)
        if not 0 < config.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {config.fraction!r}")
        if not 0 <= config.colour < 1:
            raise ValueError(f"colour must be from 0 to below 1, not {config.colour!r}")
        for name in ("crop", "cutout", "mixup", "cutmix"):
            if not 0 <= getattr(config, name) <= self.side:
                raise ValueError(f"{name} must be from 0 to {self.side}, not {getattr(config, name)!r}")
        if config.views not in (1, 2):
            raise ValueError(f"views must be 1, or 2 for the image and its mirror image, not {config.views!r}")
        if config.depth < 0:
            raise ValueError(f"depth must be at least 0, not {config.depth!r}")
        if not config.depth:
            self.bodies = ()
        if config.pool == "token" and not config.depth:
            raise ValueError("pool='token' reads a class token, which layers must have filled: with depth=0 use pool=mean")
        self.augmentation = Augmentation(config.crop, config.flip, config.cutout, config.colour, config.trivial)
        self.labels: list[str] = []
        self.floors: dict[str, float] = {}
        self.embedding()  # which refuses a stem that does not fit the image

    def images(self, folder: Path | None) -> ImageSplits:
        """Read the images of train, val and test."""
        raise NotImplementedError

    def read(self, folder: Path | None = None) -> None:
        train, val, test = self.images(folder)
        self.labels = self.labels or list(CIFAR_CLASSES)
        parts = {"train": some_images(train, self.config.fraction), "val": val, "test": test}
        self.splits = {name: _examples(part) for name, part in parts.items()}
        self.floors = image_floors(parts["train"], val) if len(val.labels) else {}
        self.sample = "photo.png"

    def describe_data(self) -> list[str]:
        counts = ", ".join(f"{len(rows):,} {name}" for name, rows in self.splits.items())
        floors = ", ".join(f"{name} {score:.1f} %" for name, score in self.floors.items())
        return [f"images: {counts}", f"floors on val: {floors or 'there are no images'}"]

    def unused(self) -> dict[str, str]:
        found = super().unused() | {"max_len": "texts: an image has as many tokens as its stem makes", "share": "words"}
        if not self.config.depth:
            layers = ("mixer", "heads", "ffn", "activation", "gated", "norm", "positions", "weight_dropout")
            found |= dict.fromkeys(layers, "layers behind the stem, and depth=0 has none")
        return found

    def assets(self) -> dict[str, str]:
        return {"labels.json": json.dumps(self.labels)}

    def restore(self, assets: Mapping[str, str]) -> None:
        self.labels = kept_labels(assets, "labels.json")

    def size(self, example: ImageExample) -> int:  # noqa: ARG002 - a batch counts images
        return 1

    def batch(self, examples: Sequence[ImageExample]) -> Batch:
        images = np.stack([image for image, _ in examples])
        return Batch(torch.from_numpy(images), None, torch.tensor([label for _, label in examples]))

    def embedding(self) -> ImageEmbedding:
        """Build the stem, with the positions that are added to its tokens."""
        front = int(self.config.pool == "token")
        config = self.config
        bare = image_stem(config.options("stem"), self.channels, config.width, front=front, dropout=config.dropout)
        rows, columns = bare.grid(self.side, self.side)
        self.columns = columns
        self.sized = dataclasses.replace(
            self.config,
            max_len=front + rows * columns,
            depth=max(self.config.depth, 1),
            positions=on_grid(self.config.positions, columns, front),
        )
        if self.config.depth:
            bare.positions = added(self.sized)
        return bare

    def check_mixers(self) -> None:
        if self.config.depth:
            check_grid(self.config.mixer, self.columns, int(self.config.pool == "token"))

    def model(self) -> nn.Module:
        """Build the stem, the layers if there are any, and a head."""
        self.check_mixers()
        embed, config = self.embedding(), self.config
        head = PerSequence(config.width, len(self.labels), pool=config.pool, dropout=config.dropout)
        return Reader(encoder(self.sized, embed), head) if config.depth else ImageReader(embed, head)

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        assert batch.target is not None
        images = self.augmentation.change(batch.source.float() / 255)
        both = mixed(images, self.config.mixup, self.config.cutmix) if self.config.mixup or self.config.cutmix else None
        scores = model(_centred_pixels(images if both is None else both.images)).float()
        log = scores.log_softmax(-1)
        nll = _label_loss(log, batch.target, self.config.smoothing)
        if both is not None:
            second = _label_loss(log, batch.target[both.other], self.config.smoothing)
            nll = both.weight * nll + (1 - both.weight) * second
        return Loss(nll.sum(), torch.full((), len(nll), device=nll.device), {"nll": nll.sum().detach()})

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        examples = self.splits[split]
        right = sum(label == found for (_, label), found in zip(examples, self._answers(model, examples), strict=True))
        return {"accuracy": 100 * right / max(1, len(examples)), "images": float(len(examples))}

    def _answers(self, model: nn.Module, examples: Sequence[ImageExample]) -> list[int]:
        with evaluating(model):
            parts = [examples[i : i + INFERENCE_IMAGES] for i in range(0, len(examples), INFERENCE_IMAGES)]
            return [label for part in parts for label in self.scores(model, self.batch(part)).argmax(-1).tolist()]

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the scores (b labels) of a batch, on the device of the model."""
        return self.pixel_scores(model, batch.to(device_under(model)).source.float() / 255)

    def pixel_scores(self, model: nn.Module, images: Tensor) -> Tensor:
        """Compute the scores (b labels) of images (b c h w) with numbers from 0 to 1, on the device of the model.

        With two views they are the logarithms of mean probabilities.
        """
        pixels = _centred_pixels(images.to(device_under(model)))
        if self.config.views == 1:
            return model(pixels)
        return torch.stack([model(x).float().softmax(-1) for x in (pixels, pixels.flip(-1))]).mean(0).log()

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        paths = [line.strip() for line in lines]
        examples = [(read_image(path, self.side, self.channels == 1), 0) for path in paths if path]
        found = iter(self._answers(model, examples))
        return [self.labels[next(found)] if path else "" for path in paths]

    def attention(self, model: nn.Module, line: str) -> ImageAttention:
        if not self.config.depth:
            raise ValueError("this run has depth=0: there is no layer behind its stem that could attend")
        path = line.strip()
        examples = [(read_image(path, self.side, self.channels == 1), 0)]
        answer, image = self.labels[self._answers(model, examples)[0]], self.batch(examples)
        pixels = _centred_pixels(image.to(device_under(model)).source.float() / 255)
        return image_attention(model, lambda: model(pixels), path, answer, self.side)


def _examples(part: LabelledImages) -> list[ImageExample]:
    return list(zip(part.images, part.labels.tolist(), strict=True))


def _centred_pixels(images: Tensor) -> Tensor:
    """Give pixels from 0 to 1 a mean of about 0 and a variance of about 1."""
    return (images - PIXEL_MEAN) / PIXEL_SPREAD


def _label_loss(log: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return the cross-entropy (b) of log-probabilities (b labels), with label smoothing."""
    check_smoothing(smoothing)
    own = -log.gather(1, target[:, None])[:, 0]
    return (1 - smoothing) * own - smoothing * log.mean(1)


class ColourTask(ImageTask):
    """CIFAR-10 in colour, of a copy in JPEG files."""

    def images(self, folder: Path | None) -> ImageSplits:
        parts = read_colour_images(find("cifar10_jpeg", folder))
        return split_images(parts["train"], parts["test"])

    def describe_data(self) -> list[str]:
        return [*super().describe_data(), "a copy of CIFAR-10 in JPEG files: accuracies are not those of the original pixels"]


class GrayTask(ImageTask):
    """CIFAR-10 in gray, without loss."""

    channels = 1

    def images(self, folder: Path | None) -> ImageSplits:
        where = find("cifar10", folder)
        train, test = (read_gray_images(where, part) for part in ("train", "test"))
        return split_images(*(LabelledImages(part.images[:, None], part.labels) for part in (train, test)))
