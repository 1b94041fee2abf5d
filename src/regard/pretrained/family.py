"""Describe families of checkpoints: their configuration, and the map from parameters of regard to their tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.stack import Named, Stack
from regard.pretrained.checkpoint_files import CheckpointError, Joined, Take, TensorLayout

HF_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
TensorNames = Mapping[str, str | Take | Joined]


class HFConfig:
    """Access the settings of a config.json by the names of transformers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    def get(self, key: str, default: Any = None) -> Any:
        value = self.settings.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{key} in config.json must be a positive integer, not {value!r}")
        return value

    def first_size(self, *keys: str) -> int:
        """Return a size that configurations have under one of several names."""
        return self.size(next((key for key in keys if self.get(key) is not None), keys[0]))

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{key} in config.json must be a number, not {value!r}")
        return value

    def activation(self, key: str, default: str) -> str:
        name = self.get(key, default)
        if name not in HF_ACTIVATIONS:
            raise CheckpointError(f"{key}={name!r} is not supported: regard has {', '.join(HF_ACTIVATIONS)}")
        return HF_ACTIVATIONS[name]

    def only(self, key: str, allowed: Any) -> None:
        """Refuse a value other than the allowed one, which is also the default of an absent key."""
        value = self.get(key, allowed)
        if value != allowed:
            raise CheckpointError(f"{key}={value!r} is not supported: regard reads such checkpoints with {key}={allowed!r}")

    @property
    def labels(self) -> int:
        return len(self.get("id2label", ())) or self.size("num_labels", 2)


class Family(NamedTuple):
    """Describe checkpoints of one architecture: one table of names, read in both directions."""

    build: Callable[[HFConfig], nn.Module]
    names: Callable[[HFConfig], TensorNames]  # the tensor of each parameter
    only: Mapping[str, Any]  # settings that must have this value where they are present
    prefix: str = ""  # of the names in a file; may be absent where a file is read
    outside: str = ""  # a regular expression of names that never have it
    older: Sequence[tuple[str, str]] = ()  # regular expressions of older names, and replacements
    unneeded: Sequence[str] = ()  # regular expressions of tensors that the model does not use
    saved_as: str | None = None  # the architecture that is written, if the model has less or more than this one
    title: str = ""  # the name of the family in the documentation
    note: str = ""  # what equal outputs depend on, for the documentation

    @property
    def aliases(self) -> list[tuple[str, str]]:
        """Return regular expressions that unify tensor names, and replacements."""
        return [(f"^{re.escape(self.prefix)}", ""), *self.older]

    def written(self, name: str) -> str:
        """Return the name of a tensor in a file of transformers."""
        return name if self.outside and re.match(self.outside, name) else self.prefix + name


def source(names: TensorNames, parameter: str) -> Joined:
    """Return the tensors that a parameter is read from."""
    layer = re.search(r"(?<=blocks\.)\d+", parameter)
    key = parameter if layer is None else f"{parameter[: layer.start()]}{{i}}{parameter[layer.end() :]}"
    module, _, leaf = key.rpartition(".")
    whole = key in names
    end = "" if whole else f".{leaf}"
    i = layer and layer.group()
    return _renamed(names[key if whole else module], lambda name: f"{name}{end}".format(i=i))


def _renamed(value: str | Take | Joined, rename: Callable[[str], str]) -> Joined:
    """Return an entry of a table with other names of its tensors."""
    if isinstance(value, str):
        value = Take((value,))
    if isinstance(value, Take):
        value = Joined((value,))
    takes = [take._replace(names=tuple(rename(name) for name in take.names)) for take in value.takes]  # `otherwise` is in full
    return value._replace(takes=tuple(takes))


def layers(ours: str, theirs: str, names: TensorNames) -> dict[str, str | Take | Joined]:
    """Prefix the names of a layer, for every layer {i} of a stack."""
    return {f"{ours}.blocks.{{i}}.{own}": _renamed(value, lambda name: f"{theirs}.{{i}}.{name}") for own, value in names.items()}


def under(ours: str, names: TensorNames) -> dict[str, str | Take | Joined]:
    """Prefix the names of regard in a table: those of a part of a model."""
    return {f"{ours}.{own}": value for own, value in names.items()}


def conv(name: str, part: int = 0, parts: int = 1) -> Take:
    """Name one of several linear maps that are concatenated along their output, stored as (in, out) instead of (out, in)."""
    return Take((name,), TensorLayout(part, parts, turned=True))


def body(
    width: int,
    heads: int,
    depth: int,
    ffn: Callable[[], nn.Module],
    *,
    specs: Named | Sequence[Named] = "softmax",
    eps: float = 1e-5,
    **options: Any,
) -> Stack:
    """Build a stack of softmax attention, or of other `specs`, with layer norms of this epsilon."""
    norm = partial(nn.LayerNorm, eps=eps)
    return Stack.of(specs, width=width, heads=heads, depth=depth, ffn=ffn, norm_class=norm, **options)


def sinusoidal_table(shape: torch.Size) -> Tensor:
    """Build sinusoidal positions (n w), all sines before all cosines, rounded to float32 as in transformers."""
    n, w = shape
    exponents = torch.arange(0, w, 2, dtype=torch.float64) / w
    angle = torch.arange(n, dtype=torch.float64)[:, None] / 10_000**exponents
    return torch.cat([angle.sin(), angle[:, : w // 2].cos()], 1).float()
