"""Settings of a run, put together and checked before anything is read or trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard import tasks
from regard.config import Config, key_value
from regard.tasks.run_settings import refuse_unused, started_config

if TYPE_CHECKING:
    from regard.tasks.task import Task


def config_of(
    name: str,
    mixers: Sequence[str],
    changes: Sequence[str],
    out: Path | None,
    own: Mapping[str, str | list[str]] | None = None,
    preset: str | None = None,
) -> Config:
    """Make the settings of a task, or of the run in `out` if one has begun there, with a preset and changes.

    `own` has settings that name a user's file and its columns, each by the option of its name.
    """
    config = started_config(name, out, preset)
    keys = named(changes)
    if mixers:
        if "mixer" in keys:
            raise ValueError("the mixer is given twice: by --mixer and by --set")
        config = config.replace({"mixer": mixers[0] if len(mixers) == 1 else list(mixers)})
    for key in own or {}:
        if not hasattr(config, key):
            having = [word for word, entry in tasks.TASKS.items() if hasattr(entry.config(), key)]
            raise ValueError(f"--{key} does nothing here: it is for {' and '.join(having)}. Leave it out")
        if key in keys:
            raise ValueError(f"{key} is given twice: by --{key} and by --set")
    return config.replace(own or {}).set(changes)


def named(changes: Sequence[str]) -> list[str]:
    """List the settings that are to change, each of them once."""
    keys = [change.partition("=")[0].strip() for change in changes]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"{twice} is given twice by --set: which one is meant?")
    return keys


def by_name(changes: Sequence[str]) -> dict[str, str]:
    """Map each setting that is to change to its new value, a text."""
    named(changes)
    return dict(key_value(change) for change in changes)


def check_used(task: Task, changes: Sequence[str], own: Iterable[str] = ()) -> None:
    """Refuse a setting that has no effect in this task; `own` are those that have an option of their name."""
    refuse_unused(task.unused(), [*own, *named(changes)])
