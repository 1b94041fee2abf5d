"""Settings of tasks with one label for an image. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.config import Config
from regard.options import Options, check_choice, check_positive, family
from regard.tasks.presets import Preset

POOLING_NAMES = ("none", "max", "mean")
NORM_NAMES = ("batch", "group", "none")


@dataclass(frozen=True)
class PatchStem(Options):
    """Cut the image into squares: ViT."""

    name: ClassVar[str] = "patches"
    side: int = 4  # pixels; where they do not divide the image, zeros are put around it

    def check(self) -> None:
        check_positive("side", self.side)


@dataclass(frozen=True)
class ConvStem(Options):
    """Convolutions with an activation and pooling, whose cells are tokens."""

    name: ClassVar[str] = "conv"
    layers: int = 2
    kernel: int = 3
    stride: int = 1
    pool: str = "max"  # max, mean or none, behind every layer
    norm: str = "none"  # batch, group or none

    def check(self) -> None:
        _check_convolution(self.kernel, self.pool, self.norm)
        check_positive("layers", self.layers)
        check_positive("stride", self.stride)


@dataclass(frozen=True)
class CnnStem(Options):
    """Stages of residual blocks, whose cells are tokens; with depth=0 a whole CNN."""

    name: ClassVar[str] = "cnn"
    channels: int = 64  # of the first stage; each further one has twice as many
    stages: int = 3  # each but the first halves the image
    blocks: int = 2  # of two convolutions, in a stage
    kernel: int = 3
    pool: str = "none"  # max or mean between stages; none: the stride of a convolution halves the image
    shrink: bool = True  # False: the image keeps its size, without stride and pooling
    residual: bool = True
    norm: str = "batch"  # batch, group or none

    def check(self) -> None:
        _check_convolution(self.kernel, self.pool, self.norm)
        for name in ("channels", "stages", "blocks"):
            check_positive(name, getattr(self, name))
        if self.residual and self.kernel % 2 == 0:
            raise ValueError(f"a residual connection needs an odd kernel, not {self.kernel}: or set residual=False")


def _check_convolution(kernel: int, pool: str, norm: str) -> None:
    check_positive("kernel", kernel)
    check_choice("pool", pool, POOLING_NAMES)
    check_choice("norm", norm, NORM_NAMES)


STEMS: dict[str, type[Options]] = family([PatchStem, ConvStem, CnnStem])


@dataclass
class Images(Config):
    """How an image becomes tokens, what training changes in it, and how many images there are."""

    families: ClassVar[Mapping[str, Mapping[str, type[Options]]]] = {"stem": STEMS}

    depth: int = 4  # layers behind the stem; 0: none, a CNN by itself
    stem: str = "patches"  # how an image becomes tokens
    pool: str = "mean"  # of tokens: token (a class token is put in front), mean, max, smooth
    batch_tokens: int = 128  # images of one pass
    fraction: float = 1.0  # share of the training images that is used, the same of every class
    crop: int = 4  # training moves images by up to so many pixels; 0: not at all
    flip: bool = True  # training mirrors half of the images
    cutout: int = 0  # side of a square that training hides; 0: none
    colour: float = 0.0  # training scales brightness, contrast and saturation by up to this share
    trivial: bool = False  # training changes each image by one of 14 operations, of random strength: TrivialAugment
    mixup: float = 0.0  # training mixes two images with weights of Beta(mixup, mixup); 0: none
    cutmix: float = 0.0  # training puts a rectangle of another image in, its share of Beta(cutmix, cutmix); 0: none
    views: int = 1  # 2: an answer is the mean of those to the image and to its mirror image


def _vit(task: str) -> Images:
    return Images(
        task=task,
        stem="patches(side=4)",
        positions="learned_2d",
        width=384,
        heads=6,
        depth=7,
        ffn=768,
        activation="gelu",
        dropout=0.0,
        steps=39_000,
        batch_tokens=256,
        lr=6e-4,  # 1e-3 diverged on a GPU in bf16-mixed
        schedule="cosine",
        warmup=1000,
        decay=0.05,
        smoothing=0.1,
        precision="bf16-mixed",
        validate_every=1000,
        save_every=1000,
        trivial=True,
        mixup=0.8,
        cutmix=1.0,
    )


def cifar10_config() -> Images:
    return _vit("cifar10")


def cifar10_gray_config() -> Images:
    return _vit("cifar10_gray")


IMAGE_PRESETS: dict[str, Preset] = {
    "cnn": {
        "stem": "cnn(channels=64, stages=4, blocks=2)",
        "depth": 0,
        "width": 256,
        "positions": "none",
        "steps": 20_000,
        "lr": 2e-3,
        "decay": 0.1,
        "mixup": 0.2,
    },
    "cct": {"stem": "conv(layers=2)"},
    "hybrid": {"stem": "cnn(channels=64, stages=2, blocks=2)", "depth": 4, "width": 256, "heads": 4, "ffn": 512, "steps": 18_000},
    "mlp_mixer": {"mixer": "mlp_mixer", "positions": "none", "width": 256, "heads": 4, "ffn": 512},
}
