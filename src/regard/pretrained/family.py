"""How a checkpoint is described: what its configuration says, and which of its tensors is which of our parameters."""

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
    """What a configuration says, by their names for it."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.said = said

    def get(self, key: str, otherwise: Any = None) -> Any:
        value = self.said.get(key)
        return otherwise if value is None else value

    def size(self, key: str, otherwise: int | None = None) -> int:
        value = self.get(key, otherwise)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.json must say {key}, a positive integer, not {value!r}")
        return value

    def activation(self, key: str, otherwise: str) -> str:
        name = self.get(key, otherwise)
        if name not in HF_ACTIVATIONS:
            raise CheckpointError(f"{key}={name!r} is not supported: regard knows {', '.join(HF_ACTIVATIONS)}")
        return HF_ACTIVATIONS[name]

    def only(self, key: str, allowed: Any) -> None:
        """Refuse a value other than the one that is allowed, which is also what silence means."""
        value = self.get(key, allowed)
        if value != allowed:
            raise CheckpointError(f"{key}={value!r} is not supported: regard reads such checkpoints with {key}={allowed!r}")

    @property
    def labels(self) -> int:
        return len(self.get("id2label", ())) or self.size("num_labels", 2)


class Family(NamedTuple):
    """Checkpoints that are alike."""

    build: Callable[[HFConfig], nn.Module]
    names: Callable[[HFConfig], TensorNames]  # where each parameter comes from
    only: Mapping[str, Any]  # settings that must have this value if they are there
    aliases: Sequence[tuple[str, str]] = ()  # names of tensors, made alike
    unneeded: Sequence[str] = ()  # tensors that this model has no use for


def source(names: TensorNames, parameter: str) -> Take:
    """Where a parameter of ours comes from."""
    layer = re.search(r"(?<=blocks\.)\d+", parameter)
    key = parameter if layer is None else f"{parameter[: layer.start()]}{{i}}{parameter[layer.end() :]}"
    module, _, leaf = key.rpartition(".")
    whole = key in names
    found = names[key if whole else module]
    take = found if isinstance(found, Take) else Take((found,))
    i = layer and layer.group()
    return take._replace(names=tuple((n if whole else f"{n}.{leaf}").format(i=i) for n in take.names))


def layers(ours: str, theirs: str, names: TensorNames) -> dict[str, str | Take]:
    """The names of every layer, behind what stands in front of them."""
    found: dict[str, str | Take] = {}
    for own, name in names.items():
        take = name if isinstance(name, Take) else Take((name,))
        found[f"{ours}.blocks.{{i}}.{own}"] = take._replace(names=tuple(f"{theirs}.{{i}}.{n}" for n in take.names))
    return found


def conv(name: str, part: int = 0, parts: int = 1) -> Take:
    """One of several linear maps that stand side by side, written as (in, out) instead of (out, in)."""
    return Take((name,), lambda x: (x.mT if x.dim() == 2 else x).chunk(parts)[part])


def sinusoidal_table(shape: torch.Size) -> Tensor:
    """Positions as sines, then cosines: those of the paper in another order, with the digits of float32, as theirs have."""
    n, w = shape
    angle = torch.arange(n, dtype=torch.float64)[:, None] / 10_000 ** (torch.arange(0, w, 2, dtype=torch.float64) / w)
    return torch.cat([angle.sin(), angle[:, : w // 2].cos()], 1).float()
