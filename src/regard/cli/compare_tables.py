"""The tables of `regard compare`: scores beside costs, for every task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard.cli.console import columns, screen

if TYPE_CHECKING:
    from rich.console import Console

    from regard.compare.cell_record import CellRecord
    from regard.compare.comparison import ComparedRow, ComparedTask

HEADINGS = ("mixer", "family", "score", "seeds", "lr", "parameters", "steps/s", "tokens/s", "decode ms", "step MB", "state kB")


def print_results(records: list[CellRecord]) -> None:
    """Print one table a task, with its floors, and the groups that have no score."""
    from regard.compare.comparison import compare_records

    console, found = screen(), compare_records(records)
    for task in found.tasks:
        _print_task(console, task, found.of_task(task.name))


def _print_task(console: Console, task: ComparedTask, rows: list[ComparedRow]) -> None:
    from regard.arena.trivial_floors import trivial

    console.print(f"\n{task.label}", style="bold", markup=False, highlight=False)
    table = columns(*HEADINGS)
    for row in rows:
        if row.score is not None:
            table.add_row(*_cells(row))
    floors = trivial(task.floors)
    for name, value in task.floors.items():
        table.add_row(name, "no attention" if name in floors else "a reader", _score(value, task.metric), *[""] * 8, style="dim")
    console.print(table, highlight=False, markup=False)
    for row in rows:
        if row.score is None:
            console.print(f"{row.mixer}: {row.reason}", style="dim", highlight=False, markup=False, soft_wrap=True)


def _cells(row: ComparedRow) -> list[str]:
    costs = row.costs
    spread = f" ({_score(row.low, row.metric)} to {_score(row.high, row.metric)})" if row.low is not None else ""
    lr = "" if row.lr is None else f"{row.lr:g}"
    score = _score(row.score, row.metric) + spread
    speed = [_number(costs.get("train_steps_per_s")), _number(costs.get("infer_tokens_per_s")), _number(costs.get("decode_ms"))]
    memory = [_number(costs.get("peak_bytes"), 1e6), _number(costs.get("state_bytes"), 1e3)]
    seeds = f"{len(row.scores)} ({row.lost})" if row.lost else str(len(row.scores))
    return [row.mixer, row.family, score, seeds, lr, _number(row.parameters), *speed, *memory]


def _score(value: float | None, metric: str) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.3f}"


def _number(value: Any, unit: float = 1.0) -> str:
    if value is None:
        return ""
    scaled = value / unit
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"
