"""What updates cost: tokens a second and peak memory, written beside the loss. Times of validation and saving are left out."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.data.batch import Batch

SPEED, PEAK_MEMORY = "tokens_per_second", "peak_memory"


class UpdateSpeed:
    """Count the real tokens that updates read, and the time they take: sources, and targets where a decoder reads them."""

    def __init__(self, model: nn.Module, device: torch.device, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.decodes = any(isinstance(module, Stack) and module.reads for module in model.modules())
        self.device, self.clock = device, clock
        self.restart()

    def restart(self) -> None:
        """Begin anew: what has been counted so far is left out."""
        self.tokens, self.begun = 0, self.clock()

    def counted(self, batches: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
        """Pass on the batches of every update, counting their tokens on the host."""
        for passes in batches:
            self.tokens += sum(tokens_read(batch, self.decodes) for batch in passes)
            yield passes

    def measured(self) -> dict[str, float]:
        """Return tokens a second since `restart`, if there were updates, and the most bytes so far; the device must be idle."""
        seconds = self.clock() - self.begun
        found = {SPEED: round(self.tokens / seconds, 1)} if self.tokens and seconds > 0 else {}
        memory = peak_memory(self.device)
        return found if memory is None else {**found, PEAK_MEMORY: memory}


def tokens_read(batch: Batch, decodes: bool) -> int:
    """Count the real tokens of the source (b n), or its images, and of the target (b m) if a decoder reads it."""
    count = _real_tokens(batch.source, batch.source_valid)
    if decodes and batch.target is not None:
        count += _real_tokens(batch.target, batch.target_valid)
    return count


def _real_tokens(x: Tensor, valid: Tensor | None) -> int:
    if valid is not None:
        return int(valid.sum())
    if x.ndim > 3 or x.dtype == torch.uint8:  # images (b c h w), in gray (b h w): each counts once, as in batch_tokens
        return len(x)
    return x.shape[:2].numel()


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes so far: on CUDA those of tensors, on a CPU those of the process, libraries and data included.

    None where the system does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run_cost(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the measurements of a run: the median of its tokens a second, and the most memory of any of its processes."""
    speeds = [line[SPEED] for line in lines if line.get(SPEED)]
    memory = [line[PEAK_MEMORY] for line in lines if line.get(PEAK_MEMORY)]
    return {SPEED: statistics.median(speeds) if speeds else None, PEAK_MEMORY: max(memory, default=None)}
