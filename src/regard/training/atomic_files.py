"""Files that are whole or not there: every byte that a run keeps is written here."""

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
    """A sentence about a folder that cannot be used as it is, and what to do."""


def write_synced(path: Path, data: bytes) -> None:
    """On the disk when this returns. It may be torn by a crash: give it a temporary name, or use `replace`."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes | str) -> None:
    """The file with this content, whatever happens: the old one or the new one, never a part."""
    torn = path.with_name(f".writing-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(torn, data.encode() if isinstance(data, str) else data)
        os.replace(torn, path)
        sync(path.parent)
    except BaseException as error:
        with suppress(OSError):  # it was never there, or its disk is gone
            torn.unlink()
        if isinstance(error, OSError):
            raise RunError(cannot_write(path, error)) from error
        raise


def sync(folder: Path) -> None:
    """A name in a folder is on the disk only when the folder is."""
    if os.name == "nt":  # there folders cannot be opened, and need not be
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

    return save({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, dict(metadata or {}) or None)


def bytes_to_tensors(data: bytes, path: Path, advice: str) -> dict[str, Tensor]:
    """The tensors in what was read from a file; `advice` says what to do when it is broken."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except SafetensorError as error:
        raise RunError(f"{path} is no whole safetensors file ({error}): {advice}") from None


def read_bytes(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # the second for a name that no file can have
        raise RunError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): {advice}") from None


def read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        found = read_value(read_bytes(path, advice))
    except JsonError as error:
        raise RunError(f"{path} is no whole JSON file ({error}): {advice}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} holds {type(found).__name__} where settings by name should be: {advice}")
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    return bytes_to_tensors(read_bytes(path, "is the path right?"), path, "it was cut off or changed, so take another")
