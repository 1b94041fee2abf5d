"""Scores of classifiers without attention: the most frequent label, labels by one value, nearest means, naive Bayes, ridge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.arena.arena_task import Examples

PART_READERS = ("levels of operators evaluated",)  # their names begin so: they compute a part of the answer, in order


def trivial(floors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores that need no attention. Readers are marks on the way: models below them may have learned a lot."""
    return {name: value for name, value in floors.items() if not name.startswith(PART_READERS)}


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


def token_histogram(tokens: Tensor, vocab: int) -> Tensor:
    """Count each token id in each sequence: (examples, vocab), float32."""
    counts = [np.bincount(row, minlength=vocab) for row in tokens.numpy()]
    return torch.from_numpy(np.stack(counts)).float()


def ridge(x: Tensor, targets: Tensor, test_x: Tensor, test_targets: Tensor, penalty: float = 1e-3) -> float:
    """Score a linear map of features to labels, by least squares with a penalty on standardised features."""
    mean = x.mean(0)
    spread = x.std(0).clamp(min=1e-6)
    known = torch.nn.functional.one_hot(targets.long()).float()
    left = (x - mean) / spread
    gram = (left.mT @ left).double()
    gram.diagonal().add_(penalty * len(x))
    weights = torch.linalg.solve(gram, (left.mT @ (known - known.mean(0))).double()).float()
    right = (test_x - mean) / spread
    return share_right((right @ weights + known.mean(0)).argmax(1), test_targets)


def nearest_mean(x: Tensor, targets: Tensor, test_x: Tensor, test_targets: Tensor) -> float:
    """Score the label whose mean over train is nearest."""
    labels = int(targets.max()) + 1
    means = torch.stack([x[targets == label].double().mean(0) for label in range(labels)])
    return share_right(torch.cdist(test_x.double(), means).argmin(1), test_targets)


def token_bayes(train: Examples, test: Examples, order: int, buckets: int = 1 << 19) -> float:
    """Score naive Bayes of the n-grams that a sequence has, each counted once; n-grams share `buckets` cells by a hash."""
    labels = int(train.targets.max()) + 1
    counts = np.zeros((labels, buckets))
    for cells, target in zip(_gram_cells(train, order, buckets), train.targets.tolist(), strict=True):
        counts[target, cells] += 1
    weights = np.log(counts + 1) - np.log((counts + 1).sum(1, keepdims=True))
    weights[:, counts.sum(0) == 0] = 0  # never seen: no evidence
    prior = np.log(np.bincount(train.targets.numpy(), minlength=labels))
    found = [(prior + weights[:, cells].sum(1)).argmax() for cells in _gram_cells(test, order, buckets)]
    return share_right(torch.from_numpy(np.array(found)), test.targets)


def _gram_cells(examples: Examples, order: int, buckets: int) -> Iterator[np.ndarray]:
    """Iterate over the cells of the n-grams of each sequence, without repeats."""
    assert examples.lengths is not None
    last = np.zeros(buckets, np.int64)  # place of each cell in a sequence
    for tokens, length in zip(examples.tokens.numpy(), examples.lengths.tolist(), strict=True):
        row = tokens.astype(np.uint32)
        grams = np.zeros(max(length - order + 1, 0), np.uint32)
        for shift in range(order):
            grams = grams * np.uint32(257) + row[shift : shift + len(grams)]
        cells = (grams * np.uint32(2654435761)).astype(np.uint64) * np.uint64(buckets) >> np.uint64(32)
        places = np.arange(len(cells))
        last[cells] = places
        yield cells[last[cells] == places]


def threshold(scores: Tensor, targets: Tensor, test_scores: Tensor, test_targets: Tensor) -> float:
    """Score the label 1 above a threshold of one number, or below it, whichever is right more often on train."""
    order = scores.argsort(stable=True)
    signs = targets[order].long() * 2 - 1
    gained = torch.cat([torch.zeros(1, dtype=torch.long), signs.cumsum(0)])  # ones below each cut, less zeros below it
    ordered = scores[order]
    inside = torch.cat([torch.tensor([True]), ordered[1:] > ordered[:-1], torch.tensor([True])])  # equal scores stay together
    rising = (-gained).masked_fill(~inside, -len(scores))
    falling = gained.masked_fill(~inside, -len(scores))
    infinite = ordered.new_full((1,), torch.inf)
    bounds = torch.cat([-infinite, (ordered[1:] + ordered[:-1]) / 2, infinite])
    if rising.max() >= (falling - signs.sum()).max():
        return share_right((test_scores >= bounds[rising.argmax()]).long(), test_targets)
    return share_right((test_scores < bounds[falling.argmax()]).long(), test_targets)
