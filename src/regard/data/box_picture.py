"""Detections drawn into an image file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from regard.data.colour_images import pillow_image
from regard.data.detection_score import Objects

COLOURS = ("#e6194b", "#3cb44b", "#ffe119", "#4363d8", "#f58231", "#911eb4", "#42d4f4", "#f032e6", "#bfef45", "#fabed4")
DRAWN_SIDE = 384  # pixels, at least


def draw_boxes(pixels: np.ndarray, found: Objects, names: list[str], path: Path) -> None:
    """Write a picture of pixels (channels, side, side) with a box for every object, its label and its score above it."""
    pillow = pillow_image()
    from PIL import ImageDraw

    scale = -(-DRAWN_SIDE // pixels.shape[1])
    channels = pixels.transpose(1, 2, 0)
    picture = pillow.fromarray(channels[..., 0] if channels.shape[2] == 1 else channels).convert("RGB")
    picture = picture.resize([scale * size for size in picture.size], pillow.Resampling.NEAREST)
    pen = ImageDraw.Draw(picture)
    for label, box, score in zip(found.labels.tolist(), found.boxes, found.scores.tolist(), strict=True):
        left, top, right, bottom = (box * np.tile(picture.size, 2)).tolist()
        colour = COLOURS[label % len(COLOURS)]
        pen.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=2)
        pen.text((left + 3, max(0.0, top - 12)), f"{names[label]} {score:.2f}", fill=colour)
    picture.save(path)
