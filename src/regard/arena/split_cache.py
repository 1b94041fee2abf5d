"""Keep splits and floors on disk, where REGARD_CACHE names a folder: written whole or not at all, checked when they are read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import torch

from regard.arena.arena_catalogue import task_source
from regard.arena.arena_task import ArenaTask, Examples, ExamplesPart
from regard.data.text_files import DataError

GENERATOR_VERSION = 1  # raised when a generator changes: older files are not read again
SLICE_PREFIX = "slice "


def split_key(task: ArenaTask, part: ExamplesPart) -> str | None:
    """Return what a split is kept under: the task, and the code of one of your own; None where that is in no file."""
    try:
        source = task_source(task)
    except (OSError, TypeError):  # a class that was typed in
        return None
    return " ".join(filter(None, [str(task.plain()), part, source]))


def cached_split(key: str | None, make: Callable[[], Examples]) -> Examples:
    """Return the split of a key from `$REGARD_CACHE`, or make it and keep it there; without that variable or a key, make it."""
    path = None if key is None else _cache_path(key, "npz")
    if path is None:
        return make()
    if path.exists():
        return _read_split(path)
    made = make()
    _write(path, lambda file: np.savez(file, **_arrays(made)))  # type: ignore[arg-type]
    return made


def cached_floors(key: str, make: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the floors of a key from `$REGARD_CACHE`, or compute them and keep them there, if there is that variable."""
    path = _cache_path(f"{key} floors", "json")
    if path is None:
        return make()
    if path.exists():
        try:
            return {name: float(value) for name, value in json.loads(path.read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise _unreadable(path, error) from None
    made = make()
    _write(path, lambda file: file.write(json.dumps(made).encode()))
    return made


def _cache_path(key: str, ending: str) -> Path | None:
    folder = os.environ.get("REGARD_CACHE")
    if not folder:
        return None
    digest = hashlib.sha256(f"{GENERATOR_VERSION} {key}".encode()).hexdigest()[:16]
    return Path(folder).expanduser() / f"{key.split('(')[0]}-{digest}.{ending}"


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read ({error}): delete it, and it is made again")


def _read_split(path: Path) -> Examples:
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            found = {name: torch.from_numpy(file[name]) for name in file.files}
        slices = {name.removeprefix(SLICE_PREFIX): x for name, x in found.items() if name.startswith(SLICE_PREFIX)}
        return Examples(found["tokens"], found["targets"], found.get("lengths"), slices)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from None


def _arrays(made: Examples) -> dict[str, np.ndarray]:
    arrays = {"tokens": made.tokens.numpy(), "targets": made.targets.numpy()}
    if made.lengths is not None:
        arrays["lengths"] = made.lengths.numpy()
    return arrays | {SLICE_PREFIX + name: x.numpy() for name, x in made.slices.items()}


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
