"""Scores of classifiers without attention: the most frequent label, labels by one value, nearest means, naive Bayes, ridge."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.arena.arena_task import Examples


def share_right(predicted: Tensor, targets: Tensor) -> float:
    """Return the accuracy."""
    return float((predicted == targets).double().mean())


def most_frequent(train: Tensor, test: Tensor) -> float:
    """Score the most frequent label of train on the labels of test."""
    return share_right(train.long().bincount().argmax(), test)


def label_by_value(train: Examples, test: Examples, name: str) -> float:
    """Score the most frequent label of each value of a slice, counted on train; values not seen get the most frequent of all."""
    labels = int(train.targets.max()) + 1
    values = int(max(train.slices[name].max(), test.slices[name].max())) + 1
    cells = train.slices[name].long() * labels + train.targets.long()
    counts = cells.bincount(minlength=values * labels).view(values, labels)
    seen = counts.sum(1) > 0
    best = torch.where(seen, counts.argmax(1), counts.sum(0).argmax())
    return share_right(best[test.slices[name].long()], test.targets)
