"""Settings of a trained run: restored from its folder, and changed where only its answers depend on them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard import tasks
from regard.config import Config
from regard.text import UNKNOWN_NAME, TextError, unknown

STRONGEST = 10  # length ** 10: beyond any use, and no float overflows


def restored(begun: Mapping[str, Any], where: str, name: str | None = None) -> Config:
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


@contextmanager
def installed_here(folder: Path | None) -> Iterator[None]:
    """Add to the error of an unknown mechanism, where it is one of a run that has begun, that its package may be missing."""
    try:
        yield
    except TextError as error:
        if UNKNOWN_NAME not in error.sentence or folder is None or not (folder / "config.json").is_file():
            raise
        why = f"{folder}/config.json names a mechanism whose package may not be installed here"
        raise TextError(f"{why}: {error.sentence}", error.text, error.at) from None


def started_config(name: str, out: Path | None, preset: str | None = None) -> Config:
    """Make the settings of a task, or of the run in `out` if one has begun there, with those of a preset."""
    from regard.training.checkpoints import load_config

    begun = load_config(out) if out is not None else None
    config = tasks.config(name, preset)
    if begun is None:
        return config
    return restored(begun, f"{out}/config.json", name).replace({} if preset is None else tasks.TASKS[name].presets[preset])


def decoding(config: Config, changes: Mapping[str, Any]) -> Config:
    """Change settings of inference; all others are those that the weights were trained with."""
    allowed = tasks.make_task(config).answering
    for key in changes:
        if hasattr(config, key) and key not in allowed:
            can = f"only {', '.join(allowed)} can" if allowed else "nothing of it can"
            raise ValueError(f"{key} cannot change after training: {can}")
        if key not in allowed:
            raise ValueError(unknown(f"{config.task} has no setting for answers", key, allowed))
    changed = config.replace(changes)
    check_decoding(changed)
    tasks.make_task(changed).check_answering(config)
    return changed


def refuse_unused(unused: Mapping[str, str], names: Iterable[str]) -> None:
    """Refuse settings that have no effect in a task, each with what it is for."""
    for name in names:
        if name in unused:
            raise ValueError(f"{name} does nothing here: it is for {unused[name]}. Leave it out")


def check_decoding(config: Config) -> None:
    """Refuse settings of generation that make no sense."""
    for name in ("beam", "max_new_tokens"):
        if getattr(config, name, 1) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)!r}")
    if abs(config.length_penalty) > STRONGEST:
        raise ValueError(
            f"length_penalty is a power of the length, from -{STRONGEST} to {STRONGEST}, not {config.length_penalty!r}"
        )


def choose_device(name: str) -> str:
    """Choose cpu or cuda: as given, or for auto the one that is there."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"the device is auto, cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here: use the device cpu, or auto to take what there is")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
