"""`regard compare` trains mechanisms on tasks, with equal parameters and equal budgets, and measures what they cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from regard.cli.completion import complete_spec
from regard.cli.console import aside, one_of, screen, sentences, stop
from regard.cli.signals import ignore_signals

if TYPE_CHECKING:
    from regard.compare.cell_record import CellRecord
    from regard.compare.grid_plan import GridSettings, PlannedGroup
    from regard.compare.grid_run import GridRun
    from regard.compare.worker_pool import SameProcess, WorkerPool

COST_LENGTHS = {"cpu": "1k", "cuda": "512,2k,8k"}
CARD_JOBS = 8  # cells that share a GPU; more are no faster, because kernels of 8 small models fill it (benchmarks/grid_speed.py)
CARD_PROCESSES = 1  # two take turns on the card
MOST_JOBS = 256
MINUTE = 60.0
FIRST_ESTIMATE = 0.3  # of a cell, before the time left is shown


def compare(
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks", metavar="TASKS", help="Tasks with commas: 'recall(length=64), induction'; quick ones unless given."
        ),
    ] = "",
    mixers: Annotated[
        list[str] | None,
        typer.Option(
            "--mixers",
            metavar="MIXERS",
            help="Names, specs, patterns, mypkg.mod:MyCore, with commas; all: the catalogue; one of every family unless given.",
            autocompletion=complete_spec,
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Of each cell: steps (500) or minutes (2m); the usual steps of each task unless given.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Of each mixer, with its best learning rate.")] = 1,
    lr: Annotated[
        str | None, typer.Option(help="Learning rates to choose from: 1e-3,3e-3; those of each task unless given.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Lengths at which speed and memory are measured too; 1k unless given, none: no others.")
    ] = None,
    costs: Annotated[
        bool, typer.Option("--costs/--no-costs", help="Measure speed and memory; without it, the same command adds them later.")
    ] = True,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Of all models and budgets: width=32, depth=4, batch=128 ..."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32, tf32 (products of a GPU, rounded to 10 bits), or bf16 (autocast).")] = "fp32",
    task: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A Python file with a task of your own.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_JOBS, help="Cells at a time; one a core unless given, on a GPU 8; 0: in this process."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, max=MOST_JOBS, help="Of a GPU: its cells are spread over so many, on streams of their own.")
    ] = CARD_PROCESSES,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For records, weights and the report; finished cells are kept.")
    ] = Path("compare"),
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train nothing: the tables and the report of FOLDER again.")
    ] = False,
) -> None:
    """Compare mechanisms on tasks: scores, speed and memory of equal models with equal budgets."""
    from regard.tasks.run_settings import choose_device

    with sentences():
        if report_only:
            _finish(_stored(out), out)
            return
        where = choose_device(device)
        more: dict[str, Any] = {"seeds": seeds, "rates": read_rates(lr), "lengths": _lengths(lengths, where), "device": where}
        more |= {"costs": costs} | dict(zip(("steps", "seconds"), read_budget(budget), strict=True))
        grid = _settings(tasks, mixers, task, changes, dtype=_dtype(dtype, where), **more)
        records = _run(grid, out, _jobs(jobs, where), processes)
        _finish(records, out)


def _dtype(name: str, device: str) -> str:
    """Check the type of numbers that models are trained in."""
    from regard.compare.cell_costs import CELL_DTYPES

    if one_of("dtype", name, tuple(CELL_DTYPES)) == "tf32" and device == "cpu":
        raise ValueError("--dtype tf32 is for products of a GPU, and this is a CPU: use fp32")
    return name


def _stored(out: Path) -> list[CellRecord]:
    """Read the records of a folder."""
    from regard.compare.cell_store import CellStore

    store = CellStore(out)
    records = store.records()
    for line in store.damaged:
        aside(f"a damaged record is left out: {line}")
    if not records:
        raise ValueError(f"{out} has no records of a comparison: name the folder that regard compare --out wrote")
    return records


def _settings(
    tasks: str, mixers: list[str] | None, files: list[Path] | None, changes: list[str] | None, **more: Any
) -> GridSettings:
    """Put the settings together; what is not given is the quick comparison."""
    from regard.arena.quick_tasks import QUICK_TASKS
    from regard.compare.grid_plan import QUICK_MIXERS, GridSettings, mixer_texts, split_outside
    from regard.compare.size_changes import read_changes

    paths = tuple(str(path.resolve()) for path in files or ())
    named = tuple(split_outside(tasks)) or _own_names(paths)
    quick = not named
    if tasks and not named:
        raise ValueError(f"--tasks names no task: write for example --tasks {QUICK_TASKS[0].task.partition('(')[0]}")
    chosen = mixer_texts(QUICK_MIXERS if mixers is None else mixers)
    if not chosen:
        raise ValueError("--mixers names no mechanism: write for example --mixers 'softmax, linear, Local(16)', or all")
    named = named or tuple(own.task for own in QUICK_TASKS[:2])
    return GridSettings(named, chosen, files=paths, quick=quick, changes=read_changes(changes or []), **more)


def _own_names(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tasks of the given files: all of them where --tasks names none."""
    from regard.compare.own_code import file_tasks

    return tuple(kind.name for path in paths for kind in file_tasks(path))


def read_budget(text: str | None) -> tuple[int | None, float | None]:
    """Read steps (500) or minutes (2m) of a cell."""
    if text is None:
        return None, None
    word = text.strip().lower()
    try:
        if word.endswith("m"):
            minutes = float(word[:-1])
            if 0 < minutes < 1e6:
                return None, minutes * MINUTE
        elif int(word) >= 1:
            return int(word), None
    except ValueError:
        pass
    raise ValueError(f"--budget is a number of steps, such as 500, or of minutes, such as 2m, not {text!r}")


def read_rates(text: str | None) -> tuple[float, ...] | None:
    """Read learning rates with commas between them."""
    if text is None:
        return None
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < 10 for rate in found):
        raise ValueError(f"--lr is a list of learning rates between 0 and 10, such as 1e-3,3e-3, not {text!r}")
    return found


def _lengths(text: str | None, device: str) -> tuple[int, ...]:
    from regard.cli.bench_command import parsed_length

    words = [] if text == "none" else (text or COST_LENGTHS[device]).split(",")
    return tuple(sorted({parsed_length(word) for word in words if word.strip()}))


def _jobs(given: int | None, device: str) -> int:
    if given is not None:
        return given
    return (
        CARD_JOBS
        if device == "cuda"
        else len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


class _Shown:
    """Show the progress of a grid on stderr, with the time left."""

    def __init__(self, total: int, done: float) -> None:
        from regard.training.progress import progress

        self.progress = progress(total, int(done), console=Console(stderr=True, emoji=False))
        self.progress.unit = "cell"

    def advance(self, done: float, text: str) -> None:
        self.progress.score = text
        if done - self.progress.first >= FIRST_ESTIMATE:
            self.progress.step(done)


def _run(grid: GridSettings, out: Path, jobs: int, processes: int) -> list[CellRecord]:
    """Run the grid; Control-C ends it with how to go on."""
    from regard.compare.cell_run import CannotStore
    from regard.compare.cell_store import CellStore
    from regard.compare.grid_plan import plan_grid
    from regard.compare.worker_pool import SameProcess

    groups, store = plan_grid(grid), CellStore(out)
    store.begin({"settings": grid.to_json(), "records": [cell.key for group in groups for cell in group.search()]})
    count = max(1, min(jobs, _useful(groups)))
    pool = _pool(grid.device, count, processes) if jobs else SameProcess()
    run = _grid_run(groups, store, pool)
    _begin_text(groups, run, jobs and count)
    try:
        return run.run()
    except (KeyboardInterrupt, SystemExit) as error:
        ignore_signals()  # a second one comes where a whole group of processes is ended
        pool.close()
        code = 130 if isinstance(error, KeyboardInterrupt) else 143
        stop(f"stopped: {run.kept} of {run.total} cells are kept in {out}. The same command goes on from there.", code)
    except CannotStore as error:
        raise ValueError(f"{error}. {run.kept} of {run.total} cells are kept: the same command goes on from there") from None
    finally:
        pool.close()


def _pool(device: str, count: int, processes: int) -> WorkerPool | SameProcess:
    """Make the processes: one a cell on a CPU; on a GPU cells share a process, each on a stream of its own."""
    from regard.compare.worker_pool import WorkerPool

    if device == "cuda":
        return WorkerPool(min(count, processes), lanes=-(-count // processes))
    return WorkerPool(count)


def _useful(groups: list[PlannedGroup]) -> int:
    """Return how many cells may run at the same time."""
    return sum(max(len(group.rates), group.cell.grid.seeds) for group in groups if group.refused is None) or 1


def _grid_run(groups: list[PlannedGroup], store: Any, pool: Any) -> GridRun:
    from regard.compare.grid_run import GridRun

    run = GridRun(groups, store, pool)
    run.view = _Shown(run.total, run.done)
    for line in store.damaged:
        aside(f"a damaged record is replaced: {line}")
    return run


def _begin_text(groups: list[PlannedGroup], run: GridRun, jobs: int) -> None:
    kept = f", {run.kept} of them are there already" if run.kept else ""
    where = f"{jobs} at a time" if jobs else "in this process"
    open_groups = sum(group.refused is None for group in groups)
    aside(f"{open_groups} models to compare: {run.total} cells to train and measure{kept}, {where}")


def _finish(records: list[CellRecord], out: Path) -> None:
    """Print the results, write the report, and print what to do next."""
    from regard.cli.compare_tables import print_results
    from regard.compare.report import FIGURE_FOLDER, write_report

    print_results(records)
    page = write_report(out)
    pictures = sorted((out / FIGURE_FOLDER).glob("bubble_*.png"))
    lines = [f"records   {out}/cells", *(f"picture   {path}" for path in pictures), f"report    {page}"]
    console = screen()
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    text = "Next: open the report. The same command with more --seeds, --tasks or --mixers trains what is new alone."
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
