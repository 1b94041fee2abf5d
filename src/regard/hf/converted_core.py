"""A mechanism with parameters inside of a pretrained attention layer, which gives it queries, keys and values alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.mixers.base import Core, Dims, Places
from regard.mixers.feature_math import upcast
from regard.spec import Spec, core


class ConvertedCore(Core):
    """A core that takes plain q (b h n d), k (b g m d), v (b g m e) of a layer with its own scale, and adds what it needs.

    Gates are a linear map of the values of all heads of a token, which are themselves a map of the layer's input; it begins at
    zero, where every gate is half open. Queries are multiplied such that scores of a core with the scale 1 / sqrt(d) have that
    of the layer.
    """

    def __init__(self, spec: Spec, dims: Dims, scaling: float | None = None) -> None:
        super().__init__(replace(dims, dropout=0.0))
        made = _plain_core(spec, dims)
        self.core, self.spec = made, str(spec)
        self.can, self.operations, self.joint, self.learns = made.can, made.operations, made.joint, made.learns
        self.positional = made.positional
        self.gain = 1.0 if scaling is None else scaling * dims.d**0.5
        values, gates = dims.g * dims.e, dims.g * made.gates
        self.gate_map: nn.Linear | None = None
        if gates:
            self.gate_map = nn.Linear(values, gates)
            nn.init.zeros_(self.gate_map.weight)
            nn.init.zeros_(self.gate_map.bias)

    def extra_repr(self) -> str:
        return self.spec

    @property
    def name(self) -> str:
        inner = self._modules.get("core")  # not there while the base class is built
        return inner.name if isinstance(inner, Core) else super().name

    def empty(self, k: Tensor, v: Tensor) -> Any:
        return self.core.empty(self._with_gates(k, v), v)

    def unwritten(self, k: Tensor, v: Tensor) -> Any:
        return self.core.unwritten(self._with_gates(k, v), v)

    def push(self, memory: Any, k: Tensor, v: Tensor, places: Places) -> Any:
        return self.core.push(memory, self._with_gates(k, v), v, places)

    def read(self, memory: Any, q: Tensor, places: Places) -> Tensor:
        return self.core.read(memory, self._scaled(q), places)

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places, query_places: Places) -> Tensor:
        return self.core.read_all(self._scaled(q), self._with_gates(k, v), v, places, query_places)

    def scan(self, memory: Any, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Any]:
        return self.core.scan(memory, self._scaled(q), self._with_gates(k, v), v, places)

    def scan_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        return self.core.scan_all(self._scaled(q), self._with_gates(k, v), v, places)

    def forget(self, memory: Any, t: Tensor) -> Any:
        return self.core.forget(memory, t)

    def watch(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        self.core.watch(self._scaled(q), k, valid)

    def _scaled(self, q: Tensor) -> Tensor:
        return q if self.gain == 1.0 else q * self.gain

    def _with_gates(self, k: Tensor, v: Tensor) -> Tensor:
        """Return keys (b g m d) with the gates of their tokens behind them."""
        if self.gate_map is None:
            return k
        tokens = upcast(v).transpose(1, 2).flatten(2)
        weight, bias = (x.to(tokens.dtype) for x in (self.gate_map.weight, self.gate_map.bias))
        gates = linear(tokens, weight, bias).unflatten(-1, (k.shape[1], -1)).transpose(1, 2)
        return torch.cat([k, gates.to(k.dtype)], -1)


def _plain_core(spec: Spec, dims: Dims) -> Core:
    """Build a core for one query, key and value of each head and token; refuse mechanisms that need other projections."""
    made = core(spec, dims)
    lacking = {
        "more than one query, key and value for each token": made.streams > 1,
        "keys that are its queries": made.shared_qk,
        "fewer outputs than tokens": made.rate > 1,
    }
    for what, needed in lacking.items():
        if needed:
            raise ValueError(f"{spec} has {what}, which the projections q, k, v and o of a pretrained layer do not give")
    return made


def check_attends(spec: Spec) -> None:
    """Refuse a mechanism without queries, keys and values."""
    if not issubclass(spec.row.make, Core):
        raise ValueError(
            f"{spec.name} has no queries, keys and values, but a converted layer keeps its projections q, k, v and o: "
            "take a mechanism such as hedgehog, gla or hybrid"
        )
