"""Detections drawn into an image file."""

from __future__ import annotations

import os
from pathlib import Path

from regard.data.colour_images import pillow_image
from regard.data.detection_score import Objects
from regard.data.upright_image import UprightImage

COLOURS = ("#e6194b", "#3cb44b", "#ffe119", "#4363d8", "#f58231", "#911eb4", "#42d4f4", "#f032e6", "#bfef45", "#fabed4")
DRAWN_SIDE = 384  # pixels of the longer side, at least
UNREAD_FRAME = "#9aa0a8"  # the frame of the square that is read


def draw_boxes(image: UprightImage, found: Objects, names: list[str], path: Path) -> None:
    """Write a picture with a box for every object, its label and its score above it; boxes are in pixels of the image.

    A small image is enlarged by a whole number. Where it is not square, a frame shows the square that was read.
    """
    pillow = pillow_image()
    from PIL import ImageDraw, ImageFont

    picture = pillow.fromarray(image.pixels)
    scale = -(-DRAWN_SIDE // max(picture.size))
    picture = picture.resize([scale * size for size in picture.size], pillow.Resampling.NEAREST)
    pen, line = ImageDraw.Draw(picture), max(2, max(picture.size) // 300)
    font = ImageFont.load_default(max(12, max(picture.size) // 45))
    left, top, side = (scale * x for x in image.square)
    if picture.size != (side, side):
        pen.rectangle((left, top, left + side - 1, top + side - 1), outline=UNREAD_FRAME, width=max(1, line // 2))
    for label, box, score in zip(found.labels.tolist(), found.boxes, found.scores.tolist(), strict=True):
        left, top, right, bottom = (scale * box).tolist()
        colour = COLOURS[label % len(COLOURS)]
        pen.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=line)
        written = f"{names[label]} {score:.2f}"
        _, _, wide, high = pen.textbbox((0, 0), written, font=font)
        place = min(left, picture.size[0] - wide - 1), max(0.0, top - high - 2)
        pen.rectangle((*place, place[0] + wide, place[1] + high), fill="#16181d")
        pen.text(place, written, fill=colour, font=font)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        picture.save(part, format="PNG")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
