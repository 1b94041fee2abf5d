"""Settings of detection: digits in scenes, each with its label and its box."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.config import Config
from regard.options import Options
from regard.tasks.image_config import STEMS
from regard.tasks.presets import Preset


@dataclass
class Detection(Config):
    """Scenes, the head that finds objects in them, and the weights of its loss."""

    families: ClassVar[Mapping[str, Mapping[str, type[Options]]]] = {"stem": STEMS}

    stem: str = "cnn(channels=32, stages=4, blocks=1, norm='group')"  # how an image becomes tokens
    head: str = "queries"  # queries (attention: DETR), or dense (convolutions of as many weights, an answer for every cell)
    begin: str = "learned"  # head=queries: a query begins as a learned vector (DETR), or also as one of the likeliest cells
    queries: int = 16  # slots of head=queries, more than objects
    canvas: int = 64  # pixels of a side
    objects: int = 6  # digits of a scene, at most
    clutter: bool = True  # strokes, quarters of digits, a background and noise
    scenes: int = 50_000  # of training
    held_out: int = 1000  # scenes of validation, and as many of the test
    no_object: float = 0.1  # weight of the cross-entropy of slots without an object
    distance: float = 5.0  # weight of the distance of boxes
    overlap: float = 2.0  # weight of 1 - generalised IoU
    auxiliary: bool = True  # a loss behind every layer of the decoder, not the last one alone
    batch_tokens: int = 64  # scenes of one pass
    sure: float = 0.5  # detections with a smaller score are neither counted nor drawn
    nms: float = 0.5  # head=dense: of two boxes with a larger IoU the better one remains
    draw: str = ""  # `predict` draws its boxes into a PNG file of this folder for each image


def detect_config() -> Detection:
    return Detection(
        task="detect",
        positions="sinusoidal_2d",
        width=128,
        heads=4,
        depth=3,
        ffn=512,
        dropout=0.0,
        steps=12_000,
        lr=5e-4,
        schedule="cosine",
        warmup=500,
        decay=0.01,
        clip=1.0,
        validate_every=1000,
        save_every=1000,
    )


DETECTION_PRESETS: dict[str, Preset] = {
    "cpu": {
        "stem": "conv(layers=3, stride=2, pool='none', norm='group')",
        "begin": "cells",
        "width": 64,
        "ffn": 160,
        "depth": 2,
        "steps": 4000,
        "batch_tokens": 32,
        "lr": 1e-3,
        "warmup": 200,
        "held_out": 300,
        "validate_every": 500,
        "save_every": 500,
    },
}
