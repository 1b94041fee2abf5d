"""Read a checkpoint folder: its JSON settings, and its safetensors, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.data.strict_json import read_value

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointError(ValueError):
    """Report a checkpoint that cannot be used, and what can be used instead."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        found = read_value(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a checkpoint is a folder with config.json and {SINGLE_FILE}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold one JSON object, not a {type(found).__name__}")
    return found


class Take(NamedTuple):
    """Describe the tensor that a parameter is read from."""

    names: tuple[str, ...]  # of the tensor; of several names one is enough, and all that exist must hold equal tensors
    convert: Callable[[Tensor], Tensor] = lambda x: x  # from the layout of the checkpoint to that of regard
    default: Callable[[torch.Size], Tensor] | None = None  # the value where the checkpoint has no such tensor
    frozen: bool = False  # without gradient: a buffer in transformers


class CheckpointReader:
    """Read the tensors of a folder, from one file or from several with an index, and record which have been taken.

    `aliases`, pairs of a regular expression and its replacement, are applied to all names first.
    """

    def __init__(self, folder: Path, aliases: Sequence[tuple[str, str]] = ()) -> None:
        self.folder = folder
        self.taken: set[str] = set()
        self.where: dict[str, tuple[Path, str]] = {}  # the file of each tensor, and its name in that file
        self._open: dict[Path, Any] = {}
        for name, path in _shard_index(folder):
            plain = name
            for pattern, text in aliases:
                plain = re.sub(pattern, text, plain)
            if plain in self.where:
                raise CheckpointError(f"{folder} has two tensors for {plain}: {self.where[plain][1]} and {name}")
            self.where[plain] = path, name

    def __getitem__(self, name: str) -> Tensor:
        path, own = self.where[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        self.taken.add(name)
        return self._open[path].get_tensor(own)

    def take(self, source: Take, shape: torch.Size) -> Tensor:
        """Return the tensor of a parameter of this shape, in the layout of regard."""
        present = [name for name in source.names if name in self.where]
        if not present and source.default is not None:
            return source.default(shape)
        if not present:
            raise CheckpointError(f"{self.folder} has no tensor {' or '.join(source.names)}: the checkpoint is not complete")
        first, *others = (self[name] for name in present)
        if not all(torch.equal(first, other) for other in others):
            raise CheckpointError(f"by the configuration {' and '.join(present)} are one tensor, but they differ")
        found = source.convert(first)
        if found.shape != shape:
            raise CheckpointError(
                f"{present[0]} has shape {tuple(first.shape)}, which gives {tuple(found.shape)}, but the configuration "
                f"needs {tuple(shape)}"
            )
        return found

    def check_all_taken(self, unneeded: Iterable[str]) -> None:
        """Raise if a tensor has not been taken, those that match a regular expression of `unneeded` excepted."""
        left = [name for name in self.where if name not in self.taken]
        left = [name for name in left if not any(re.fullmatch(pattern, name) for pattern in unneeded)]
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise CheckpointError(f"this checkpoint has tensors that the model does not use: {', '.join(left[:8])}{more}")


def _shard_index(folder: Path) -> list[tuple[str, Path]]:
    """List every tensor's name and its file."""
    if (folder / SINGLE_FILE).is_file():
        return [(name, folder / SINGLE_FILE) for name in _opened(folder / SINGLE_FILE).keys()]  # noqa: SIM118 - no mapping
    if not (folder / INDEX).is_file():
        if any(folder.glob("pytorch_model*.bin")):
            raise CheckpointError(
                f"{folder} has its weights as pytorch_model.bin, a format that can run code: convert it to safetensors, "
                "with save_pretrained of the transformers library, and load that"
            )
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}")
    names = read_settings(folder / INDEX).get("weight_map")
    if not isinstance(names, Mapping):
        raise CheckpointError(f"{folder / INDEX} has no weight_map, the map from tensors to files")
    present = {path.name for path in folder.iterdir() if path.is_file()}
    for file in names.values():
        if not isinstance(file, str) or file not in present:
            raise CheckpointError(f"{folder / INDEX} names {str(file)[:80]}, which is not in the folder")
    return [(name, folder / file) for name, file in names.items()]


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ModuleNotFoundError("checkpoints need safetensors: pip install safetensors") from None
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
