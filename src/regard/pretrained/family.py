"""Describe families of checkpoints: their configuration, and the map from parameters of regard to their tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.pretrained.checkpoint_files import CheckpointError, Take

HF_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
TensorNames = Mapping[str, str | Take]


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
    """Describe checkpoints of one architecture."""

    build: Callable[[HFConfig], nn.Module]
    names: Callable[[HFConfig], TensorNames]  # the tensor of each parameter
    only: Mapping[str, Any]  # settings that must have this value where they are present
    aliases: Sequence[tuple[str, str]] = ()  # regular expressions that unify tensor names, and replacements
    unneeded: Sequence[str] = ()  # regular expressions of tensors that the model does not use


def source(names: TensorNames, parameter: str) -> Take:
    """Return the tensor that a parameter is read from."""
    layer = re.search(r"(?<=blocks\.)\d+", parameter)
    key = parameter if layer is None else f"{parameter[: layer.start()]}{{i}}{parameter[layer.end() :]}"
    module, _, leaf = key.rpartition(".")
    whole = key in names
    found = names[key if whole else module]
    take = found if isinstance(found, Take) else Take((found,))
    i = layer and layer.group()
    full = take.names if whole else [f"{name}.{leaf}" for name in take.names]
    return take._replace(names=tuple(name.format(i=i) for name in full))


def layers(ours: str, theirs: str, names: TensorNames) -> dict[str, str | Take]:
    """Prefix the names of a layer, for every layer {i} of a stack."""
    found: dict[str, str | Take] = {}
    for own, name in names.items():
        take = name if isinstance(name, Take) else Take((name,))
        found[f"{ours}.blocks.{{i}}.{own}"] = take._replace(names=tuple(f"{theirs}.{{i}}.{n}" for n in take.names))
    return found


def conv(name: str, part: int = 0, parts: int = 1) -> Take:
    """Read one of several linear maps that are concatenated along their output, stored as (in, out) instead of (out, in)."""
    return Take((name,), lambda x: (x.mT if x.dim() == 2 else x).chunk(parts)[part])


def sinusoidal_table(shape: torch.Size) -> Tensor:
    """Build sinusoidal positions (n w), all sines before all cosines, rounded to float32 as in transformers."""
    n, w = shape
    exponents = torch.arange(0, w, 2, dtype=torch.float64) / w
    angle = torch.arange(n, dtype=torch.float64)[:, None] / 10_000**exponents
    return torch.cat([angle.sin(), angle[:, : w // 2].cos()], 1).float()
