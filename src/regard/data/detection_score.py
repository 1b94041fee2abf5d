"""Scores of detectors: average precision, its mean over classes and over thresholds of IoU, and counts that are right.

A detection is right at a threshold t if an object of its class in its image has IoU >= t with it and no better detection has
taken that object: detections are taken from the highest score to the lowest, each takes the free object of the largest IoU.
Precision and recall of the first i detections of a class make a curve. Average precision is the area below it, where the
precision at a recall is the largest at that recall or a greater one. Classes without objects are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))


class Objects(NamedTuple):
    """Hold the objects of one image, true or detected."""

    labels: np.ndarray  # (k)
    boxes: np.ndarray  # (k, 4): left, top, right, bottom
    scores: np.ndarray  # (k); of true ones nothing depends on them


def iou_table(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Compute intersection over union of all pairs of boxes (n, 4) and (m, 4): (n, m)."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    both = (high - low).clip(0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clip(0).prod(-1) for boxes in (one, other)]
    return both / np.maximum(areas[0][:, None] + areas[1] - both, 1e-9)


def average_precision(found: Sequence[Objects], truth: Sequence[Objects], threshold: float) -> dict[int, float]:
    """Compute the average precision of every class that has objects, from 0 to 1."""
    labels = np.unique(np.concatenate([own.labels for own in truth])).tolist() if truth else []
    return {label: _precision_area(*_marked(found, truth, label, threshold)) for label in labels}


def _marked(
    found: Sequence[Objects], truth: Sequence[Objects], label: int, threshold: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return scores and correctness of all detections of a class, and the number of its objects."""
    scores, right, total = [], [], 0
    for own, real in zip(found, truth, strict=True):
        mine, objects = own.labels == label, real.boxes[real.labels == label]
        order = np.argsort(-own.scores[mine], kind="stable")
        total += len(objects)
        scores.append(own.scores[mine][order])
        right.append(_taken(iou_table(own.boxes[mine][order], objects), threshold))
    return np.concatenate(scores), np.concatenate(right), total


def _taken(overlap: np.ndarray, threshold: float) -> np.ndarray:
    """Return which detections (n), the best first, take one of the objects of a table (n, m)."""
    free, found = overlap.copy(), np.zeros(len(overlap), bool)
    for place in range(len(free) if free.shape[1] else 0):
        best = int(free[place].argmax())
        if free[place, best] >= threshold:
            found[place] = True
            free[:, best] = -1
    return found


def _precision_area(scores: np.ndarray, right: np.ndarray, total: int) -> float:
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(right[order])
    precision = hits / np.arange(1, len(hits) + 1)
    reached = np.maximum.accumulate(precision[::-1])[::-1]
    return float((reached * right[order]).sum() / max(1, total))


def detection_scores(found: Sequence[Objects], truth: Sequence[Objects], sure: float) -> dict[str, float]:
    """Compute mean average precision at IoU 0.5, and over 0.5 to 0.95, and the share of images with the right number, in percent.

    The number of an image is that of its detections with a score of at least `sure`.
    """
    means = [np.mean(list(average_precision(found, truth, t).values()) or [0.0]) for t in THRESHOLDS]
    counts = [int((own.scores >= sure).sum()) == len(real.labels) for own, real in zip(found, truth, strict=True)]
    return {"map50": 100 * float(means[0]), "map": 100 * float(np.mean(means)), "count": 100 * float(np.mean(counts or [False]))}


def detection_floors(train: Sequence[Objects], test: Sequence[Objects], cells: int = 8) -> dict[str, float]:
    """Score answers that see no image, in percent.

    - the most frequent boxes: the same answer to every image, the mean of the boxes of train whose middle and size are in one
      cell of a grid, for the `cells` most frequent cells of each class, scored by how frequent they are (map50);
    - the true boxes with the labels of train by their frequency, all of them for every box (map50);
    - the most frequent number of objects (count).
    """
    labels, boxes = (np.concatenate([getattr(own, name) for own in train]) for name in ("labels", "boxes"))
    constant = _frequent_boxes(labels, boxes, cells)
    classes, frequent = np.unique(labels, return_counts=True)
    prior = [_all_labels(own, classes, frequent / frequent.sum()) for own in test]
    numbers = np.array([len(own.labels) for own in train])
    usual = np.bincount(numbers).argmax()
    at_half = [average_precision(answers, test, 0.5).values() for answers in ([constant] * len(test), prior)]
    names = ("the most frequent boxes, map50", "true boxes with labels by frequency, map50")
    found = {name: 100 * float(np.mean(list(own))) for name, own in zip(names, at_half, strict=True)}
    return {**found, "the most frequent number, count": 100 * float(np.mean([len(own.labels) == usual for own in test]))}


def _frequent_boxes(labels: np.ndarray, boxes: np.ndarray, cells: int) -> Objects:
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    sizes = boxes[:, 2:] - boxes[:, :2]
    keys = np.concatenate([labels[:, None], np.floor(np.concatenate([middles, sizes], 1) * 5)], 1)
    kinds, place, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    place = place.reshape(-1)
    chosen: list[int] = []
    for label in np.unique(labels):
        own = np.flatnonzero(kinds[:, 0] == label)
        chosen += own[np.argsort(-counts[own], kind="stable")][:cells].tolist()
    means = np.array([boxes[place == kind].mean(0) for kind in chosen])
    return Objects(kinds[chosen, 0].astype(np.int64), means, counts[chosen] / counts.sum())


def _all_labels(own: Objects, classes: np.ndarray, shares: np.ndarray) -> Objects:
    """Give every true box all labels, with their shares as scores."""
    return Objects(np.tile(classes, len(own.boxes)), own.boxes.repeat(len(classes), 0), np.tile(shares, len(own.boxes)))
