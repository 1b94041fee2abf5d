"""Transforms of modules for inference: linear maps packed for a CPU, queries, keys and values as one product."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.blocks.feedforward import FeedForward
from regard.mixers.attention import Attention

ModuleT = TypeVar("ModuleT", bound=nn.Module)
FUSED_ACTIVATIONS = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}  # oneDNN's names


class PackedLinear(nn.Module):
    """x W^T + b on a CPU by oneDNN, with W in its own packed order: `nn.Linear` calls a library that reads W as it is stored.

    It holds the weights as they were when it was made, and is not trained. `activation` is fused into the product, and `plus` a
    sum: both are computed while the product is still in the cache of the CPU.
    """

    activation = ("none", "")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        name, algorithm = self.activation
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, name, [], algorithm)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return other + x W^T + b."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.packed, self.bias, "add")


def packs(weight: Tensor) -> bool:
    """Tell whether there is a packed form of such weights."""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return there and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


def pack_weights(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return the linear map of these weights, packed where that is possible."""
    return PackedLinear(weight, bias) if packs(weight) else _linear(weight, bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an `nn.Linear` with these weights, not trained."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


class FusedLinear(nn.Module):
    """Several linear maps of the same input by one product: a tuple of (... out_i). For inference."""

    def __init__(self, maps: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [one.out_features for one in maps]
        weight = torch.cat([one.weight.detach() for one in maps])
        bias = None if maps[0].bias is None else torch.cat([one.bias.detach() for one in maps])
        self.map = _linear(weight, bias)

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        return self.map(x).split(self.sizes, -1)


class FusedPart(nn.Module):
    """One of the maps of a `FusedLinear`, where it is called by itself. `mixers.attention.fused_linear` calls `fused`."""

    def __init__(self, fused: FusedLinear, number: int) -> None:
        super().__init__()
        self.fused, self.number = fused, number

    @property
    def weight(self) -> Tensor:
        return self.fused.map.weight.split(self.fused.sizes)[self.number]

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)[self.number]


def fuse_qkv(module: ModuleT) -> ModuleT:
    """Return a copy for inference in which queries, keys and values of causal attention are one product.

    All other weights are shared. Maps that are no plain `nn.Linear`, or of which only some have a bias, stay as they are.
    """
    made = inference_copy(module, {})
    for part in made.modules():
        if isinstance(part, Attention) and part.dims.causal:
            names = ("q", "v") if part.shared_qk else ("q", "k", "v")
            _fuse(part, names)
    return made


def _fuse(attention: Attention, names: Sequence[str]) -> None:
    maps = [getattr(attention, name) for name in names]
    if any(type(one) is not nn.Linear for one in maps) or len({one.bias is None for one in maps}) > 1:
        return
    fused = FusedLinear(maps)
    for number, name in enumerate(names):
        setattr(attention, name, FusedPart(fused, number))
    if attention.shared_qk:
        attention.__dict__["k"] = attention.q


def pack_linears(module: ModuleT) -> ModuleT:
    """Return a copy for inference: its linear maps are packed where they can be, all its other weights are shared.

    `module` is any module; it stays as it is.

    >>> import torch
    >>> from regard.decoding import pack_linears
    >>> module, x = torch.nn.Linear(8, 8).eval(), torch.randn(2, 8)
    >>> torch.allclose(pack_linears(module)(x), module(x), atol=1e-5)
    True
    """
    instead: dict[int, object] = {}
    for part in module.modules():
        if type(part) is nn.Linear and packs(part.weight):
            instead[id(part)] = PackedLinear(part.weight, part.bias)
    made = inference_copy(module, instead)
    for part in made.modules():
        if type(part) is FeedForward and type(part.up) is PackedLinear and not part.gated:
            part.up.activation, part.act = FUSED_ACTIVATIONS[part.activation], _identity
    return made


def inference_copy(module: ModuleT, instead: dict[int, object]) -> ModuleT:
    """Copy a module with its weights shared, and with some of its parts replaced, by their id."""
    shared = {id(weight): weight for weight in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, {**instead, **shared})


def linear_plus(module: nn.Module, x: Tensor, other: Tensor) -> Tensor:
    """Return other + module(x), for inference."""
    if type(module) is FeedForward and not module.gated:
        return linear_plus(module.down, module.act(module.up(x)), other)
    return module.plus(x, other) if type(module) is PackedLinear else other + module(x)


def _identity(x: Tensor) -> Tensor:
    return x
