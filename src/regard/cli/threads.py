"""Number of CPU threads of a command: few for small models, whose threads would wait for each other on a busy machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.task_times import kept_time
from regard.config import Config

WORTH_THREADS = 2**26  # multiplications of a layer in one pass for which a further thread pays
CHOSEN_OUTSIDE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
MAX_THREADS = 1024

Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Of the CPU; else OMP_NUM_THREADS, or as many as the model is worth.")
]


def choose_threads(config: Config, given: int | None, kind: str, run: Path | None = None) -> tuple[int, str]:
    """Choose the number of threads, with a sentence about it where it was chosen here.

    A given number comes first, then OMP_NUM_THREADS or MKL_NUM_THREADS, then the number that the run in the folder `run` has
    been trained with, so that it goes on bit for bit, then the fastest that `regard tasks --time` has measured for the task, and
    then one thread for each WORTH_THREADS multiplications.
    """
    import torch

    there = torch.get_num_threads()
    if given is not None:
        if not 1 <= given <= MAX_THREADS:
            raise ValueError(f"threads must be from 1 to {MAX_THREADS}, not {given}")
        return given, ""
    if kind != "cpu" or any(os.environ.get(name) for name in CHOSEN_OUTSIDE):
        return there, ""
    if run is not None and (before := _recorded(run)) is not None:
        return before, "" if before == there else f"on {_threads_text(before)}, as before"
    measured = kept_time(config)
    if measured is not None and measured.device == "cpu" and there in measured.seconds:
        how = f"on {_threads_text(measured.threads)} of {there}, the fastest as measured by `regard tasks --time`"
        return measured.threads, how
    found = min(there, max(1, config.batch_tokens * config.width * config.ffn // WORTH_THREADS))
    return (
        found,
        "" if found == there else f"on {_threads_text(found)} of {there}, as the model is small: --threads {there} uses all",
    )


@contextmanager
def used(count: int) -> Iterator[None]:
    """Use so many threads inside, and as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _recorded(run: Path) -> int | None:
    """Read the number of threads from run.json, if a run has begun there on a CPU."""
    from regard.training import atomic_files, checkpoints

    if not (run / checkpoints.ABOUT).is_file():
        return None
    about = atomic_files.read_json(run / checkpoints.ABOUT, "restore it, or delete the folder and train again")
    count = about.get("threads")
    sound = type(count) is int and 1 <= count <= MAX_THREADS and about.get("device") == "cpu"
    return count if sound else None


def _threads_text(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"
