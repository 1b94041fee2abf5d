"""Several models of one shape as one: their weights are rows of one tensor, and every layer is one operation for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.blocks.block import Block
from regard.compare.compared_model import ComparedModel
from regard.compare.stacked_layers import (
    HeadStack,
    JoinedLinears,
    JoinedPart,
    StackedConv,
    StackedEmbedding,
    StackedGMLP,
    StackedLearned,
    StackedLinear,
    StackedNorm,
    StackedWindowFC,
)
from regard.mixers.attention import Attention
from regard.mixers.attention_free import GMLP
from regard.mixers.base import Core, Mixer, refer
from regard.mixers.baselines import Conv, WindowFC
from regard.positions.added import Learned
from regard.spec import Spec

ALIGNED = 4  # weights whose memory begins at so many numbers are read as vectors by products


class CannotStack(ValueError):
    """Report a part whose weights cannot be those of several models at once."""


@dataclass
class Slot:
    """Hold where weights go before each pass: `names` in order, joined along their first dimension, as (m, *shape)."""

    names: tuple[str, ...]
    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    by_heads: bool = False  # a core of all heads gets (m * heads, ...)


@dataclass
class HeadBuffer:
    """Hold a buffer of a core of all heads that training changes: each model has its part of the first dimension."""

    name: str
    owner: nn.Module
    attribute: str


class StackedModel(nn.Module):
    """Run models of one shape as one: tokens (m * b n), those of the first model first, to scores (m * b ...).

    `flat` (m, weights of one model) has the weights of all, a few zeros behind those of each. What a model computes depends on
    its own row alone, and so does the gradient of that row where losses are summed. Raises CannotStack where a part has no form
    for several models. The first model is used up.
    """

    def __init__(self, models: Sequence[ComparedModel]) -> None:
        super().__init__()
        self.count = len(models)
        first = models[0]
        self.shapes = {name: p.shape for name, p in first.named_parameters()}
        if len(list(first.named_parameters(remove_duplicate=False))) != len(self.shapes):
            raise CannotStack("parts share weights")
        self.kept = {name: x for name, x in first.state_dict().items() if name not in self.shapes}
        weights = [dict(model.named_parameters()) for model in models]
        made = _Stacking(models, self.shapes)
        self.model = made.stacked(first, "")
        self.head_buffers = made.head_buffers
        self.slots = sorted(made.slots, key=lambda slot: self._size(slot) % ALIGNED != 0)  # others begin at whole vectors
        named = [name for slot in self.slots for name in slot.names]
        if sorted(named) != sorted(self.shapes):
            raise CannotStack(f"{sorted(set(self.shapes) - set(named))[0]} has no form for several models")
        rows = [torch.cat([own[name].detach().flatten() for name in named]) for own in weights]
        filled = -len(rows[0]) % ALIGNED
        self.flat = nn.Parameter(pad(torch.stack(rows), (0, filled)))
        sizes = [self.shapes[name].numel() for name in named]
        self.spans = dict(zip(named, pairwise([0, *accumulate(sizes)]), strict=True))
        self.sizes = [*map(self._size, self.slots), *([filled] if filled else [])]

    def _size(self, slot: Slot) -> int:
        return sum(self.shapes[name].numel() for name in slot.names)

    def matrices(self) -> Tensor:
        """Return 1 for every weight of a matrix and 0 for those of norms and biases, (weights of one model)."""
        found = torch.zeros_like(self.flat[0])
        for name, (first, last) in self.spans.items():
            found[first:last] = float(len(self.shapes[name]) > 1)
        return found

    def bind(self) -> None:
        """Give every layer its weights: views of `flat`."""
        for slot, part in zip(self.slots, self.flat.split(self.sizes, 1), strict=False):
            x = part.view(self.count, *slot.shape)
            setattr(slot.owner, slot.attribute, x.flatten(0, 1) if slot.by_heads else x)

    def forward(self, tokens: Tensor, valid: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """Return scores, as each model alone does of its own part of the batch."""
        self.bind()
        return self.model(tokens, valid, at)

    def with_hidden(self, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return scores, and those of hidden tokens."""
        self.bind()
        return self.model.with_hidden(tokens, valid)

    def row(self, number: int) -> dict[str, Tensor]:
        """Copy what belongs to one model: its row of `flat`, under an empty name, and buffers that training changes."""
        found = {"": self.flat[number].detach().clone()}
        for own in self.head_buffers:
            parts = getattr(own.owner, own.attribute).unflatten(0, (self.count, -1))
            found[own.name] = parts[number].detach().clone()
        return found

    def weights_of(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of a model alone, on the host, from what `row` gave."""
        flat = row[""].cpu()
        found = {name: flat[first:last].view(self.shapes[name]).clone() for name, (first, last) in self.spans.items()}
        found |= {name: x.detach().cpu() for name, x in self.kept.items()}
        return found | {name: x.cpu() for name, x in row.items() if name}


class _Stacking:
    """Replace the layers of the first model by those of all, and note where their weights go."""

    def __init__(self, models: Sequence[ComparedModel], shapes: dict[str, torch.Size]) -> None:
        self.models, self.count, self.shapes = models, len(models), shapes
        self.slots: list[Slot] = []
        self.head_buffers: list[HeadBuffer] = []

    def stacked(self, module: nn.Module, name: str) -> Any:
        """Return the form of a module for all models; what has no weights stays as it is."""
        form = FORMS.get(type(module))
        if form is not None:
            return form(self, module, name)
        if isinstance(module, Mixer):
            self._check_mixer(module)
        if own := [key for key, p in module._parameters.items() if p is not None]:
            raise CannotStack(f"{type(module).__name__} has weights without a form for several models ({own[0]})")
        self._check_buffers(module, name)
        self._children(module, name)
        if isinstance(module, Block) and module.pre:
            _fold(module.mixer_norm, getattr(module.mixer, "joined", None))
            _fold(getattr(module, "channel_norm", None), getattr(getattr(module, "channel", None), "up", None))
        return module

    @staticmethod
    def _check_mixer(mixer: Mixer) -> None:
        """Refuse a layer that may use the weights of its parts in ways of its own."""
        if not type(mixer).__module__.startswith("regard."):
            raise CannotStack(f"{mixer.name} is of your own: whether it keeps sequences apart is not known")
        if next(mixer.parameters(), None) is not None:
            raise CannotStack(f"{mixer.name} has weights of its own, without a form for several models")

    def _children(self, module: nn.Module, name: str) -> None:
        for key, child in list(module._modules.items()):
            if child is not None:
                module._modules[key] = self.stacked(child, _inside(name, key))

    def _check_buffers(self, module: nn.Module, name: str) -> None:
        """Refuse buffers that differ: all models use those of the first."""
        for key, x in module._buffers.items():
            path = _inside(name, key)
            for other in self.models[1:]:
                if x is not None and not _equal(x, other.get_buffer(path)):
                    raise CannotStack(f"models of other seeds have another {path}")

    def slot(self, owner: nn.Module, attribute: str, *names: str, by_heads: bool = False) -> None:
        """Note that weights of these names are an attribute of a new layer."""
        shapes = [self.shapes[name] for name in names]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        self.slots.append(Slot(names, owner, attribute, shape, by_heads))

    def linear(self, own: nn.Linear, name: str) -> StackedLinear:
        made = StackedLinear(own.out_features, own.bias is not None)
        self.affine(made, name)
        return made

    def affine(self, made: StackedLinear, *names: str) -> None:
        """Note weights, and biases if there are any, of one map or of several that are joined."""
        self.slot(made, "weight", *(_inside(name, "weight") for name in names))
        if made.biased:
            self.slot(made, "bias", *(_inside(name, "bias") for name in names))

    def norm(self, own: nn.LayerNorm | nn.RMSNorm, name: str) -> StackedNorm:
        if len(own.normalized_shape) != 1:
            raise CannotStack("a norm over several dimensions")
        made = StackedNorm(own)
        for key, p in own._parameters.items():
            if p is not None:
                self.slot(made, key, _inside(name, key))
        return made

    def embedding(self, own: nn.Embedding, name: str) -> StackedEmbedding:
        if own.padding_idx is not None or own.max_norm is not None:
            raise CannotStack("an embedding with padding_idx or max_norm")
        made = StackedEmbedding()
        self.slot(made, "weight", _inside(name, "weight"))
        return made

    def whole(self, make: Callable[[Any], nn.Module], own: nn.Module, name: str) -> nn.Module:
        """Make the form of a layer that has weights of its own beside other layers."""
        self._check_buffers(own, name)
        self._children(own, name)
        made = make(own)
        for key, p in own._parameters.items():
            if p is not None:
                self.slot(made, key, _inside(name, key))
        return made

    def attention(self, own: Attention, name: str) -> Attention:
        """Give an attention layer projections of all models, and its core sequences or heads of all models."""
        maps = ["q", "v"] if own.shared_qk else ["q", "k", "v"]
        made = [key for key in maps if type(getattr(own, key)) is nn.Linear]
        core, positions, biased = own.core, own.positions, own.v.bias is not None
        own.core = self._core(core, own, _inside(name, "core"))
        if positions is not None:
            own.positions = self.stacked(positions, _inside(name, "positions"))
        if len(made) == len(maps):
            joined = JoinedLinears([getattr(own, key).out_features for key in maps], biased)
            self.affine(joined, *(_inside(name, key) for key in maps))
            own.add_module("joined", joined)
            for number, key in enumerate(maps):
                setattr(own, key, JoinedPart(joined, number))
        else:
            for key in made:
                setattr(own, key, self.linear(getattr(own, key), _inside(name, key)))
        if own.shared_qk and "k" not in core.ignores:
            refer(own, "k", own.q)
        setattr(own, "out", self.linear(own.out, _inside(name, "out")))  # noqa: B010 - a layer of another type
        return own

    def _core(self, core: Core, own: Attention, name: str) -> Any:
        """Return the core itself where it has no weights: it sees a larger batch. Else one with the heads of all models."""
        if not type(core).__module__.startswith("regard."):
            raise CannotStack(f"{core.name} is of your own: whether it keeps sequences apart is not known")
        learned = [part for part in core.modules() if isinstance(part, Core) and part.learns]
        if not learned and next(core.parameters(), None) is None:
            for key, part in core.named_modules():
                self._check_buffers(part, _inside(name, key))
            return core
        wide = self._wide_core(core, own)
        for key, part in wide.named_modules():
            self._take_heads(part, core.get_submodule(key), _inside(name, key))
        return HeadStack(self.count, wide)

    def _wide_core(self, core: Core, own: Attention) -> Core:
        """Build the same core with the heads of all models."""
        assert own.spec is not None
        if core.positions is not None or own.positions is not None:
            raise CannotStack(f"{core.name} has weights of its own and positions inside of attention")
        dims, count = own.dims, self.count
        groups = None if dims.kv_heads is None else count * dims.kv_heads
        wider = replace(dims, width=count * dims.width, heads=count * dims.heads, kv_heads=groups)
        wide: Any = Spec.parse(own.spec).build(wider).core
        wide.train(core.training)
        for key, part in core.named_modules():
            narrow, broad = (getattr(getattr(x, "reach", None), "each", ()) for x in (part, wide.get_submodule(key)))
            if tuple(broad) != tuple(narrow) * count:
                raise CannotStack(f"{core.name} has weights of its own and a pattern for each head")
        return wide

    def _take_heads(self, wide: nn.Module, narrow: nn.Module, name: str) -> None:
        """Note the weights of a core of all heads, and fill its buffers."""
        for key, p in list(wide._parameters.items()):
            own = narrow._parameters[key]
            if p is None or own is None:
                continue
            if p.shape != (self.count * own.shape[0], *own.shape[1:]):
                raise CannotStack(f"{name}.{key} has no weights of each head")
            del wide._parameters[key]
            self.slot(wide, key, _inside(name, key), by_heads=True)
        for key, x in list(wide._buffers.items()):
            path, own_buffer = _inside(name, key), narrow._buffers[key]
            if x is None or own_buffer is None:
                continue
            if x.shape == own_buffer.shape:
                wide._buffers[key] = own_buffer
                self._check_buffers(narrow, name)
            elif x.shape == (self.count * own_buffer.shape[0], *own_buffer.shape[1:]):
                wide._buffers[key] = torch.cat([model.get_buffer(path) for model in self.models])
                self.head_buffers.append(HeadBuffer(path, wide, key))
            else:
                raise CannotStack(f"{path} has no part of each head")


FORMS: dict[type, Callable[[_Stacking, Any, str], nn.Module]] = {
    nn.Linear: _Stacking.linear,
    nn.LayerNorm: _Stacking.norm,
    nn.RMSNorm: _Stacking.norm,
    nn.Embedding: _Stacking.embedding,
    Attention: _Stacking.attention,
    Learned: lambda made, own, name: made.whole(StackedLearned, own, name),
    Conv: lambda made, own, name: made.whole(StackedConv, own, name),
    WindowFC: lambda made, own, name: made.whole(StackedWindowFC, own, name),
    GMLP: lambda made, own, name: made.whole(StackedGMLP, own, name),
}


def _fold(norm: nn.Module | None, behind: nn.Module | None) -> None:
    """Apply the weights of a norm to those of the map that alone reads it, if both are stacked."""
    if isinstance(norm, StackedNorm) and isinstance(behind, StackedLinear):
        behind.fold(norm)


def _inside(name: str, key: str) -> str:
    return ".".join(part for part in (name, key) if part)


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and (one.is_meta or torch.equal(one, two))
