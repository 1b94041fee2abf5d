"""The jobs of a cell, run in one process: train it, test its best weights, measure its costs. Errors are in its record."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from regard.arena.arena_task import ArenaTask, Examples, ExamplesPart
from regard.arena.read_task import folder_sizes
from regard.arena.split_cache import cached_floors
from regard.bench.machine import made_with
from regard.compare.cell_costs import CELL_DTYPES, cell_costs, costs_by_length
from regard.compare.cell_record import CellRecord
from regard.compare.cell_store import CellStore
from regard.compare.cell_training import EVALUATED, CellBudget, CellTraining, Diverged
from regard.compare.compared_model import ComparedModel, build_model, check_outputs
from regard.compare.device_split import DeviceSplit, load_split
from regard.compare.grid_plan import Cell
from regard.compare.own_code import read_task
from regard.compare.split_score import arena_score, target_points
from regard.compare.training_step import TrainingStep
from regard.compare.warm_steps import WarmSteps
from regard.data.text_files import DataError
from regard.own_mechanism import split_own
from regard.training.atomic_files import RunError
from regard.training.loop import matmul_precision

JobKind = Literal["train", "train and test", "test", "costs"]
ReportShare = Callable[[float], None]
JobParts = Generator[None, None, CellRecord]
_GRAPHS = {"cuda": "a step is one CUDA graph", "cpu": "none on a CPU"}
_WARM = WarmSteps()  # of this process
COSTS_CRASHED = "costs"  # the note of costs whose measurement crashed
NO_MEMORY = "there was too little memory: use fewer --jobs, or a smaller batch"


class CellJob(NamedTuple):
    """Hold one piece of work on a cell. `record` is that of an earlier job of the same cell."""

    kind: JobKind
    cell: Cell
    folder: str
    record: CellRecord | None = None
    alone: bool = False  # with no other cell in its process: another one had died beside it


class BrokenCard(RuntimeError):
    """Report an error of a GPU behind which nothing in this process can use it."""


class CannotStore(RuntimeError):
    """Report a folder that cannot be written: nothing can go on."""


def run_job(job: CellJob, report: ReportShare | None = None) -> CellRecord:
    """Return the record of a cell behind a job. Only CannotStore is raised: any other error is in the record."""
    run, record = JobRun(job, report), None
    try:
        while record is None:
            record = run.advance()
    except BrokenCard as error:
        return crashed_record(job, str(error))
    return record


class JobRun:
    """Run a job in parts, so that several cells can share a GPU: while one waits, others have started their steps."""

    def __init__(self, job: CellJob, report: ReportShare | None = None) -> None:
        self.job = job
        self.parts = _JOBS[job.kind](job, report)
        self.warned: dict[str, None] = {}  # texts, each once

    def advance(self) -> CellRecord | None:
        """Run the next part; returns the record behind the last one, with all warnings. Raises CannotStore or BrokenCard."""
        with warnings.catch_warnings(record=True) as caught, matmul_precision(self.job.cell.grid.dtype):
            record = self._advance()
        self.warned |= dict.fromkeys(str(warning.message) for warning in caught)
        if record is not None and self.warned:
            record.settings["warnings"] = list(dict.fromkeys([*record.settings.get("warnings", []), *self.warned]))
        return record

    def _advance(self) -> CellRecord | None:
        try:
            next(self.parts)
        except StopIteration as end:
            return end.value
        except CannotStore:
            raise
        except Exception as error:
            if "CUDA error" in str(error):
                raise BrokenCard(str(error).splitlines()[0]) from error
            return _failed(self.job, error)
        return None


def _failed(job: CellJob, error: Exception) -> CellRecord:
    """Record an error by its kind."""
    lines = str(error).strip().splitlines() or [""]
    reason = f"{type(error).__name__}: {lines[0]}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        reason = NO_MEMORY
    if isinstance(error, Diverged):
        return job.cell.record(status="diverged", reason=str(error))
    if isinstance(error, DataError) and job.kind != "costs":  # the score of a tested cell stays
        return job.cell.record(status="missing data", reason=str(error))
    return crashed_record(job, reason)


def crashed_record(job: CellJob, reason: str) -> CellRecord:
    """Record a crash: of the costs alone where the cell was trained already."""
    if job.kind == "costs" and job.record is not None:
        job.record.costs = {"n": job.cell.length, "notes": {COSTS_CRASHED: reason}}
        job.record.cost_by_length = [{"n": n, "reason": reason} for n in job.cell.grid.lengths]
        return job.record
    return job.cell.record(status="crashed", reason=reason)


def _train(job: CellJob, report: ReportShare | None) -> JobParts:
    cell, device = job.cell, torch.device(job.cell.grid.device)
    task = read_task(cell.task, cell.grid.files)
    train, _ = _split(cell.task, cell.grid.files, "train", device)
    val, _ = _split(cell.task, cell.grid.files, "val", device)
    model = _seeded_model(cell, task)
    if split_own(cell.mixer) is not None:
        check_outputs(model, cell.mixer, cell.length)
    step = _WARM.take(cell, model) or TrainingStep(model.to(device), task, train, cell.usual, CELL_DTYPES[cell.grid.dtype])
    budget = CellBudget(cell.usual, cell.grid.steps, cell.grid.seconds)
    training = CellTraining(step, val, budget, cell.lr, cell.seed, report)
    try:
        yield from training.parts()
    except Diverged:
        _WARM.give(cell, step)
        raise
    trained = training.found
    record = cell.record(
        curve=trained.curve, val=trained.val, train_seconds=trained.seconds, floors=_floors(cell.task, cell.grid.files)
    )
    record.settings |= {"made_with": _machine(), "steps": trained.steps, "graph": trained.note or _GRAPHS[device.type]}
    if trained.val is None or not math.isfinite(trained.val):
        raise Diverged("no score on validation is a finite number")
    about = {"task": cell.task, "mixer": cell.mixer, "lr": str(cell.lr), "seed": str(cell.seed)}
    record.weights = _stored(lambda: CellStore(Path(job.folder)).save_weights(cell.key, trained.weights, about))
    _WARM.give(cell, step)
    return record


def _train_and_test(job: CellJob, report: ReportShare | None) -> JobParts:
    record = yield from _train(job, report)
    return (yield from _test(job._replace(record=record), report))


def _test(job: CellJob, report: ReportShare | None) -> JobParts:
    """Score the best weights of a trained cell on test, once; weights that cannot be read are trained again."""
    cell, record, device = job.cell, job.record, torch.device(job.cell.grid.device)
    assert record is not None
    task = read_task(cell.task, cell.grid.files)
    model = _seeded_model(cell, task).to(device)
    try:
        model.load_state_dict(CellStore(Path(job.folder)).load_weights(record))
    except (RunError, RuntimeError):
        return (yield from _train_and_test(job._replace(record=None), report))
    split, made = _split(cell.task, cell.grid.files, "test", device)
    points = target_points(model, split, task.metric, EVALUATED[device.type] * cell.usual.batch, CELL_DTYPES[cell.grid.dtype])
    score = arena_score(points, split, made, task.slice_names)
    if not math.isfinite(score.value):
        raise Diverged("the score on test is not a finite number")
    record.test, record.test_count, record.slices, record.final = score.value, score.count, score.slices, True
    return record


def _costs(job: CellJob, report: ReportShare | None) -> JobParts:  # noqa: ARG001 - jobs are called alike
    cell, record = job.cell, job.record
    assert record is not None
    task = read_task(cell.task, cell.grid.files)
    split, _ = _split(cell.task, cell.grid.files, "train", torch.device(cell.grid.device))
    record.costs = cell_costs(cell, task, split)
    yield
    record.cost_by_length = costs_by_length(cell, task, split)
    return record


_JOBS: dict[str, Callable[[CellJob, ReportShare | None], JobParts]] = {
    "train": _train,
    "train and test": _train_and_test,
    "test": _test,
    "costs": _costs,
}


def _stored(write: Callable[[], str]) -> str:
    try:
        return write()
    except RunError as error:
        raise CannotStore(str(error)) from error


def _seeded_model(cell: Cell, task: ArenaTask) -> ComparedModel:
    torch.manual_seed(cell.seed)
    return build_model(task, cell.mixer, cell.model)


@lru_cache(maxsize=1)
def _machine() -> dict[str, Any]:
    return made_with()


@lru_cache(maxsize=6)
def _split(task: str, files: tuple[str, ...], part: ExamplesPart, device: torch.device) -> tuple[DeviceSplit, Examples]:
    """Return a split of a task; those of the last two tasks are kept."""
    return load_split(read_task(task, files), part, device)


@lru_cache(maxsize=16)
def _floors(task: str, files: tuple[str, ...]) -> dict[str, float]:
    """Return the floors of a task; those of tasks of your own are not kept on disk, because their code may change."""
    own = read_task(task, files)
    key = f"{own.plain()} {folder_sizes(own.needs) if own.needs else ''}"
    found = own.floors() if files else cached_floors(key, own.floors)
    return {name: float(value) for name, value in found.items()}
