"""How long tasks take on this machine: seconds of an update by the number of threads, measured and kept. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, NamedTuple

from regard._version import version
from regard.config import Config

KEPT = "task_times.json"
FREE = (
    "steps",
    "lr",
    "seed",
    "schedule",
    "warmup",
    "validate_every",
    "save_every",
    "patience",
    "average",
)  # of no effect on time
HOUR = 3600


class TaskTime(NamedTuple):
    """Seconds of an update with each number of threads that was tried, on the device cpu or cuda."""

    seconds: dict[int, float]
    device: str = "cpu"

    @property
    def threads(self) -> int:
        """The number of threads of the fastest update."""
        return min(self.seconds, key=lambda count: (self.seconds[count], count))

    @property
    def fastest(self) -> float:
        return self.seconds[self.threads]

    def describe(self, config: Config) -> str:
        """Describe how long all updates take: without reading data, and without validations."""
        count = self.threads
        place = "the GPU" if self.device == "cuda" else f"{count} thread{'s' * (count > 1)}"
        text = f"about {duration(self.fastest * config.steps)} on {place}"
        return f"{text}: {config.steps:,} updates of {duration(self.fastest)}"

    def others(self) -> str:
        """Name the times of other numbers of threads, or ""."""
        rest = {count: seconds for count, seconds in self.seconds.items() if count != self.threads}
        return ", ".join(f"{duration(seconds)} on {count}" for count, seconds in rest.items())


def duration(seconds: float) -> str:
    """Write a time in the unit that fits."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < HOUR else f"{seconds / HOUR:.1f} h"


def kept_time(config: Config) -> TaskTime | None:
    """Return what was measured on this machine for a task with these settings, whatever its number of updates and its rate."""
    found = _read().get(_key(config))
    if found is None:
        return None
    return TaskTime({int(count): float(seconds) for count, seconds in found["seconds"].items()}, str(found["device"]))


def keep_time(config: Config, measured: TaskTime) -> Path:
    """Keep a measurement for this machine; those of another machine or version in the same file are dropped."""
    path = _path()
    times = _read() | {_key(config): {"task": config.task, **measured._asdict()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps({"machine": _machine(), "times": times}, indent=1))
    beside.replace(path)
    return path


def _path() -> Path:
    """Find the file: in the folder REGARD_CACHE, or in that of all programs for what can be made again."""
    named = os.environ.get("REGARD_CACHE")
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(named) if named else Path(above) / "regard").expanduser() / KEPT


def _read() -> dict[str, Any]:
    """Read what was kept for this machine; a file that cannot be read is measured anew."""
    try:
        found = json.loads(_path().read_text())
        return dict(found["times"]) if found["machine"] == _machine() else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _machine() -> dict[str, Any]:
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"node": platform.node(), "cpus": cpus, "torch": version_of("torch"), "regard": version}


def _key(config: Config) -> str:
    settings = {name: value for name, value in config.to_json().items() if name not in FREE}
    return f"{config.task}-{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]}"
