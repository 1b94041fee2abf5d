"""Guided attention loss."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.mixers.attention import no_autocast
from regard.mixers.base import check_valid
from regard.training.losses import Loss


def guided_attention_loss(
    weights: Tensor, source_valid: Tensor | None = None, target_valid: Tensor | None = None, *, sharpness: float = 0.2
) -> Loss:
    """Penalise attention weights far from the diagonal. Tachibana et al. 2017, arXiv:1710.08969.

    sum_ij a_ij (1 - exp(-(j / n - i / m)^2 / 2 g^2)), with weights a (b h m n), the mean over heads, g = `sharpness`; n and m
    count the real tokens of each row, and i and j their indices among them. Summed over real target tokens, as the
    cross-entropy is: add `weight * guided_attention_loss(...).total` to it. The paper divides by n as well.
    """
    if not sharpness > 0:
        raise ValueError(f"sharpness is the width of the diagonal, above 0, not {sharpness!r}")
    b, h, m, n = weights.shape
    check_valid(source_valid, b, n, "the source")
    check_valid(target_valid, b, m, "the target")
    i, rows = _relative_positions(target_valid, weights, m)
    j, columns = _relative_positions(source_valid, weights, n)
    distance = j[:, None] - i[..., None]
    width = 2 * sharpness**2
    near = torch.exp(-(distance**2) / width)
    cost = (1 - near) * rows[..., None] * columns[:, None]
    cost = cost.to(weights.dtype)
    with no_autocast(weights):
        total = torch.einsum("bhmn,bmn->", weights, cost)
        return Loss(total / h, rows.sum())


def _relative_positions(valid: Tensor | None, like: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return relative positions of tokens, from 0 to 1, and the mask of real tokens: (b size) each."""
    real = valid
    if real is None:
        real = torch.ones(len(like), size, dtype=torch.bool, device=like.device)
    at = real.cumsum(1) - real.long()
    count = real.sum(1, keepdim=True).clamp_min(1)
    return at.double() / count, real
