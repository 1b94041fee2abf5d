"""What `regard tune` tried as a JSON record: for every kernel, how many configurations, which were refused, and the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard.bench.machine import made_with, write_record
from regard.bench.tune import PlannedKernel, Settings, Trial, TunedKernel, TuneRequest, TuneRow


def trials_writer(path: Path, request: TuneRequest) -> Callable[[Sequence[TuneRow]], None]:
    """Return a function that writes the rows of a run so far into a file, under a temporary name that is renamed."""
    head = {"benchmark": "tune", "settings": asdict(request), "made_with": made_with()}

    def record(rows: Sequence[TuneRow]) -> None:
        write_record(path, head | trials_record(rows))

    return record


def trials_record(rows: Sequence[TuneRow]) -> dict[str, Any]:
    """Return a row for every kernel that was tuned, and the reasons of those that were left out."""
    tuned = [_place(row.planned) | _tuned(row.planned, row.tuned) for row in rows if row.tuned is not None]
    return {"rows": tuned, "left_out": [_place(row.planned) | {"reason": row.note} for row in rows if row.tuned is None]}


def _place(planned: PlannedKernel) -> dict[str, Any]:
    return {"family": planned.case.family, "case": planned.case.name, "width": planned.shape.width, "kernel": planned.kernel}


def _tuned(planned: PlannedKernel, found: TunedKernel) -> dict[str, Any]:
    """Return the trials of one kernel: `ratio` is how many times as fast as the configuration in use the best one is."""
    before, best = found.before, found.best
    known = best is not None and not best.problem and not before.problem
    return {
        "keys": [key for _, key in before.settings],
        "candidates": len(planned.candidates),
        "tried": len(found.trials),
        "refused": [_configuration(trial.settings) | {"reason": trial.problem} for trial in found.refused],
        "before": _measured(before),
        "best": None if best is None else _measured(best),
        "ratio": before.slower_than(best) if known and best is not None else None,
        "taken": found.changed,
    }


def _measured(trial: Trial) -> dict[str, Any]:
    """Return the seconds of every pass, or the problem."""
    result = {"problem": trial.problem} if trial.problem else {"seconds": list(trial.seconds)}
    return _configuration(trial.settings) | result


def _configuration(settings: Settings) -> dict[str, Any]:
    return {"configuration": {key: config for (_, key), config in settings.items()}}
