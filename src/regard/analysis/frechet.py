"""The Frechet distance of two sets of vectors, as of two normal distributions with their means and covariances.

Heusel et al. 2017 (arXiv:1706.08500) compute it in the features of an Inception network and call that FID. In the features of
another network it is another number: smaller is nearer, and numbers of two networks cannot be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """Compute |m - m'|^2 + tr(S + S' - 2 (S S')^(1/2)) of vectors (n d) and (n' d), in float64."""
    (m, s), (k, t) = (_moments(x.double()) for x in (one, other))
    root = _root(s)
    # eigenvalues of S S' are those of S^(1/2) S' S^(1/2), which is symmetric
    shared = torch.linalg.eigvalsh(root @ t @ root).clamp_min(0).sqrt().sum()
    return float((m - k).square().sum() + s.trace() + t.trace() - 2 * shared)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dim() != 2 or len(x) < 2:
        raise ValueError(f"a covariance needs at least two vectors, (n d), not a tensor of shape {tuple(x.shape)}")
    mean = x.mean(0)
    away = x - mean
    return mean, away.mT @ away / (len(x) - 1)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
