"""Whole models by torch.compile, measured by several processes on one GPU: each compiles its own, the clock is for one at a time.

The one with the clock stops the others meanwhile: passes that a compiler tries would fall into its times.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import TimeoutError, get_context
from typing import Any

import torch

from regard.bench.machine import made_with
from regard.bench.speed import Measured
from regard.bench.whole_models import ModelJob, ModelRequest, job_key, model_jobs, model_row

LAST_TURN = 30.0  # seconds of a measurement that is under way at the end, at most
DRAINED = 0.05  # seconds after which nothing is left of what stopped processes had launched
_shared: dict[str, Any] = {}  # of a process: the lock of the clock, and the numbers of all processes


def measure_compiled(
    requests: list[ModelRequest],
    processes: int,
    limit: float,
    save: Callable[[dict[str, Any]], None],
    known: Sequence[Measured] = (),
) -> None:
    """Measure the models of all requests within so many seconds, except those of known rows, and save all rows after each."""
    end = time.monotonic() + limit
    there = {job_key(row) for row in known}
    wanted = [(request, job) for request in requests for job in model_jobs(request)]
    jobs = [(request, job) for request, job in wanted if job.key not in there]
    settings = requests[0].to_json() | {"parts": [request.to_json() for request in requests], "processes": processes}
    record: dict[str, Any] = {"benchmark": "bench_compiled", "settings": settings, "made_with": made_with(), "rows": []}
    context = get_context("spawn")
    clock, numbers = context.Lock(), context.Array("i", processes)
    with context.Pool(processes, _begin, (clock, numbers)) as pool:
        rows = pool.imap_unordered(_measured, jobs)
        with suppress(TimeoutError):
            for done in range(1, len(jobs) + 1):
                record["rows"].append(rows.next(max(end - time.monotonic(), 0.0)))
                save(record)
                print(f"{done} of {len(jobs)}, {end - time.monotonic():.0f} s are left: {_line(record['rows'][-1])}", flush=True)
        clock.acquire(timeout=LAST_TURN)  # a process that stands still could not be ended
    print(f"compiled: {len(record['rows'])} of {len(jobs)} models", flush=True)


def _begin(clock: Any, numbers: Any) -> None:
    torch.set_num_threads(1)
    with clock:
        numbers[list(numbers).index(0)] = os.getpid()
    _shared.update(clock=clock, numbers=numbers)


def _measured(work: tuple[ModelRequest, ModelJob]) -> Measured:
    return model_row(*work, turn=alone(_shared["clock"], _shared["numbers"]))


@contextmanager
def alone(clock: Any, numbers: Any) -> Iterator[None]:
    """Hold the clock while all other processes stand still."""
    with clock:
        others = [number for number in numbers if number not in (0, os.getpid())]
        try:
            _signal(others, signal.SIGSTOP)
            time.sleep(DRAINED)
            yield
        finally:
            _signal(others, signal.SIGCONT)


def _signal(numbers: list[int], what: signal.Signals) -> None:
    for number in numbers:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(number, what)


def _line(row: Measured) -> str:
    found = f"{row['ms']:.1f} ms, compiled in {row['first_seconds']:.0f} s" if "ms" in row else row["reason"]
    return f"{row['spec']}, {row['model']}, n = {row['n']:,}: {found}"
