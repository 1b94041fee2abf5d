"""Whole models by torch.compile, measured by several processes on one GPU: each compiles its own, the clock is for one at a time.

A first pass of another process, a few milliseconds after its compilation, can fall into a measurement: times are medians.
"""

from __future__ import annotations

import time
from contextlib import suppress
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import torch

from regard.bench.machine import made_with, write_record
from regard.bench.speed import Measured
from regard.bench.whole_models import ModelJob, ModelRequest, model_jobs, model_row

_shared: dict[str, Any] = {}  # of a process: the lock of the clock


def measure_compiled(requests: list[ModelRequest], processes: int, limit: float, path: Path) -> None:
    """Measure the models of all requests within so many seconds, and write their rows after each."""
    end = time.monotonic() + limit
    jobs = [(request, job) for request in requests for job in model_jobs(request)]
    settings = requests[0].to_json() | {"parts": [request.to_json() for request in requests], "processes": processes}
    record: dict[str, Any] = {"benchmark": "bench_compiled", "settings": settings, "made_with": made_with(), "rows": []}
    context = get_context("spawn")
    with context.Pool(processes, _begin, (context.Lock(),)) as pool, suppress(TimeoutError):
        rows = pool.imap_unordered(_measured, jobs)
        for done in range(1, len(jobs) + 1):
            record["rows"].append(rows.next(max(end - time.monotonic(), 0.0)))
            write_record(path, record)
            print(f"{done} of {len(jobs)}, {end - time.monotonic():.0f} s are left: {_line(record['rows'][-1])}", flush=True)
    print(f"compiled: {len(record['rows'])} of {len(jobs)} models in {path}", flush=True)


def _begin(clock: Any) -> None:
    torch.set_num_threads(1)
    _shared["clock"] = clock


def _measured(work: tuple[ModelRequest, ModelJob]) -> Measured:
    return model_row(*work, turn=_shared["clock"])


def _line(row: Measured) -> str:
    found = f"{row['ms']:.1f} ms, compiled in {row['first_seconds']:.0f} s" if "ms" in row else row["reason"]
    return f"{row['spec']}, {row['model']}, n = {row['n']:,}: {found}"
