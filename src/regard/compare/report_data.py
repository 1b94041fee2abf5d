"""The numbers of a report as one JSON object, which the page's script draws: tasks, families, rows, trained layers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from regard.compare.cell_record import is_better
from regard.compare.comparison import ComparedRow, ComparedTask, Comparison, full_row, settings_of, speed_ratio
from regard.compare.trained_layers import TrainedLayers
from regard.plots.colours import family_shades

DIGITS = 6  # significant ones of every number


def report_data(comparison: Comparison, trained: TrainedLayers) -> dict[str, Any]:
    """Collect everything that the figures of the page show."""
    shades = family_shades(comparison.families)
    settings = {record.task: settings_of(record) for record in reversed(comparison.records)}
    tasks = [
        asdict(task)
        | {"label": task.label, "best_floor": task.best_floor, "settings": settings[task.name]}
        | {"learned": _learned(task, comparison)}
        for task in comparison.tasks
    ]
    spectra = [
        {
            "task": one.task,
            "mixer": one.mixer,
            "family": one.family,
            "layer": one.layer,
            "tokens": one.tokens,
            "share": one.spectrum,
        }
        for one in trained.layers
    ]
    found = {
        "tasks": tasks,
        "families": [{"name": name, "light": light, "dark": dark} for name, (light, dark) in shades.items()],
        "rows": [_row_data(row, comparison) for row in comparison.rows],
        "spectra": spectra,
        "made_with": comparison.made_with,
    }
    return plain(found)


def _learned(task: ComparedTask, comparison: Comparison) -> bool:
    """Return whether the best score of a task is better than its best floor, 0 where it has none."""
    best = next((row.score for row in comparison.of_task(task.name) if row.score is not None), None)
    return best is not None and is_better(task.metric, best, task.best_floor or 0.0)


def _row_data(row: ComparedRow, comparison: Comparison) -> dict[str, Any]:
    full = full_row(comparison.rows, row.task)
    ratios = {key: speed_ratio(row, full, key) for key in ("train_tokens_per_s", "infer_tokens_per_s", "peak_bytes")}
    return asdict(row) | {"ratios": ratios}


def plain(value: Any) -> Any:
    """Round numbers to DIGITS significant ones, and replace those that are not finite by None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def script_json(data: Any) -> str:
    """Write JSON that cannot end the script element that holds it, whatever names it has."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
