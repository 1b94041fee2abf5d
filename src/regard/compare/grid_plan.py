"""The plan of a comparison: which cells there are, the model and budget of each, and the key of its record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from regard.arena.arena_catalogue import task_source
from regard.arena.arena_task import ArenaBudget, ArenaModel, ArenaTask
from regard.arena.quick_tasks import QUICK_TASKS
from regard.catalogue import CATALOGUE
from regard.compare.cell_record import RECORD_FORMAT, CellRecord, is_better
from regard.compare.compared_model import MatchedModel, is_causal, matched_model
from regard.compare.own_code import own_source, read_task
from regard.compare.size_changes import changed_sizes
from regard.data.locate import find
from regard.data.text_files import DataError
from regard.spec import Spec

ALL = "all"
# One or more of every family, of those that can be causal.
QUICK_MIXERS = (
    *("softmax", "identity", "Local(16)", "linear", "delta", "hybrid(pattern=Local(8))", "gmlp", "conv"),
    *("sinkhorn", "gat(pattern=Local(8))", "reformer", "synthesizer", "linformer"),
)


@dataclass(frozen=True)
class GridSettings:
    """Hold what a comparison is made of, as it was given."""

    tasks: tuple[str, ...]
    mixers: tuple[str, ...]
    rates: tuple[float, ...] | None = None  # those of each task unless given
    seeds: int = 1
    steps: int | None = None  # those of each task unless given
    seconds: float | None = None  # in place of steps
    lengths: tuple[int, ...] = ()  # where costs are measured beside the length of the task
    device: str = "cpu"
    dtype: str = "fp32"
    files: tuple[str, ...] = ()  # with tasks of your own
    quick: bool = False  # quick tasks have their small models and budgets
    changes: tuple[tuple[str, Any], ...] = ()  # fields of the models and budgets with other values
    costs: bool = True  # speed and memory are measured too

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cell:
    """Hold everything that decides the result of one cell, in plain values: a worker process gets it."""

    task: str
    mixer: str
    family: str
    lr: float
    seed: int
    model: ArenaModel
    usual: ArenaBudget
    grid: GridSettings
    parameters: int | None = None
    note: str = ""
    title: str = ""
    metric: str = "accuracy"
    length: int = 0
    causal: bool = False
    source: str = ""  # hashes of files of your own

    @cached_property
    def key(self) -> str:
        """Return a hash of the settings: equal cells have one record."""
        budget = {"usual": asdict(self.usual) | {"rates": []}, "steps": self.grid.steps, "seconds": self.grid.seconds}
        parts = [RECORD_FORMAT, self.task, self.mixer, self.lr, self.seed, asdict(self.model), budget]
        parts += [self.grid.device, self.grid.dtype, self.source]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def record(self, **more: Any) -> CellRecord:
        """Make the record of this cell, with what every record has."""
        budget = {**asdict(self.usual), "rates": list(self.usual.rates), "steps": self.grid.steps or self.usual.steps}
        if self.grid.seconds is not None:
            budget = {**budget, "steps": None, "seconds": self.grid.seconds}
        settings = {"model": asdict(self.model), "budget": budget, "device": self.grid.device, "dtype": self.grid.dtype}
        return CellRecord(
            self.key,
            self.task,
            self.mixer,
            self.family,
            self.lr,
            self.seed,
            title=self.title,
            metric=self.metric,
            length=self.length,
            causal=self.causal,
            settings=settings,
            parameters=self.parameters,
            parameters_note=self.note,
            **more,
        )

    def at(self, lr: float, seed: int) -> Cell:
        return replace(self, lr=lr, seed=seed)


@dataclass(frozen=True)
class PlannedGroup:
    """Hold the cells of one task and mixer, or the record with the reason why there are none."""

    cell: Cell  # the first one; the others differ in learning rate and seed
    rates: tuple[float, ...]
    refused: CellRecord | None = None

    @property
    def lacks_data(self) -> bool:
        """Return whether its data set is not here: without it the model, and so the keys of its cells, are not known."""
        return self.refused is not None and self.refused.status == "missing data"

    def search(self) -> list[Cell]:
        """Return the cells of all learning rates, with seed 0."""
        return [self.cell.at(lr, 0) for lr in self.rates]

    def final(self, lr: float) -> list[Cell]:
        """Return the cells of all seeds with the chosen learning rate."""
        return [self.cell.at(lr, seed) for seed in range(self.cell.grid.seeds)]


def plan_grid(grid: GridSettings) -> list[PlannedGroup]:
    """Plan every task with every mixer. Mistakes in names raise a ValueError; what a mechanism cannot do is a refused group."""
    if not grid.tasks or not grid.mixers:
        raise ValueError("a comparison needs a task and a mixer or more")
    tasks = {str(task): task for task in (read_task(text, grid.files) for text in grid.tasks)}  # one that has two spellings, once
    specs = {text: Spec.parse(text) for text in grid.mixers}
    return [_planned(grid, task, text, spec) for task in tasks.values() for text, spec in specs.items()]


def _planned(grid: GridSettings, task: ArenaTask, mixer: str, spec: Spec) -> PlannedGroup:
    model, usual = _sizes(grid, task)
    rates = grid.rates or usual.rates
    cell = Cell(str(task), mixer, spec.row.family, rates[0], 0, model, usual, grid)
    cell = replace(cell, title=task.title, metric=task.metric, causal=is_causal(task))
    cell = replace(cell, source=task_source(task) + own_source(mixer))
    try:
        if task.needs:
            find(task.needs)
        cell = replace(cell, length=task.length)
        matched = matched_model(task, mixer, model)
    except Exception as error:  # noqa: BLE001 - a mechanism of anybody's own may raise anything
        return PlannedGroup(cell, rates, _unbuilt(cell, error))
    return PlannedGroup(_with(cell, matched), rates)


def _sizes(grid: GridSettings, task: ArenaTask) -> tuple[ArenaModel, ArenaBudget]:
    """Return the model and the budget of a task: its own, or those of quick tasks, with the changes of the grid."""
    model, usual = task.model(), task.budget()
    if grid.quick:
        same = [quick for quick in QUICK_TASKS if str(read_task(quick.task)) == str(task)]
        model, usual = (same[0].model, same[0].budget) if same else (model, usual)
    return changed_sizes(model, usual, dict(grid.changes))


def _with(cell: Cell, matched: MatchedModel) -> Cell:
    return replace(cell, model=matched.model, parameters=matched.parameters, note=matched.note)


def _unbuilt(cell: Cell, error: Exception) -> CellRecord:
    """Record why a model cannot be built: a refusal is a sentence, anything unexpected is a crash."""
    if isinstance(error, DataError):
        return cell.record(status="missing data", reason=str(error))
    if isinstance(error, ValueError):
        return cell.record(status="refused", reason=str(error).splitlines()[0])
    return cell.record(status="crashed", reason=f"{type(error).__name__}: {error}")


def best_rate(records: Sequence[CellRecord]) -> float | None:
    """Choose the learning rate with the best score on validation; None where no cell is done."""
    best: CellRecord | None = None
    for record in records:
        if record.status != "done" or record.val is None:
            continue
        if best is None or is_better(record.metric, record.val, best.val):
            best = record
    return None if best is None else best.lr


def mixer_texts(texts: Sequence[str]) -> tuple[str, ...]:
    """Read a list of mechanisms, with commas or semicolons outside of brackets between them; `all` is the whole catalogue.

    A name without options has those of its first example in the catalogue, as `regard list` shows it.
    """
    words = [word for text in texts for word in split_outside(text)]
    found: list[str] = []
    for word in words:
        found += [_usual_text(name) for name in CATALOGUE] if word == ALL else [_usual_text(word)]
    return tuple(dict.fromkeys(found))


def _usual_text(word: str) -> str:
    row = CATALOGUE.get(word)
    return word if row is None else str(Spec(word, **row.examples[0].options))


def split_outside(text: str) -> list[str]:
    """Split at commas and semicolons that are outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        depth += 0 if quote else (c in "([{") - (c in ")]}")
        if c in ",;" and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]
