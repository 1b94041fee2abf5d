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
    """Report a checkpoint that cannot be used, and what can be used instead.

    The sentence is its one argument.

    >>> from regard.pretrained import load_pretrained
    >>> load_pretrained("no/such/folder")
    Traceback (most recent call last):
    regard.pretrained.checkpoint_files.CheckpointError: ...
    """


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


class TensorLayout(NamedTuple):
    """Describe how a parameter lies in a tensor of a checkpoint: one description for both directions."""

    part: int = 0  # which of the parameters that share the tensor
    parts: int = 1  # how many share it, side by side along their outputs
    heads: int = 1  # or side by side in every head
    turned: bool = False  # weights are (in, out) instead of (out, in)
    skip: int = 0  # rows in front that no position uses
    ones: tuple[int, ...] = ()  # dimensions of size 1 that the tensor has more, in order

    def shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor, from that of the parameter."""
        first, *rest = own
        shape = [first * self.parts + self.skip, *rest]
        if self.turned:
            shape.reverse()
        for dim in self.ones:
            shape.insert(dim, 1)
        return tuple(shape)

    def read(self, x: Tensor) -> Tensor:
        """Return the parameter that lies in a tensor of the right shape."""
        for dim in reversed(self.ones):
            x = x.squeeze(dim)
        x = x.mT if self.turned and x.dim() == 2 else x
        return split(x, self.parts, self.heads)[self.part][self.skip :]

    def write(self, own: Sequence[Tensor]) -> Tensor:
        """Return the tensor of all parameters that share it, in the order of their parts; rows never used are zeros."""
        x = interleave(own, self.heads)
        x = torch.cat([x.new_zeros(self.skip, *x.shape[1:]), x])
        x = x.mT if self.turned and x.dim() == 2 else x
        for dim in self.ones:
            x = x.unsqueeze(dim)
        return x


def interleave(parts: Sequence[Tensor], heads: int = 1) -> Tensor:
    """Join tensors (heads * d, ...) along their outputs; with several heads, the parts of every head lie side by side."""
    if len(parts) == 1:
        return parts[0]
    by_head = [part.unflatten(0, (heads, -1)) for part in parts]
    return torch.stack(by_head, 1).flatten(0, 2)


def split(x: Tensor, parts: int, heads: int = 1) -> list[Tensor]:
    """Undo `interleave`."""
    if parts == 1:
        return [x]
    return [part.flatten(0, 1) for part in x.unflatten(0, (heads, parts, -1)).unbind(1)]


class Take(NamedTuple):
    """Describe the tensor that a parameter is read from, and written to."""

    names: tuple[str, ...]  # of the tensor; of several names one is enough, and all that exist must hold equal tensors
    layout: TensorLayout = TensorLayout()
    default: Callable[[torch.Size], Tensor] | None = None  # the value where the checkpoint has no such tensor
    otherwise: str | None = None  # the tensor whose values it begins with where the checkpoint has none of its own
    frozen: bool = False  # without gradient: a buffer in transformers
    written: bool = True  # False: transformers computes it, so that a checkpoint need not hold it


class Joined(NamedTuple):
    """Describe a parameter that is made of several tensors, which lie side by side along its outputs, or in every head."""

    takes: tuple[Take, ...]
    heads: int = 1


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
        if not present and source.otherwise in self.where:
            present = [source.otherwise]
        if not present and source.default is not None:
            return source.default(shape)
        if not present:
            raise CheckpointError(f"{self.folder} has no tensor {' or '.join(source.names)}: the checkpoint is not complete")
        first, *others = (self[name] for name in present)
        if not all(torch.equal(first, other) for other in others):
            raise CheckpointError(f"by the configuration {' and '.join(present)} are one tensor, but they differ")
        needed = source.layout.shape(shape)
        if tuple(first.shape) != needed:
            raise CheckpointError(f"{present[0]} has shape {tuple(first.shape)}, but the configuration needs {needed}")
        return source.layout.read(first)

    def joined(self, source: Joined, shape: torch.Size) -> Tensor:
        """Return a parameter of this shape, of one tensor or of several."""
        count = len(source.takes)
        part = torch.Size([shape[0] // count, *shape[1:]]) if count > 1 else shape
        return interleave([self.take(take, part) for take in source.takes], source.heads)

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
