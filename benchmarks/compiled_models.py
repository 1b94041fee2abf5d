"""Whole models by torch.compile, measured by several processes on one GPU: each compiles its own, the clock is for one at a time.

A model is compiled once, block by block and with dynamic shapes, and used at all lengths, unless its weights depend on the
length. The process with the clock stops the others meanwhile, and those of the process groups that are named to it: passes that
a compiler tries would fall into its times. What these had launched before is waited for. Long sequences that do not fit beside
what the other processes hold, a million tokens say, are measured when all others are done, and those that do not fit even then at
the end, by one process alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from regard.bench.machine import made_with
from regard.bench.speed import FAILURES, Measured, failure_text
from regard.bench.timing import seconds
from regard.bench.whole_models import (
    SLOW_PASS,
    JobKey,
    ModelJob,
    ModelRequest,
    built_model,
    empty_row,
    forget,
    gradient_pass,
    job_key,
    loss_pass,
    model_jobs,
    timed_pass,
)
from regard.blocks import compile_blocks

LAST_TURN = 60.0  # seconds of a measurement that is under way at the end, at most
LARGE_PASS = 2**17  # tokens from which one process at a time makes passes, compiled or not: memory is short
LAST_LENGTHS = 2**19  # tokens from which a length is measured when the others are done: it needs most of the memory
QUIET_READINGS, QUIET_SHARE, QUIET_LIMIT = 5, 1.1, 3.0  # of a probe: readings in a row, beside their fastest, seconds at most
ONE_LENGTH = ("sinkhorn",)  # compiled for each length: inductor does not split the loops of a decoder over unknown blocks, and
# an encoder has other kernels from 64k on, which take minutes to compile
COMPILED_AT = 4096  # tokens of one sequence: where a model is measured at long ones alone, 13 compilers take no memory from it
OUT_OF_MEMORY = failure_text(torch.OutOfMemoryError())
DYNAMIC, BLOCKS = "dynamic", "blocks"  # of a row: whether its model was compiled for all lengths, and block by block
_shared: dict[str, Any] = {}  # of a process: locks, the numbers of all processes, groups to stop


@dataclass(frozen=True)
class Series:
    """Hold the lengths that one compiled model is measured at."""

    request: ModelRequest
    job: ModelJob  # of the longest one
    lengths: tuple[int, ...]
    dynamic: bool  # compiled for all lengths
    compiled_at: int | None = None  # a length that is not measured, where a model for long ones alone is compiled

    def row(self, n: int) -> Measured:
        """Return the row of a length with nothing measured."""
        return empty_row(self.request, replace(self.job, n=n)) | {DYNAMIC: self.dynamic, BLOCKS: True}

    @property
    def jobs(self) -> list[ModelJob]:
        """Return a job for each length."""
        return [replace(self.job, n=n) for n in self.lengths]


class Clock(NamedTuple):
    """Hold what processes share: locks of the clock and of large passes, process numbers, and rows with the place of a series."""

    lock: Any
    large: Any
    numbers: Any
    found: Any  # (place, row), and (place, None) behind the last row of a series


def measure_compiled(
    requests: list[ModelRequest],
    processes: int,
    limit: float,
    save: Callable[[dict[str, Any]], None],
    known: Sequence[Measured] = (),
    eager: Sequence[Measured] = (),
    beside: Sequence[int] = (),
) -> None:
    """Measure the models of all requests within so many seconds, except those of known rows, and save all rows after each.

    Known rows are those of models that were compiled block by block. `eager` has rows of the same models that were
    not compiled: what was left out there, or ran out of memory, is left out here.
    `beside` has process groups that do other work, and stand still while a model is measured.
    """
    end = time.monotonic() + limit
    reasons = {job_key(row): row["reason"] for row in eager if "reason" in row}
    there = {job_key(row) for row in known if BLOCKS in row}
    record: dict[str, Any] = {"benchmark": "bench_compiled", "settings": _settings(requests, processes), "rows": []}
    record["made_with"] = made_with()
    rounds: list[list[Series]] = [[], [], []]
    for series in (x for request in requests for x in all_series(request)):
        jobs = [job for job in series.jobs if job.key not in there]
        left_out = {job.n: reasons[_eager_key(job)] for job in jobs if _eager_key(job) in reasons}
        record["rows"] += [series.row(job.n) | {"reason": left_out[job.n]} for job in jobs if job.n in left_out]
        lengths = [job.n for job in jobs if job.n not in left_out]
        for part in ([n for n in lengths if n < LAST_LENGTHS], [n for n in lengths if n >= LAST_LENGTHS]):
            if part:
                own = of_lengths(series, tuple(part))
                rounds[comes_late(own)].append(own)
    rounds[1].sort(key=lambda series: not series.dynamic)
    for work, count in zip(rounds, (processes, processes, 1), strict=True):
        for done, (series, row) in enumerate(measured_by(count, work, beside, end), 1):
            key = replace(series.job, n=row["n"]).key
            record["rows"] = [*(kept for kept in record["rows"] if job_key(kept) != key), row]
            save(record)
            print(f"{done}, {end - time.monotonic():.0f} s are left: {_line(row)}", flush=True)
            if has_no_room(row) and work is not rounds[-1]:
                rounds[-1].append(of_lengths(series, (row["n"],)))
    print(f"compiled: {len(record['rows'])} models and lengths", flush=True)


def measured_by(processes: int, work: list[Series], beside: Sequence[int], end: float) -> Iterator[tuple[Series, Measured]]:
    """Iterate over the rows that so many processes measure, each as soon as it is there, until the end."""
    if not work:
        return
    context = get_context("spawn")
    clock = Clock(context.Lock(), context.Lock(), context.Array("i", processes), context.SimpleQueue())
    with context.Pool(processes, _begin, (clock, tuple(beside))) as pool:
        pool.map_async(_measured, enumerate(work), chunksize=1)
        waiting = len(work)
        while waiting and time.monotonic() < end:
            if clock.found.empty():
                time.sleep(0.05)
                continue
            place, row = clock.found.get()
            if row is None:
                waiting -= 1
            else:
                yield work[place], row
        if waiting:
            clock.lock.acquire(timeout=LAST_TURN)  # a process that stands still could not be ended


def comes_late(series: Series) -> bool:
    """Return whether a series needs most of the memory, or would compile a large pass while others wait for their turn."""
    return series.lengths[0] >= (LAST_LENGTHS if series.dynamic else LARGE_PASS)


def has_no_room(row: Measured) -> bool:
    """Return whether a long sequence did not fit on the card, which one process alone may have room for."""
    return row.get("reason") == OUT_OF_MEMORY and row["n"] >= LARGE_PASS


def _settings(requests: list[ModelRequest], processes: int) -> dict[str, Any]:
    parts = [request.to_json() for request in requests]
    return requests[0].to_json() | {"parts": parts, "processes": processes, "dynamic": True, "blocks": True}


def _eager_key(job: ModelJob) -> JobKey:
    return replace(job, compiled=False).key


def all_series(request: ModelRequest) -> list[Series]:
    """List the models of a request, each with all of its lengths; those whose weights depend on the length once for each."""
    found: dict[tuple[Any, str], list[ModelJob]] = {}
    for job in model_jobs(request):
        found.setdefault((job.spec, job.kind), []).append(job)
    series = []
    for jobs in found.values():
        lengths = tuple(sorted(job.n for job in jobs))
        if weights_have_lengths(request, jobs[0]) or str(jobs[0].spec) in ONE_LENGTH:
            series += [Series(request, job, (job.n,), dynamic=False) for job in sorted(jobs, key=lambda job: job.n)]
        else:
            series.append(Series(request, replace(jobs[0], n=lengths[-1]), lengths, dynamic=True))
    return series


def of_lengths(series: Series, lengths: tuple[int, ...]) -> Series:
    """Keep some lengths of a series. Long ones alone are compiled at a short one: compilers need no turn for large passes."""
    at = COMPILED_AT if series.dynamic and lengths[0] >= LARGE_PASS else None
    return replace(series, lengths=lengths, compiled_at=at, job=replace(series.job, n=lengths[-1]))


def weights_have_lengths(request: ModelRequest, job: ModelJob) -> bool:
    """Return whether a model for longer sequences has weights of other shapes."""
    small = replace(request, device="meta", depth=1)
    models = [built_model(small, replace(job, n=n)) for n in (job.n, 2 * job.n)]
    shapes = [[x.shape for x in model.state_dict().values()] for model in models]
    return shapes[0] != shapes[1]


def series_rows(series: Series, turn: Callable[[], Any], large_turn: Any) -> Iterator[Measured]:
    """Compile one model and measure it at all lengths, short ones first; behind a slow one the others are left out."""
    request, job = series.request, series.job
    device = torch.device(request.device)
    try:
        model = built_model(request, job)
        compile_blocks(model, dynamic=series.dynamic or None)

        def pass_of(batch: int, n: int) -> Callable[[], None]:
            return gradient_pass(model, loss_pass(request, job.kind, model, (batch, n)))

        passes = {n: pass_of(max(1, request.tokens // n), n) for n in series.lengths}
        if series.compiled_at is not None:
            pass_of(1, series.compiled_at)()
            _free(device)
    except FAILURES as error:
        yield from (series.row(n) | {"reason": failure_text(error)} for n in series.lengths)
        return
    slow: Measured | None = None
    small = [n for n in series.lengths if n < LARGE_PASS]
    for part, room in ((small, nullcontext()), *(([n], large_turn) for n in series.lengths if n >= LARGE_PASS)):
        if slow is not None:
            reason = f"left out: {slow['ms'] / 1e3:.1f} s a pass at n = {slow['n']:,}"
            yield from (series.row(n) | {"reason": reason} for n in part)
            continue
        with room:
            rows = _part_rows(series, {n: passes[n] for n in part}, device, turn)
        again = [n for n in small if rows.get(n, {}).get("reason") == OUT_OF_MEMORY]
        if again:  # beside a large pass of another process: once more without one
            with large_turn:
                rows |= _part_rows(series, {n: passes[n] for n in again}, device, turn)
        slow = next((row for row in rows.values() if row.get("ms", 0) > 1e3 * SLOW_PASS), None)
        yield from rows.values()


def _part_rows(
    series: Series, passes: dict[int, Callable[[], None]], device: torch.device, turn: Callable[[], Any]
) -> dict[int, Measured]:
    """Make the first pass at each length, which compiles, and then measure all of them with the clock; a row for each length."""
    rows = {n: series.row(n) for n in passes}
    for n, step in passes.items():
        try:
            rows[n]["first_seconds"] = seconds(step, device)
        except FAILURES as error:
            rows[n]["reason"] = failure_text(error)
        _free(device)
    with turn():
        for n, step in passes.items():
            if "reason" in rows[n]:
                continue
            try:
                step()
                rows[n] |= timed_pass(step, device, series.request.seconds, rows[n]["batch"] * n)
            except FAILURES as error:
                rows[n]["reason"] = failure_text(error)
            _free(device)
    return rows


def _free(device: torch.device) -> None:
    """Give memory that is not in use back to the card, for the other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _begin(clock: Clock, beside: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    with clock.lock:
        clock.numbers[list(clock.numbers).index(0)] = os.getpid()
    _shared.update(clock=clock, beside=beside)


def _measured(placed: tuple[int, Series]) -> None:
    place, series = placed
    clock: Clock = _shared["clock"]
    probe = gpu_probe() if series.request.device == "cuda" else None

    @contextmanager
    def turn() -> Iterator[None]:
        with alone(clock.lock, clock.numbers, _shared["beside"]):
            if probe is not None:
                wait_until_quiet(probe)
            yield

    try:
        for row in series_rows(series, turn, clock.large):
            clock.found.put((place, row))
    finally:
        clock.found.put((place, None))
        forget(series.request.device, compiled=True)


@contextmanager
def alone(clock: Any, numbers: Any, beside: Sequence[int] = ()) -> Iterator[None]:
    """Hold the clock while all other processes stand still, and the process groups `beside` them."""
    with clock:
        others = [number for number in numbers if number not in (0, os.getpid())]
        try:
            _signal(others, beside, signal.SIGSTOP)
            yield
        finally:
            _signal(others, beside, signal.SIGCONT)


def _signal(numbers: Sequence[int], groups: Sequence[int], what: signal.Signals) -> None:
    for send, targets in ((os.kill, numbers), (os.killpg, groups)):
        for target in targets:
            with suppress(ProcessLookupError):  # it has ended
                send(target, what)


def gpu_probe() -> Callable[[], float]:
    """Return a clock of a short piece of work, which takes longer while other processes use the GPU."""
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(6):
            torch.mm(x, x)

    return lambda: seconds(work, device)


def wait_until_quiet(probe: Callable[[], float]) -> None:
    """Wait until readings of a probe agree: what stopped processes had launched is done.

    They are not compared with earlier turns, because a card that is warm is slower for good.
    """
    readings: list[float] = []
    end = time.monotonic() + QUIET_LIMIT
    while time.monotonic() < end:
        readings = [*readings, probe()][-QUIET_READINGS:]
        if len(readings) == QUIET_READINGS and max(readings) <= QUIET_SHARE * min(readings):
            return


def _line(row: Measured) -> str:
    found = f"{row['ms']:.1f} ms, first pass {row['first_seconds']:.0f} s" if "ms" in row else row["reason"]
    return f"{row['spec']}, {row['model']}, n = {row['n']:,}: {found}"
