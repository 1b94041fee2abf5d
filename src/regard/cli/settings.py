"""Settings of a run, put together and checked before anything is read or trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard import tasks
from regard.config import Config
from regard.text import unknown

if TYPE_CHECKING:
    from regard.tasks.task import Task

STRONGEST = 10  # length ** 10: beyond any use, and no float overflows


def config_of(
    name: str, mixers: Sequence[str], changes: Sequence[str], out: Path | None, own: Mapping[str, str] | None = None
) -> Config:
    """Make the settings of a task, or of the run in `out` if one has begun there, with changes.

    `own` has settings that name a user's file and its columns, each by the option of its name.
    """
    from regard.training.checkpoints import load_config

    begun = load_config(out) if out is not None else None
    config = tasks.config(name)
    if begun is not None:
        config = restored(begun, f"{out}/config.json", name)
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


def restored(begun: dict[str, Any], where: str, name: str | None = None) -> Config:
    """Make the settings of a run from its config.json."""
    task = begun.get("task")
    if not isinstance(task, str):
        raise ValueError(f"{where} does not name its task: restore it, or train again in another folder")
    if name is not None and task != name:
        raise ValueError(f"{where} is of a run of {task}, not of {name}: choose another folder")
    try:
        return tasks.config(task).replace({key: value for key, value in begun.items() if key != "task"})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def decoding(config: Config, changes: Sequence[str]) -> Config:
    """Change settings of inference; all others are those that the weights were trained with."""
    allowed = tasks.make_task(config).answering
    for key in named(changes):
        if hasattr(config, key) and key not in allowed:
            can = f"only {', '.join(allowed)} can" if allowed else "nothing of it can"
            raise ValueError(f"{key} cannot change after training: {can}")
        if key not in allowed:
            raise ValueError(unknown(f"{config.task} has no setting for answers", key, allowed))
    changed = config.set(changes)
    check_decoding(changed)
    tasks.make_task(changed).check_answering(config)
    return changed


def device(name: str) -> str:
    """Choose cpu or cuda: as given, or for auto the one that is there."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"the device is auto, cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here: use --device cpu, or auto to take what there is")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def check_decoding(config: Config) -> None:
    """Refuse settings of generation that make no sense."""
    for name in ("beam", "max_new_tokens"):
        if getattr(config, name, 1) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)!r}")
    if abs(config.length_penalty) > STRONGEST:
        raise ValueError(
            f"length_penalty is a power of the length, from -{STRONGEST} to {STRONGEST}, not {config.length_penalty!r}"
        )


def check_used(task: Task, changes: Sequence[str]) -> None:
    """Refuse a setting that has no effect in this task."""
    unused = task.unused()
    for key in named(changes):
        if key in unused:
            raise ValueError(f"{key} does nothing here: it is for {unused[key]}. Leave it out")
