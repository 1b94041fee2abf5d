"""Atomic, durable files: every file of a run is written through these functions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.data.strict_json import JsonError, read_value


class RunError(ValueError):
    """Report a run folder that cannot be used, and how to repair it."""


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and sync it to disk. A crash may leave a part of it: use a temporary name, or `replace`."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes | str) -> None:
    """Write a file atomically: a crash leaves the old content or the new one, never a part."""
    torn = path.with_name(f".writing-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(torn, data.encode() if isinstance(data, str) else data)
        os.replace(torn, path)
        sync(path.parent)
    except BaseException as error:
        with suppress(OSError):  # it does not exist, or its disk failed
            torn.unlink()
        if isinstance(error, OSError):
            raise RunError(cannot_write(path, error)) from error
        raise


def sync(folder: Path) -> None:
    """Sync a folder to disk, which makes new names in it durable."""
    if os.name == "nt":  # folders cannot be opened there, and need not be
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cannot_write(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror or error}. Nothing was left half-written; make room or choose another folder"


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tensors_to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    plain = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    return save(plain, dict(metadata or {}) or None)


def bytes_to_tensors(data: bytes, path: Path, advice: str) -> dict[str, Tensor]:
    """Decode the content of a safetensors file; `advice` is appended to error messages."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except SafetensorError as error:
        raise RunError(f"{path} is not a whole safetensors file ({error}): {advice}") from None


def read_bytes(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError for invalid file names
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{path} cannot be read ({why}): {advice}") from None


def read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        found = read_value(read_bytes(path, advice))
    except JsonError as error:
        raise RunError(f"{path} is not a whole JSON file ({error}): {advice}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} holds {type(found).__name__} where settings by name should be: {advice}")
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    data = read_bytes(path, "is the path right?")
    return bytes_to_tensors(data, path, "it was cut off or changed, so take another")
