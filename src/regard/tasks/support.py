"""What tasks do alike: batches of an inference pass, the device of a model, lines that are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from regard.text import unknown
from regard.training.feeding import resting

__all__ = ["check_lengths", "choice_of", "device_of", "in_order", "resting"]

T = TypeVar("T")
R = TypeVar("R")


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def in_order(examples: Sequence[T], size: Callable[[T], int], most: int, answer: Callable[[list[T]], Sequence[R]]) -> list[R]:
    """An answer for every example, in their order, computed in batches of similar size, of at most `most` tokens with padding."""
    order = sorted(range(len(examples)), key=lambda i: -size(examples[i]))
    found: list[R | None] = [None] * len(examples)
    while order:
        many = max(1, most // max(1, size(examples[order[0]])))
        now, order = order[:many], order[many:]
        for i, value in zip(now, answer([examples[i] for i in now]), strict=True):
            found[i] = value
    return cast(list[R], found)  # every one of them is there now


def check_lengths(rows: Sequence[Sequence[int]], most: int) -> None:
    for number, row in enumerate(rows, 1):
        if len(row) > most:
            raise ValueError(
                f"line {number} has {len(row):,} tokens, but this model reads at most {most:,}: cut it, or train it longer"
            )


def choice_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """The value, if it is one of those allowed."""
    if value not in allowed:
        raise ValueError(unknown(f"{name} cannot be", value, allowed))
    return value
