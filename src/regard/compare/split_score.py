"""The score of a model on a split, whole and by slices: accuracy, or bits per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.arena.arena_task import IGNORED, ArenaScore, Examples
from regard.compare.cell_record import LESS_IS_BETTER
from regard.compare.compared_model import ComparedModel
from regard.compare.device_split import DeviceSplit


def target_losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of every target, in float32; 0 where there is none."""
    return F.cross_entropy(scores.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none").view_as(
        targets
    )


@torch.no_grad()
def target_points(model: ComparedModel, split: DeviceSplit, metric: str, batch: int, dtype: torch.dtype) -> Tensor:
    """Return what every target adds to the score, on the host: 1 for a right label, or its bits; NaN where there is no target.

    Where scores are NaN the label is wrong, and the bits are infinite.
    """
    model.eval()
    found = []
    device = split.tokens.device
    for first in range(0, len(split), batch):
        index = torch.arange(first, min(first + batch, len(split)), device=device)
        tokens, targets, valid, at = split.rows(index)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            scores = model(tokens, valid, at)
        if metric in LESS_IS_BETTER:
            losses = target_losses(scores, targets)
            points = losses.masked_fill(losses.isnan(), torch.inf) / math.log(2)
        else:
            points = ((scores.argmax(-1) == targets) & ~scores.isnan().any(-1)).float()
        found.append(points.masked_fill(targets == IGNORED, torch.nan).cpu())
    model.train()
    return torch.cat(found)


def mean_points(points: Tensor) -> float:
    """Return the mean over all targets, in float64; NaN without any."""
    real = points[~points.isnan()]
    return float(real.double().mean()) if real.numel() else math.nan


def arena_score(points: Tensor, split: DeviceSplit, made: Examples, names: Mapping[str, Sequence[str]]) -> ArenaScore:
    """Return the score of a split with its slices, whose values belong to examples or to targets, by name where they have one."""
    score = ArenaScore(mean_points(points), int((~points.isnan()).sum()))
    for name, values in made.slices.items():
        score.slices[name] = _by_value(points, _target_values(values, points, split), names.get(name, ()))
    return score


def _target_values(values: Tensor, points: Tensor, split: DeviceSplit) -> Tensor:
    """Return the value of a slice at every target."""
    values = values.cpu()
    if values.dim() == 2 and split.at is not None:
        values = values.gather(1, split.at.cpu().long())
    if values.dim() < points.dim():
        values = values[:, None]
    return values.expand_as(points)


def _by_value(points: Tensor, values: Tensor, names: Sequence[str]) -> dict[str, tuple[float, int]]:
    found: dict[str, tuple[float, int]] = {}
    for value in values.unique().tolist():
        inside = points[values == value]
        count = int((~inside.isnan()).sum())
        if count:
            found[names[int(value)] if names else f"{value:g}"] = (mean_points(inside), count)
    return found
