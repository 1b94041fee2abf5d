"""Time of an update by the number of threads, measured on the first batches of a task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import torch

from regard.data.batch import Batch
from regard.training import rng
from regard.training.learnable import Learnable
from regard.training.learner import Learner
from regard.training.loop import matmul_precision
from regard.training.prefetch import prefetch_batches

MEASURED_BATCHES = 5  # updates that are measured for every number of threads, twice; fewer where they take long
ROUND_SECONDS = 4.0  # of a round over the batches, about


def thread_counts(most: int) -> list[int]:
    """List the numbers of threads that are worth a try: 1, 2, 4 ... and `most`."""
    return sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})


def update_seconds(task: Learnable, kind: str, threads: Sequence[int]) -> dict[int, float]:
    """Measure the mean seconds of an update with each number of threads, on the same batches; the faster of two rounds counts.

    Data must have been read. One update comes first that is not measured. The number of threads is afterwards as it was.
    """
    before = torch.get_num_threads()
    rng.seed_all(task.config.seed)
    learner = Learner(task.model(), task.loss, task.config, kind)
    learner.begin()
    with prefetch_batches(task, 0, kind) as coming:
        batches = list(islice(coming, 1 + MEASURED_BATCHES))
    try:
        with matmul_precision(task.config.precision):
            first = _timed(learner, batches[:1])
            batches = batches[1:][: max(1, int(ROUND_SECONDS / first))] or batches
            return {count: min(_with_threads(learner, batches, count) for _ in range(2)) / len(batches) for count in threads}
    finally:
        torch.set_num_threads(before)


def _with_threads(learner: Learner, batches: Sequence[list[Batch]], count: int) -> float:
    torch.set_num_threads(count)
    return _timed(learner, batches)


def _timed(learner: Learner, batches: Sequence[list[Batch]]) -> float:
    began = time.perf_counter()
    for passes in batches:
        with torch.enable_grad():
            learner.update(passes)
    if learner.kind == "cuda":
        torch.cuda.synchronize()
    learner.pending.clear()
    return time.perf_counter() - began
