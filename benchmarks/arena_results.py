"""Join the records of comparisons into one small file: a row for each task and mechanism, with its floors, rates and costs.

    regard compare --tasks ... --mixers all --out FOLDER
    python benchmarks/arena_results.py arena_small FOLDER [FOLDER ...]

Writes results/NAME.json. Of a cell that is in several folders, a tested one counts; a group that was stopped is a row with that
reason. `made_with` is that of the machine that trained, and every task has its settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import RESULTS
from regard.bench.machine import write_record
from regard.compare.cell_record import CellRecord
from regard.compare.cell_store import CellStore
from regard.compare.comparison import ComparedRow, Comparison, alike_best, compare_records, settings_of
from regard.compare.report_data import plain

COSTS = ("train_steps_per_s", "train_tokens_per_s", "infer_tokens_per_s", "decode_ms", "peak_bytes", "state_bytes", "n", "batch")
UNTRAINED = ("refused", "missing data")  # records that are there before any training
LEFT_OUT = ("curve", "weights", "costs", "task", "slices")  # of the rows of a comparison


def joined(folders: Iterable[Path]) -> list[CellRecord]:
    """Read the records of all folders, each cell once."""
    found: dict[str, CellRecord] = {}
    for folder in folders:
        store = CellStore(folder)
        records = store.records()
        for line in store.damaged:
            print(f"a damaged record is left out: {line}", file=sys.stderr)
        if not records:
            raise ValueError(f"{folder} has no records of a comparison")
        for record in records:
            if record.key not in found or _known(record) >= _known(found[record.key]):
                found[record.key] = record
    return list(found.values())


def _known(record: CellRecord) -> tuple[bool, bool]:
    return record.final, bool(record.costs)


def task_settings(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the tasks with their floors and the settings of softmax, or of the first row that was trained."""
    tasks = []
    for task in comparison.tasks:
        own = sorted(
            (r for r in comparison.records if r.task == task.name), key=lambda r: (r.status != "done", r.mixer != "softmax")
        )
        about = {"title": task.title, "metric": task.metric, "length": task.length, "causal": task.causal, "floors": task.floors}
        tasks.append({"task": task.name, **about, **settings_of(own[0])})
    return tasks


def row_data(row: ComparedRow, number: int, best: bool) -> dict[str, Any]:
    """Return one row; `task` is the number of its task."""
    kept = {name: value for name, value in vars(row).items() if name not in LEFT_OUT and value not in (None, "", [], {})}
    costs = {name: row.costs[name] for name in COSTS if row.costs.get(name) is not None}
    return {"task": number} | kept | ({"costs": costs} if costs else {}) | ({"best": True} if best else {})


def arena_record(name: str, records: list[CellRecord]) -> dict[str, Any]:
    """Return what is saved; a task that no mechanism was trained on yet is left out."""
    begun = {record.task for record in records if record.status not in UNTRAINED}
    records = [record for record in records if record.task in begun] or records
    comparison = compare_records(records)
    numbers = {task.name: number for number, task in enumerate(comparison.tasks)}
    best = {id(row) for task in comparison.tasks for row in alike_best(comparison.of_task(task.name))}
    rows = [row_data(row, numbers[row.task], id(row) in best) for row in comparison.rows]
    settings = {"tasks": task_settings(comparison), "cells": len(records)}
    return {"benchmark": name, "settings": plain(settings), "made_with": comparison.made_with, "rows": plain(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file in results/")
    parser.add_argument("folders", nargs="+", type=Path, help="that regard compare --out wrote")
    args = parser.parse_args()
    made = arena_record(args.name, joined(args.folders))
    path = RESULTS / f"{args.name}.json"
    write_record(path, made)
    print(f"{path}: {len(made['rows'])} rows of {made['settings']['cells']} cells")


if __name__ == "__main__":
    main()
