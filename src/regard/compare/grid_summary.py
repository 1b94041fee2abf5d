"""The results of a comparison, one row a group: mean score over seeds, its spread, the chosen learning rate, and costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.compare.cell_record import LESS_IS_BETTER, CellRecord


@dataclass
class GroupRow:
    """Hold the result of one mixer on one task; `reason` where there is none."""

    task: str
    mixer: str
    family: str
    metric: str
    score: float | None = None  # mean over seeds, on test
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    lr: float | None = None
    parameters: int | None = None
    costs: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def group_rows(records: Sequence[CellRecord]) -> list[GroupRow]:
    """Return a row for each group, the best first in every task, groups without a score last."""
    groups: dict[tuple[str, str], list[CellRecord]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    rows = [_row(found) for found in groups.values()]
    tasks = list(dict.fromkeys(row.task for row in rows))
    return sorted(rows, key=lambda row: (tasks.index(row.task), _rank(row)))


def _rank(row: GroupRow) -> tuple[bool, float]:
    score = row.score or 0.0
    return row.score is None, score if row.metric in LESS_IS_BETTER else -score


def _row(records: Sequence[CellRecord]) -> GroupRow:
    first = records[0]
    row = GroupRow(first.task, first.mixer, first.family, first.metric, parameters=first.parameters)
    final = [record for record in records if record.final and record.test is not None]
    scores = [record.test for record in final if record.test is not None]
    if not scores:
        failed = next((record for record in records if record.status != "done"), first)
        row.reason = f"{failed.status}: {failed.reason}" if failed.reason else "not finished"
        return row
    row.score, row.low, row.high, row.seeds = statistics.fmean(scores), min(scores), max(scores), len(scores)
    row.lr = final[0].lr
    row.costs = next((record.costs for record in final if record.costs), {})
    return row


def task_floors(records: Sequence[CellRecord]) -> dict[str, dict[str, float]]:
    """Return the trivial floors of every task."""
    return {record.task: record.floors for record in records if record.floors}
