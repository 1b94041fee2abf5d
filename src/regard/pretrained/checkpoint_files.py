"""A folder with a checkpoint: what its configuration says, and its tensors, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.data.strict_json import read_value

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A sentence about a checkpoint that cannot be used as it is, and what can be."""


def read_settings(path: Path) -> dict[str, Any]:
    """A file of settings."""
    try:
        found = read_value(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there: a checkpoint is a folder with config.json and {WHOLE}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold one JSON object, not a {type(found).__name__}")
    return found


class Take(NamedTuple):
    """Where a parameter comes from."""

    names: tuple[str, ...]  # of its tensor; where it has several, one is enough, and all that are there must agree
    turn: Callable[[Tensor], Tensor] = lambda x: x  # from their layout to ours
    otherwise: Callable[[torch.Size], Tensor] | None = None  # what it is where the checkpoint does not say
    fixed: bool = False  # not for training: theirs is no parameter


class CheckpointReader:
    """The tensors of a folder, from one file or from several with an index. Knows which of them have been taken.

    Names are read after `aliases`, pairs of a regular expression and what stands for it, have been applied to them.
    """

    def __init__(self, folder: Path, aliases: Sequence[tuple[str, str]] = ()) -> None:
        self.folder, self.taken = folder, set[str]()
        self.where: dict[str, tuple[Path, str]] = {}  # the file of each tensor, and what it is called there
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
        """The tensor of a parameter of this shape, in our layout."""
        there = [name for name in source.names if name in self.where]
        if not there and source.otherwise is not None:
            return source.otherwise(shape)
        if not there:
            raise CheckpointError(f"{self.folder} has no tensor {' or '.join(source.names)}: the checkpoint is not complete")
        first, *others = (self[name] for name in there)
        if not all(torch.equal(first, other) for other in others):
            raise CheckpointError(f"the configuration says that {' and '.join(there)} are one tensor, but they differ")
        found = source.turn(first)
        if found.shape != shape:
            raise CheckpointError(
                f"{there[0]} has shape {tuple(first.shape)}, which gives {tuple(found.shape)}, but the configuration "
                f"asks for {tuple(shape)}"
            )
        return found

    def check_all_taken(self, unneeded: Iterable[str]) -> None:
        """Nothing is left but what is known to be of no use, by regular expressions."""
        left = [n for n in self.where if n not in self.taken and not any(re.fullmatch(u, n) for u in unneeded)]
        if left:
            some = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
            raise CheckpointError(f"this checkpoint has tensors that regard does not know: {some}")


def _shard_index(folder: Path) -> list[tuple[str, Path]]:
    """Every tensor's name and the file it is in."""
    if (folder / WHOLE).is_file():
        return [(name, folder / WHOLE) for name in _opened(folder / WHOLE).keys()]  # noqa: SIM118 - no mapping
    if not (folder / INDEX).is_file():
        if any(folder.glob("pytorch_model*.bin")):
            raise CheckpointError(
                f"{folder} has its weights as pytorch_model.bin, a format that can run code: convert it to safetensors, "
                "with save_pretrained of the transformers library, and load that"
            )
        raise CheckpointError(f"{folder} has neither {WHOLE} nor {INDEX}")
    names = read_settings(folder / INDEX).get("weight_map")
    if not isinstance(names, Mapping):
        raise CheckpointError(f"{folder / INDEX} has no weight_map, which says in which file each tensor is")
    there = {path.name for path in folder.iterdir() if path.is_file()}
    for file in names.values():
        if not isinstance(file, str) or file not in there:
            raise CheckpointError(f"{folder / INDEX} speaks of {str(file)[:80]}, which is not in the folder")
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
