"""The loop of updates: its device, its precision, and where it stops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from regard.data.batch import Batch
from regard.text import unknown
from regard.training.atomic_files import RunError
from regard.training.learner import Learner


def run_updates(
    learner: Learner, batches: Iterable[list[Batch]], *, after: Callable[[int], None], stopped: Callable[[], bool]
) -> None:
    """Make an update of every list of batches, each followed by `after(step)`, until they end or `stopped()` is true."""
    if stopped():
        return
    for passes in batches:
        with torch.enable_grad():
            learner.update(passes)
        after(learner.step)
        if stopped():
            return


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """With tf32, matrix products of a GPU round their factors to 10 bits; afterwards all is as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def device_of(accelerator: str) -> str:
    """Choose "cpu" or "cuda": as given, or for "auto" the one that is there."""
    if accelerator not in ("auto", "cpu", "cuda"):
        raise ValueError(unknown("there is no accelerator", accelerator, ["auto", "cpu", "cuda"]))
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise RunError("there is no CUDA device here: use accelerator='cpu', or 'auto' to take what there is")
    return ("cuda" if torch.cuda.is_available() else "cpu") if accelerator == "auto" else accelerator
