"""Compile the candidates of `regard tune` ahead, by several processes: kernels stay in Triton's cache on disk.

A process runs every candidate on short sequences. A kernel that does not compile is no error here: the measurement reports it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from multiprocessing import TimeoutError, get_context
from typing import NamedTuple

from regard.bench.tune_candidates import Changes
from regard.bench.tune_workloads import TUNE_CASES, TuneCase, TunePass, TuneShape
from regard.ops.triton_support import trial_configs
from regard.ops.tuned_table import KernelConfig

SHORT = 256  # tokens of a sequence: kernels are compiled for any number
MOST_PROCESSES = 12


class CompileJob(NamedTuple):
    """One candidate of a kernel."""

    case: int  # index in TUNE_CASES
    shape: TuneShape
    kernel: str
    changes: Changes


def compile_jobs(case: TuneCase, shape: TuneShape, kernel: str) -> list[CompileJob]:
    """List the candidates of one kernel, on short sequences."""
    short = replace(shape, length=SHORT, tokens=2 * SHORT)
    return [CompileJob(TUNE_CASES.index(case), short, kernel, changes) for changes in case.candidates[kernel]]


def default_processes() -> int:
    """Return a number of processes that leaves one CPU free."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1))


def compile_ahead(jobs: Sequence[CompileJob], processes: int, report: Callable[[int, int, str], None], seconds: float) -> None:
    """Compile candidates by several processes, for at most so many seconds."""
    end = time.monotonic() + seconds
    with get_context("spawn").Pool(processes) as pool, suppress(TimeoutError):
        found = pool.imap_unordered(compile_candidate, jobs)
        for done in range(len(jobs)):
            report(done, len(jobs), "compiling")
            found.next(max(end - time.monotonic(), 0.0))
    report(len(jobs), len(jobs), "compiling")


def compile_candidate(job: CompileJob) -> None:
    """Run the passes of a case with one candidate."""
    with suppress(Exception):
        passes, used = run_short(job.case, job.shape)
        own = {entry: {**config, **job.changes} for entry, config in used.items() if entry[0] == job.kernel}
        with trial_configs(own):
            _run_passes(passes)


@lru_cache(maxsize=1)
def run_short(case: int, shape: TuneShape) -> tuple[list[TunePass], dict[tuple[str, str], KernelConfig]]:
    """Return the passes of a case, and the configurations in use."""
    with trial_configs({}) as trial:
        passes = TUNE_CASES[case].make(shape)
        _run_passes(passes)
    return passes, trial.used


def _run_passes(passes: Sequence[TunePass]) -> None:
    for each in passes:
        each.forward()
        if each.both is not None:
            each.both()
