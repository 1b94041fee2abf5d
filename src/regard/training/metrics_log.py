"""Logs of metrics by step: metrics.jsonl, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

from regard.data.strict_json import read_value
from regard.training import atomic_files
from regard.training.atomic_files import RunError
from regard.training.update_speed import PEAK_MEMORY, SPEED

TIMES = ("time", "seconds", SPEED, PEAK_MEMORY)  # fields that differ between two equal runs


class MetricsLog:
    """Append one JSON object a line. A run resumed after step s drops the lines of later steps."""

    def __init__(self, out: Path, after: int) -> None:
        path = out / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["step"] <= after]
        atomic_files.replace(path, "".join(_json_line(line) for line in kept))
        self._board = _board(out / "tensorboard", after)
        self.path, self._file = path, open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(_json_line(line))
            self._file.flush()
        except OSError as error:
            raise RunError(atomic_files.cannot_write(self.path, error)) from error
        if self._board is not None:
            values = {name: value for name, value in line.items() if name != "step"}
            for name, value in _flat_metrics(values):
                self._board.add_scalar(name, value, line["step"])

    def sync(self) -> None:
        """Sync to disk, before the checkpoint of the same step is written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all complete lines; an incomplete last line, left by a crash, is dropped."""
    if not path.is_file():
        return []
    try:
        *whole, _torn = path.read_bytes().split(b"\n")
        found = [read_value(text) for text in whole]
    except ValueError:
        found = [None]
    if not all(map(_sound, found)):
        raise RunError(f"{path} is not as it was written: delete it, and the run goes on without its past")
    return found


def _sound(line: Any) -> bool:
    """Return whether a line has the fields and types that `write` writes."""
    if not isinstance(line, dict) or not isinstance(line.get("val", {}), dict):
        return False
    return type(line.get("step")) is int and isinstance(line.get("time", 0.0), int | float)


def _json_line(line: dict[str, Any]) -> str:
    return json.dumps(finite(line), ensure_ascii=False) + "\n"


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: finite(x) for name, x in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat_metrics(line: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in line.items():
        if isinstance(value, dict):
            found += _flat_metrics(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found.append((prefix + name, value))
    return found


def _board(folder: Path, after: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from imports of some versions of TensorBoard
            from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=after + 1)
