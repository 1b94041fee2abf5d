"""The loss of a predicted set: slots are matched to objects one to one at the least cost, then trained on these objects.

Letters: l layers, b images, n slots, k objects (padded), c classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.batch import NO_LABEL
from regard.models.boxes import box_corners, generalised_iou
from regard.models.detector import Detected
from regard.training.losses import Loss


class SetWeights(NamedTuple):
    """Weigh the terms of the cost and the loss."""

    classes: float = 1.0
    distance: float = 5.0  # of the sum of |differences| of a box
    overlap: float = 2.0  # of 1 - generalised IoU
    no_object: float = 0.1  # of the cross-entropy of slots without an object


def match_cost(found: Detected, labels: Tensor, boxes: Tensor, weights: SetWeights) -> Tensor:
    """Compute the cost (b n k) of every slot for every object: minus the probability of its class, and the distance of boxes."""
    probabilities = found.scores.float().softmax(-1)
    own = probabilities.gather(2, labels.clamp_min(0)[:, None].expand(-1, probabilities.shape[1], -1))
    one, other = found.boxes.float()[:, :, None], boxes[:, None]
    distance = (one - other).abs().sum(-1)
    overlap = generalised_iou(box_corners(one), box_corners(other))
    return -weights.classes * own + weights.distance * distance - weights.overlap * overlap


@torch.no_grad()
def match(layers: Sequence[Detected], labels: Tensor, boxes: Tensor, weights: SetWeights) -> list[Tensor]:
    """Match objects to slots, one to one, at the least cost in sum, for each layer: the slot (b k) of every object.

    Kuhn 1955, by SciPy on the CPU: the costs are copied there once for all layers. Objects that are padding get slot 0.
    """
    from scipy.optimize import linear_sum_assignment

    costs = torch.cat([match_cost(found, labels, boxes, weights) for found in layers], 1)
    table, counts = costs.nan_to_num(nan=1e9, posinf=1e9).cpu().numpy(), (labels != NO_LABEL).sum(1).tolist()
    ends = np.cumsum([found.scores.shape[1] for found in layers])[:-1]
    slots = np.zeros((len(layers), *labels.shape), np.int64)
    for layer, answers in enumerate(np.split(table, ends, axis=1)):
        for row, count in enumerate(counts):
            which, objects = linear_sum_assignment(answers[row, :, :count])
            slots[layer, row, objects] = which
    return list(torch.from_numpy(slots).to(labels.device))


def set_loss(layers: Sequence[Detected], slots: Sequence[Tensor], labels: Tensor, boxes: Tensor, weights: SetWeights) -> Loss:
    """Compute the loss of layers whose objects are at these slots (b k), summed over layers and counted in objects.

    Objects are the first ones of a row of `labels` (b k), padded with NO_LABEL; boxes (b k 4) are x, y, width, height.
    """
    parts = [_layer_terms(found, at, labels, boxes, weights) for found, at in zip(layers, slots, strict=True)]
    terms = torch.stack([torch.stack(own) for own in parts])  # (l 3)
    scale = terms.new_tensor([weights.classes, weights.distance, weights.overlap])
    last = terms[-1].detach()
    named = {"nll": last[0], "distance": last[1], "overlap": last[2]}
    return Loss((terms * scale).sum(), (labels != NO_LABEL).sum(), named)


def _layer_terms(
    found: Detected, slots: Tensor, labels: Tensor, boxes: Tensor, weights: SetWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sums of cross-entropy, of distances and of 1 - generalised IoU of one layer."""
    real = labels != NO_LABEL
    nothing = found.scores.shape[-1] - 1
    n = found.scores.shape[1]
    # padding is written into a slot behind the last one, which is cut off
    aim = labels.new_full((len(labels), n + 1), nothing).scatter(1, slots.masked_fill(~real, n), labels.clamp_min(0))[:, :n]
    scores = found.scores if found.scores.dtype == torch.float64 else found.scores.float()
    nll = -scores.log_softmax(-1).gather(2, aim[..., None])[..., 0]
    nll = nll * torch.where(aim == nothing, weights.no_object, 1.0)
    near = found.boxes.gather(1, slots[..., None].expand(-1, -1, 4))
    aimed = boxes.to(near.dtype)
    distance = (near - aimed).abs().sum(-1)
    apart = 1 - generalised_iou(box_corners(near), box_corners(aimed))
    return nll.sum(), distance.masked_fill(~real, 0).sum(), apart.masked_fill(~real, 0).sum()
