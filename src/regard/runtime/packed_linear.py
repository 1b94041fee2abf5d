"""Weights in the order in which a processor reads them: the same product, at the speed of its memory."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.blocks.feedforward import FeedForward

ModuleT = TypeVar("ModuleT", bound=nn.Module)
FUSED_ACTIVATIONS = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}  # oneDNN's names


class PackedLinear(nn.Module):
    """x W^T + b on a CPU by oneDNN, which packs W once; `nn.Linear` gives it to a library that reads it as it lies.

    It holds the weights that were there when it was made, and is not trained. `bent` fuses an activation, `linear_plus` a sum:
    both happen while the product is still in the cache.
    """

    bent = ("none", "")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, self.bent[0], [], self.bent[1])

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """other + x W^T + b."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.packed, self.bias, "add")


def packs(weight: Tensor) -> bool:
    """Is there a packed form for such weights?"""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return there and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


def pack_weights(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The map of these weights, packed where that can be."""
    if packs(weight):
        return PackedLinear(weight, bias)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


def pack_linears(module: ModuleT) -> ModuleT:
    """A module like this one, for inference: its linear maps are packed where they can be, all its other weights are shared."""
    instead: dict[int, object] = {}
    for part in module.modules():
        if type(part) is nn.Linear and packs(part.weight):
            instead[id(part)] = PackedLinear(part.weight, part.bias)
    for weight in (*module.parameters(), *module.buffers()):
        instead[id(weight)] = weight
    made = copy.deepcopy(module, instead)
    for part in made.modules():
        if type(part) is FeedForward and type(part.up) is PackedLinear and not part.gated:
            part.up.bent, part.act = FUSED_ACTIVATIONS[part.activation], _unpacked_module
    return made


def linear_plus(module: nn.Module, x: Tensor, other: Tensor) -> Tensor:
    """other + module(x), for inference."""
    if type(module) is FeedForward and not module.gated:
        return linear_plus(module.down, module.act(module.up(x)), other)
    return module.plus(x, other) if type(module) is PackedLinear else other + module(x)


def _unpacked_module(x: Tensor) -> Tensor:
    return x
