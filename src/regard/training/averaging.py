"""Checkpoint averaging: the mean of several states of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.training.atomic_files import read_tensors

Weights = Mapping[str, Tensor]


def average(many: Sequence[Path | Weights]) -> dict[str, Tensor]:
    """Average weights, (1/k) sum_i w_i, summed in float64: of files, of checkpoint folders, or of weights themselves.

    Integers have no mean: they are those of the last, as the number of batches that a norm has seen. Polyak averaging, over
    saved states (Vaswani et al. 2017, arXiv:1706.03762, section 6.1).
    """
    if not many:
        raise ValueError("there is nothing to average")
    first, sums = None, {}
    last: Weights = {}
    for number, one in enumerate(many):
        weights = last = _read_weights(one) if isinstance(one, Path) else one
        if first is None:
            first = weights
            sums = {name: _wide(x) for name, x in weights.items()}
            continue
        which = str(one) if isinstance(one, Path) else f"number {number + 1}"
        _check_same_model(first, weights, which)
        for name, x in weights.items():
            if _has_mean(x):
                sums[name] += _wide(x)
    assert first is not None
    means: dict[str, Tensor] = {}
    for name, x in first.items():
        if _has_mean(x):
            mean = sums[name] / len(many)
            means[name] = mean.to(x.dtype)
        else:
            means[name] = last[name].clone()
    return means


def _read_weights(path: Path) -> Weights:
    if path.is_dir():
        path = path / "weights.safetensors"
    return read_tensors(path)


def _has_mean(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _wide(x: Tensor) -> Tensor:
    """Copy to double precision, for sums; integers are returned as they are."""
    if not _has_mean(x):
        return x
    dtype = torch.complex128 if x.is_complex() else torch.float64
    return x.to(dtype, copy=True)


def _check_same_model(first: Weights, other: Weights, which: str) -> None:
    """Refuse states of different models."""
    if different := sorted(set(first) ^ set(other)):
        raise ValueError(f"weights of different models have no mean: {which} and the first differ in {different[0]!r}")
    for name, x in other.items():
        if x.shape != first[name].shape or x.dtype != first[name].dtype:
            raise ValueError(
                f"weights of different models have no mean: {name!r} is {x.dtype} {tuple(x.shape)} in {which}, "
                f"and {first[name].dtype} {tuple(first[name].shape)} in the first"
            )
