"""Scenes of handwritten digits: several of any size and place on a canvas with clutter, each with its label and its box.

The digits are the 1,797 pictures of 8 x 8 pixels that scikit-learn brings along (the test part of UCI's optical recognition of
handwritten digits). They are split before scenes are made, so that no picture is in scenes of two splits. A scene is a function
of its split and its number alone. scikit-learn is imported when digits are read, and only then.

Letters: b scenes, k digits of a scene, p pixels of a side of the canvas. A box is (left, top, right, bottom) from 0 to 1.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.locate import file
from regard.data.text_files import COMPRESSED_SUFFIXES, DataError, read_lines

DIGIT_SIDE = 8  # pixels
FULL_INK = 16  # of the darkest pixel
INKED = 4  # from here on a pixel counts for the box
SPLIT_NAMES = ("train", "val", "test")
SPLIT_SHARES = (0.6, 0.2, 0.2)
DIGIT_SIZES = (0.2, 0.45)  # of a digit's picture, in sides of the canvas
COVERED = 0.3  # of the smaller one of two boxes, at most
PLACE_TRIES = 20  # for a place that covers too little of the others
FRAGMENTS = 2  # quarters of digits in the clutter, at most
STROKES = 3  # straight lines in the clutter, at most
PIXEL_NOISE = 0.05  # standard deviation of pixels from 0 to 1
NO_DIGIT = -100  # label of padding


class Digits(NamedTuple):
    """Hold pictures of digits and their labels."""

    pictures: np.ndarray  # uint8 (n, 8, 8), from 0 to 16
    labels: np.ndarray  # (n)


class Scenes(NamedTuple):
    """Hold rendered scenes, padded to k digits."""

    images: np.ndarray  # uint8 (b, 1, p, p)
    labels: np.ndarray  # (b, k), NO_DIGIT where there is none
    boxes: np.ndarray  # float32 (b, k, 4)


class _Things(NamedTuple):
    """What is drawn in scenes: pictures by weight, with their places on the canvas."""

    pictures: np.ndarray  # (b, m, 8, 8), from 0 to 1
    frames: np.ndarray  # (b, m, 4): left, top, width and height of the whole picture
    strokes: np.ndarray  # (b, s, 6): two ends, half a width, brightness


def read_digits(folder: Path | None = None) -> Digits:
    """Read all digits: from digits.csv in a folder `digits` of the data, or else of scikit-learn."""
    root = folder if folder is not None else os.environ.get("REGARD_DATA") or None
    for where in () if root is None else (Path(root).expanduser() / "digits", Path(root).expanduser()):
        if any((where / f"digits.csv{ending}").is_file() for ending in COMPRESSED_SUFFIXES):
            return _read_csv(file(where, "digits.csv"))
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "scenes are made of the digits of scikit-learn: pip install 'regard[detection]', or put its digits.csv.gz into a "
            "folder digits of the data (--data, REGARD_DATA)",
            name="sklearn",
        ) from None
    found = load_digits()
    return Digits(found.images.astype(np.uint8), found.target.astype(np.int64))


def _read_csv(path: Path) -> Digits:
    """Read lines of 64 pixels from 0 to 16 and a label."""
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            row = [int(word) for word in line.split(",")]
        except ValueError:
            raise DataError(f"{path}, line {number}: not whole numbers with commas between them") from None
        if len(row) != DIGIT_SIDE**2 + 1 or min(row) < 0 or max(row[:-1]) > FULL_INK or row[-1] > 9:
            raise DataError(f"{path}, line {number}: not 64 pixels from 0 to {FULL_INK} and a label from 0 to 9")
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no digits")
    whole = np.array(rows, np.int64)
    return Digits(whole[:, :-1].reshape(-1, DIGIT_SIDE, DIGIT_SIDE).astype(np.uint8), whole[:, -1])


def split_digits(digits: Digits) -> dict[str, Digits]:
    """Split pictures, those of each label by their hash: copies of a picture are in one split, whatever their order is."""
    keys = np.array([hashlib.sha256(picture.tobytes()).hexdigest() for picture in digits.pictures])
    ends = np.cumsum(SPLIT_SHARES)[:-1]
    rows: list[list[int]] = [[], [], []]
    for label in np.unique(digits.labels):
        own = np.flatnonzero(digits.labels == label)
        names = np.unique(keys[own])
        cuts = [names[min(round(end * len(names)), len(names) - 1)] for end in ends]
        for place in own.tolist():
            rows[int(np.searchsorted(cuts, keys[place], side="right"))].append(place)
    if not all(rows):
        raise DataError("there are too few digits for three splits")
    return {name: Digits(digits.pictures[own], digits.labels[own]) for name, own in zip(SPLIT_NAMES, rows, strict=True)}


class SceneMaker:
    """Make the scenes of one split by their numbers, with at most `most` of its digits on a canvas of `side` pixels.

    `clutter` draws strokes, quarters of digits and a background.
    """

    def __init__(self, digits: Digits, split: str, *, side: int, most: int, clutter: bool = True) -> None:
        self.digits, self.side, self.most, self.clutter = digits, side, most, clutter
        self.stream = SPLIT_NAMES.index(split)
        self.inked = np.array([_extent(picture) for picture in digits.pictures])  # (n, 4) of a picture, from 0 to 1

    def __call__(self, numbers: Sequence[int]) -> Scenes:
        things = self.most + (FRAGMENTS if self.clutter else 0)
        b = len(numbers)
        labels = np.full((b, self.most), NO_DIGIT, np.int64)
        boxes = np.zeros((b, self.most, 4), np.float32)
        pictures = np.zeros((b, things, DIGIT_SIDE, DIGIT_SIDE), np.float32)
        frames = np.tile(np.array([0, 0, 1, 1], np.float32), (b, things, 1))
        strokes = np.zeros((b, STROKES, 6), np.float32)
        ground = np.zeros((b, self.side, self.side), np.float32)
        for row, number in enumerate(numbers):
            rng = np.random.default_rng((self.stream, number))
            self._place(rng, labels[row], boxes[row], pictures[row], frames[row])
            if self.clutter:
                self._cover(rng, boxes[row], pictures[row], frames[row])
                strokes[row] = _drawn_strokes(rng)
                ground[row] = self._background(rng)
        images = _render(_Things(pictures, frames, strokes), ground)
        return Scenes(images[:, None], labels, boxes)

    def _place(
        self, rng: np.random.Generator, labels: np.ndarray, boxes: np.ndarray, pictures: np.ndarray, frames: np.ndarray
    ) -> None:
        """Draw digits into the rows of one scene; one that finds no place is left out, unless it is the first."""
        found = 0
        for _ in range(int(rng.integers(1, self.most + 1))):
            pick = int(rng.integers(len(self.digits.labels)))
            for _ in range(PLACE_TRIES):
                frame = _drawn_frame(rng)
                box = _within(frame, self.inked[pick])
                if found == 0 or _covered(box, boxes[:found]) <= COVERED:
                    labels[found], boxes[found], frames[found] = self.digits.labels[pick], box, frame
                    pictures[found] = self.digits.pictures[pick] / FULL_INK * rng.uniform(0.5, 1)
                    found += 1
                    break

    def _cover(self, rng: np.random.Generator, boxes: np.ndarray, pictures: np.ndarray, frames: np.ndarray) -> None:
        """Draw quarters of digits where they cover no digit: they have no label."""
        for place in range(self.most, self.most + FRAGMENTS):
            frame, pick = _drawn_frame(rng), int(rng.integers(len(self.digits.labels)))
            top, left = (DIGIT_SIDE // 2 * rng.integers(2, size=2)).tolist()
            quarter = np.zeros((DIGIT_SIDE, DIGIT_SIDE), np.float32)
            part = slice(top, top + DIGIT_SIDE // 2), slice(left, left + DIGIT_SIDE // 2)
            quarter[part] = self.digits.pictures[pick][part] / FULL_INK * rng.uniform(0.5, 1)
            if _covered(_within(frame, np.array([0, 0, 1, 1])), boxes) == 0:
                pictures[place], frames[place] = quarter, frame

    def _background(self, rng: np.random.Generator) -> np.ndarray:
        slope = np.linspace(-1, 1, self.side, dtype=np.float32)
        down, across = rng.uniform(-0.1, 0.1, 2).astype(np.float32)
        noise = rng.standard_normal((self.side, self.side), np.float32)
        return np.float32(rng.uniform(0.1, 0.2)) + down * slope[:, None] + across * slope + np.float32(PIXEL_NOISE) * noise


def _extent(picture: np.ndarray) -> np.ndarray:
    """Return the smallest box around the ink of a picture, in its sides."""
    inked = picture >= INKED
    rows, columns = (np.flatnonzero(inked.any(axis)) for axis in (1, 0))
    if not len(rows):
        raise DataError("a picture of a digit has no ink")
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) / DIGIT_SIDE


def _drawn_frame(rng: np.random.Generator) -> np.ndarray:
    """Draw a place and a size within the canvas: (left, top, width, height)."""
    height = rng.uniform(*DIGIT_SIZES)
    width = min(height * rng.uniform(0.8, 1.25), 1.0)
    left, top = rng.uniform(0, 1 - width), rng.uniform(0, 1 - height)
    return np.array([left, top, width, height], np.float32)


def _within(frame: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Return the box of a part of a frame, which is given in sides of the frame."""
    corner, size = frame[:2], frame[2:]
    return np.concatenate([corner + size * part[:2], corner + size * part[2:]]).astype(np.float32)


def _covered(box: np.ndarray, others: np.ndarray) -> float:
    """Return the largest share of the smaller one of two boxes that both have, of `box` and each of `others` (k, 4)."""
    overlap = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    shared = overlap.clip(0).prod(1)
    areas = (others[:, 2:] - others[:, :2]).prod(1)
    smaller = np.minimum(areas, (box[2:] - box[:2]).prod())
    return float((shared / smaller.clip(1e-9)).max(initial=0))


def _drawn_strokes(rng: np.random.Generator) -> np.ndarray:
    count = int(rng.integers(STROKES + 1))
    found = np.zeros((STROKES, 6), np.float32)
    start, angle, length = rng.uniform(0, 1, (STROKES, 2)), rng.uniform(0, 2 * np.pi, STROKES), rng.uniform(0.1, 0.4, STROKES)
    found[:, :2] = start
    found[:, 2:4] = start + length[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    found[:, 4] = rng.uniform(0.008, 0.02, STROKES)
    found[:count, 5] = rng.uniform(0.3, 0.7, count)
    return found


def _render(things: _Things, ground: np.ndarray) -> np.ndarray:
    """Draw things over grounds (b, p, p): the brightest of all at every pixel, as uint8."""
    side = ground.shape[1]
    across, down = (_interpolation(things.frames[..., axis], things.frames[..., 2 + axis], side) for axis in (0, 1))
    drawn = (down @ things.pictures @ across.swapaxes(-1, -2)).max(1)
    image = np.maximum(np.maximum(ground, drawn), _stroked(things.strokes, side))
    return (image.clip(0, 1) * 255).round().astype(np.uint8)


def _interpolation(start: np.ndarray, size: np.ndarray, side: int) -> np.ndarray:
    """Return weights (b, m, p, 8) of the pixels of pictures in those of the canvas, on one axis: linear between their middles."""
    middles = (np.arange(side, dtype=np.float32) + 0.5) / side
    at = (middles - start[..., None]) / size[..., None] * DIGIT_SIDE - 0.5
    return (1 - np.abs(at[..., None] - np.arange(DIGIT_SIDE, dtype=np.float32))).clip(0).astype(np.float32)


def _stroked(strokes: np.ndarray, side: int) -> np.ndarray:
    """Return the brightness (b, p, p) of strokes: full within half their width of the line, and none a pixel further."""
    middles = (np.arange(side, dtype=np.float32) + 0.5) / side
    x, y = middles[None, None, None, :], middles[None, None, :, None]
    a, b, c, d, width, bright = (strokes[..., i, None, None] for i in range(6))
    dx, dy = c - a, d - b
    along = (((x - a) * dx + (y - b) * dy) / np.maximum(dx**2 + dy**2, 1e-9)).clip(0, 1)
    distance = np.hypot(x - a - along * dx, y - b - along * dy)
    return (bright * (1 - (distance - width) * side).clip(0, 1)).max(1)
