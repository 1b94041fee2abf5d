"""Prefetch batches of coming updates in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from regard.data.batch import Batch
from regard.data.length_buckets import Batches
from regard.training import rng
from regard.training.learnable import Learnable

PREFETCHED = 4  # updates whose batches are prepared in advance


@contextmanager
def prefetch_batches(task: Learnable, done: int, kind: str) -> Iterator[Iterator[list[Batch]]]:
    """Iterate over the batches of all coming updates, prepared by a thread while the device computes.

    They are a function of the update alone. `task.batch` must not draw from the global random generators, which the model uses.
    """
    config, train = task.config, task.splits["train"]
    order = Batches([task.size(example) for example in train], config.batch_tokens, config.seed, True)

    def make(update: int) -> list[Batch]:
        first = update * config.accumulate
        rows = [order.at(number) for number in range(first, first + config.accumulate)]
        made = [task.batch([train[place] for place in row]) for row in rows]
        return [batch.pin_memory() for batch in made] if kind == "cuda" else made

    before = rng.rng_state()
    make(done)
    if rng.rng_state() != before:
        raise ValueError(f"{type(task).__name__}.batch draws random numbers, which no resumed run can repeat: draw them in loss")
    pool = ThreadPoolExecutor(1, "batches")
    try:
        yield _ahead(pool, make, done, config.steps)
    finally:
        pool.shutdown(cancel_futures=True)


def _ahead(pool: ThreadPoolExecutor, make: Callable[[int], list[Batch]], first: int, end: int) -> Iterator[list[Batch]]:
    waiting: deque[Future[list[Batch]]] = deque()
    for update in range(first, end):
        waiting.append(pool.submit(make, update))
        if len(waiting) >= PREFETCHED:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
