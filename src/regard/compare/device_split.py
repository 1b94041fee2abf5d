"""One split of a task on the device of training: batches are gathered there by index, in constant shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.arena.arena_task import IGNORED, ArenaTask, Examples, ExamplesPart

FEW_SCORED = 0.5  # scores are computed at the scored positions alone where these are at most this share


class TaskBatch(NamedTuple):
    """Hold tokens (b n) or (b 2 n), targets (b), (b n) or (b k), which tokens are real, and positions (b k) of the targets."""

    tokens: Tensor
    targets: Tensor
    valid: Tensor | None
    at: Tensor | None


class DeviceSplit(NamedTuple):
    """Hold one split on a device, in the small types of the host."""

    tokens: Tensor
    targets: Tensor
    lengths: Tensor | None
    at: Tensor | None  # (examples, k): positions that have targets; None: all of them, or one target an example

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def rows(self, index: Tensor, length: int | None = None) -> TaskBatch:
        """Gather examples by a tensor of their numbers, without a synchronisation; their first `length` tokens."""
        tokens = self.tokens[..., :length].index_select(0, index).long()
        targets = self.targets.index_select(0, index).long()
        valid = None
        if self.lengths is not None:
            places = torch.arange(tokens.shape[-1], device=tokens.device)
            valid = places < self.lengths.index_select(0, index)[..., None]
        at = None if self.at is None else self.at.index_select(0, index).long()
        return TaskBatch(tokens, targets, valid, at)


def load_split(task: ArenaTask, part: ExamplesPart, device: torch.device) -> tuple[DeviceSplit, Examples]:
    """Return a split on the device, and as the task made it."""
    made = task.examples(part)
    _check_examples(task, part, made)
    targets, at = made.targets, None
    if targets.dim() == 2 and not changes_batches(task):
        targets, at = _scored(targets)
    lengths = None if made.lengths is None else made.lengths.to(device)
    split = DeviceSplit(made.tokens.to(device), targets.to(device), lengths, None if at is None else at.to(device))
    return split, made


def changes_batches(task: ArenaTask) -> bool:
    """Return whether a task augments its training examples."""
    return type(task).augment is not ArenaTask.augment


def _scored(targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keep the targets that are scored, as many columns as the fullest example has, and their positions; all if they are many."""
    real = targets != IGNORED
    most = max(1, int(real.sum(1).max()))
    if most > FEW_SCORED * targets.shape[1]:
        return targets, None
    at = real.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :most]
    return targets.gather(1, at), at.to(torch.int32)


def _check_examples(task: ArenaTask, part: str, made: Examples) -> None:
    """Refuse tensors that do not have the shapes and values that the task declares."""
    tokens, targets = made.tokens, made.targets
    width = min(tokens.shape[-1], task.length)
    shape = (len(tokens), 2, width) if task.form == "pair" else (len(tokens), width)
    if tuple(tokens.shape) != shape or not tokens.numel():
        raise ValueError(f"{part} tokens of {task.name} must have shape {shape}, not {tuple(tokens.shape)}")
    wanted = shape[:1] if task.form in ("label", "pair") else shape
    if tuple(targets.shape) != wanted:
        raise ValueError(f"{part} targets of {task.name} must have shape {wanted}, not {tuple(targets.shape)}")
    classes = task.vocab if task.form == "next" else task.classes
    for name, x, most in (("tokens", tokens, task.vocab), ("targets", targets[targets != IGNORED], classes)):
        if x.numel() and (int(x.min()) < 0 or int(x.max()) >= most):
            raise ValueError(f"{part} {name} of {task.name} must be from 0 to {most - 1}, not {int(x.min())} to {int(x.max())}")
