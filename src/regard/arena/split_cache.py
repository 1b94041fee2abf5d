"""Keep generated splits on disk, where REGARD_CACHE names a folder: written whole or not at all, checked when they are read."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from regard.arena.arena_task import Examples
from regard.data.text_files import DataError

GENERATOR_VERSION = 1  # raised when a generator changes: older files are not read again
SLICE_PREFIX = "slice "


def cached_split(key: str, make: Callable[[], Examples]) -> Examples:
    """Return the split of a key from `$REGARD_CACHE`, or make it and keep it there; without that variable, make it."""
    folder = os.environ.get("REGARD_CACHE")
    if not folder:
        return make()
    digest = hashlib.sha256(f"{GENERATOR_VERSION} {key}".encode()).hexdigest()[:16]
    path = Path(folder).expanduser() / f"{key.split('(')[0]}-{digest}.npz"
    if path.exists():
        return _read_split(path)
    made = make()
    _write_split(path, made)
    return made


def _read_split(path: Path) -> Examples:
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            found = {name: torch.from_numpy(file[name]) for name in file.files}
        slices = {name.removeprefix(SLICE_PREFIX): x for name, x in found.items() if name.startswith(SLICE_PREFIX)}
        return Examples(found["tokens"], found["targets"], found.get("lengths"), slices)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}): delete it, and it is made again") from None


def _write_split(path: Path, made: Examples) -> None:
    arrays = {"tokens": made.tokens.numpy(), "targets": made.targets.numpy()}
    if made.lengths is not None:
        arrays["lengths"] = made.lengths.numpy()
    arrays |= {SLICE_PREFIX + name: x.numpy() for name, x in made.slices.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
