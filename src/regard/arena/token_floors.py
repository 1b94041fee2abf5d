"""Scores of readers that attend to nothing: the most frequent label, that of a token, of a position, of the sequence itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.arena.arena_task import IGNORED, Examples

COUNTED_ROWS = 64  # sequences counted at a time


def token_floors(fitted: Examples, test: Examples, classes: int) -> dict[str, float]:
    """Return accuracies on test of the label most frequent in `fitted`: in all, after each token, at each position."""
    labels, truth = scored_targets(fitted), scored_targets(test)
    length = max(fitted.tokens.shape[1], test.tokens.shape[1])
    everywhere = (torch.zeros_like(labels.label), torch.zeros_like(truth.label))
    return {
        "most frequent": label_accuracy(*everywhere, labels.label, truth.label, 1, classes),
        "token": label_accuracy(labels.token, truth.token, labels.label, truth.label, classes, classes),
        "position": label_accuracy(labels.position, truth.position, labels.label, truth.label, length, classes),
    }


class ScoredTargets(NamedTuple):
    """Hold the scored targets of a split with the token and the position of each."""

    label: Tensor
    token: Tensor
    position: Tensor


def scored_targets(examples: Examples) -> ScoredTargets:
    """Collect the targets that are scored."""
    chosen = examples.targets != IGNORED
    return ScoredTargets(examples.targets[chosen].long(), examples.tokens[chosen].long(), chosen.nonzero()[:, 1])


def label_accuracy(given: Tensor, given_test: Tensor, label: Tensor, truth: Tensor, kinds: int, classes: int) -> float:
    """Predict the label most frequent beside each kind; a kind that was never seen gets the most frequent label of all."""
    pairs, counts = (given * classes + label).unique(return_counts=True)
    pairs = pairs[counts.argsort(stable=True)]
    rank = torch.full((kinds,), -1).scatter_reduce_(0, pairs // classes, torch.arange(len(pairs)), "amax")
    best = torch.where(rank >= 0, pairs[rank] % classes, label.bincount().argmax())
    return float((best[given_test] == truth).double().mean())


def commonest_so_far(test: Examples, first: int, end: int) -> float:
    """Score, at each target, the commonest token of its sequence so far among the ids from `first` to before `end`."""
    hits = 0
    for tokens, targets in zip(test.tokens.split(COUNTED_ROWS), test.targets.split(COUNTED_ROWS), strict=True):
        seen = tokens.long()[..., None] == torch.arange(first, end)
        best = first + seen.cumsum(1, dtype=torch.int32).argmax(-1)
        hits += int((best == targets).sum())
    return hits / int((test.targets != IGNORED).sum())
