"""What training needs of a task. `regard.tasks.task.Task` has all of it, and so has any class with these methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from regard.data.batch import Batch
from regard.training.losses import Loss

Step = int | Tensor  # the number of an update, from 1; in captured passes (`config.graphs`) a tensor on the device


class Learnable(Protocol):
    """Data, a model, a loss and scores: see `regard.tasks.task.Task` for what each method does."""

    config: Any  # a Config
    splits: Mapping[str, Sequence[Any]]  # "train" and "val"

    @property
    def best(self) -> tuple[str, str]: ...

    @property
    def steady(self) -> bool: ...

    def assets(self) -> dict[str, str]: ...

    def size(self, example: Any, /) -> int: ...

    def batch(self, examples: Sequence[Any], /) -> Batch: ...

    def model(self) -> nn.Module: ...

    def loss(self, model: nn.Module, batch: Batch, step: Step, /) -> Loss: ...

    def watch(self, model: nn.Module, /) -> dict[str, float]: ...
