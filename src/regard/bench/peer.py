"""Peers: the same or the nearest mechanism of another package, behind one interface.

An adapter of an operation gets q, k, v (b h n d) as the core does, turns them into the tensors that its package is used with
(`prepare`), computes (`run`) and turns the output back (`finish`). Only `run` is timed: every package gets its own layout. An
adapter of a layer is a module from tokens (b n w) to tokens. Weights are copied from the layer of regard where the mathematics
is the same, so that a test can compare the two.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from regard.bench.workload import LAYER, Setting
from regard.mixers.attention import Attention
from regard.mixers.base import Core, Mixer, Places
from regard.spec import Spec

NativeInputs = tuple[Tensor, ...]


class OperationPeer(nn.Module):
    """Base of adapters of an operation. `run` is all that is timed."""

    compiled = False  # by torch.compile: its operations cannot be counted where PyTorch dispatches them

    def prepare(self, q: Tensor, k: Tensor, v: Tensor) -> NativeInputs:
        """Turn q, k, v (b h n d) into the inputs of the package, differentiably."""
        return q, k, v

    def run(self, *inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def finish(self, out: Tensor) -> Tensor:
        """Turn the output of the package into (b h n e)."""
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.finish(self.run(*self.prepare(q, k, v)))


class TokenMajorPeer(OperationPeer):
    """Base of adapters of packages with tensors (b n h d)."""

    def prepare(self, q: Tensor, k: Tensor, v: Tensor) -> NativeInputs:
        return tuple(x.transpose(1, 2) for x in (q, k, v))

    def finish(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2)


class InLayer(nn.Module):
    """Put an operation between the projections of a layer of regard: the layer of a peer that has none of its own."""

    def __init__(self, layer: Attention, operation: OperationPeer) -> None:
        super().__init__()
        self.layer, self.operation = layer, operation

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer.heads(x, Places.of(x))
        y = self.operation(q, k, v).to(x.dtype)
        return self.layer.out(y.transpose(1, 2).flatten(2))


class Muted(contextlib.ExitStack):
    """Drop what a package prints."""

    def __enter__(self) -> Muted:
        super().__enter__()
        self.enter_context(contextlib.redirect_stdout(io.StringIO()))
        self.enter_context(contextlib.redirect_stderr(io.StringIO()))
        return self


@dataclass(frozen=True)
class Peer:
    """Describe a peer: its package, which specs it is for, and how its adapter is made.

    `fits` and `same` get a spec and whether it is causal; `same` is whether both compute the same function. `make` gets the core
    (of an operation) or the layer of regard, and the setting.
    """

    name: str
    package: str  # the name to import
    install: str  # the name for pip
    level: str
    fits: Callable[[Spec, bool], bool]
    make: Callable[[Any, Setting], nn.Module]
    same: Callable[[Spec, bool], bool]
    needs_gpu: bool = False
    note: str = ""

    def missing(self, device: str) -> str:
        """Explain why the peer cannot be measured here; empty if it can."""
        if find_spec(self.package) is None:
            return f"not installed: pip install {self.install}"
        if self.needs_gpu and device != "cuda":
            return "needs a GPU"
        return ""

    def version(self) -> str:
        try:
            return version(self.install)
        except PackageNotFoundError:
            return "unknown"

    def build(self, mixer: Mixer, setting: Setting, level: str) -> nn.Module:
        """Make the adapter for a layer of regard, at the level that is measured."""
        torch.manual_seed(setting.seed)
        if self.level == LAYER:
            return self._placed(self.make(mixer, setting), setting)
        if not isinstance(mixer, Attention):
            raise ValueError(f"{mixer.name} has no operation on q, k, v")
        made = self._placed(self.make(mixer.core, setting), setting)
        return InLayer(mixer, made) if level == LAYER else made  # type: ignore[arg-type]

    @staticmethod
    def _placed(module: nn.Module, setting: Setting) -> nn.Module:
        return module.to(setting.torch_device, setting.torch_dtype)


def always(_spec: Spec, _causal: bool) -> bool:
    return True


def never(_spec: Spec, _causal: bool) -> bool:
    return False


def for_names(*names: str) -> Callable[[Spec, bool], bool]:
    """For mechanisms of these names."""
    return lambda spec, _causal: spec.name in names


def bidirectional(*names: str) -> Callable[[Spec, bool], bool]:
    """For mechanisms of these names where they are not causal."""
    return lambda spec, causal: spec.name in names and not causal


def option(spec: Spec, name: str, default: Any) -> Any:
    """The value of an option of a spec."""
    return spec.options.get(name, default)


def flat_heads(core: Core, x: Tensor) -> Tensor:
    """(b h n d) -> (b h, n, d)."""
    return x.reshape(-1, x.shape[2], core.dims.d)
