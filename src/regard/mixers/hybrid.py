"""Two memories in one layer: exact attention in a window, and kernelized attention to everything, of constant size."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.mixers import exp_features, gated, hedgehog  # noqa: F401 - modules whose kernels `far_kernels` finds
from regard.mixers.base import Can, Core, Dims, Places
from regard.mixers.head_readout import refuse_readout
from regard.mixers.kv_cache import KVCache
from regard.mixers.linear_attention import Kernel
from regard.mixers.sparse import Sparse
from regard.ops.gated_merge import gated_merge
from regard.patterns import Pattern
from regard.text import parse_choice


class Halves(NamedTuple):
    near: KVCache
    far: Any


class Hybrid(Core):
    """Softmax over what is near and a kernel over everything, of the same q, k, v, merged by a learned gate per head.

    out = sigmoid(g_h) far + (1 - sigmoid(g_h)) near, near = sparse(pattern), far = a kernel by its text: "linear", "gla",
    "delta(gated=True)"; `share` is sigmoid(g_h) at first. Cost: that of its parts, n for a window.
    Munkhdalai et al. 2024, arXiv:2404.07143, where far holds what has left the window and here holds all; Arora et al. 2024,
    arXiv:2402.18668, alternates the two in layers of their own.
    """

    can = Can.CAUSAL | Can.CROSS | Can.PADDING | Can.STREAM
    operations: tuple[str, ...] = ("tile",)  # and that of far

    def __init__(self, dims: Dims, *, pattern: Pattern | str = "Local(64)", far: str = "linear", share: float = 0.5) -> None:
        super().__init__(dims)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise ValueError(f"share must be a number between 0 and 1, the weight of far at first, not {share!r}")
        self.near = Sparse(dims, pattern=pattern)
        self.far = _kernel(far, dims)
        self.operations = (*self.near.operations, *self.far.operations)
        self.can = self.can & self.near.can & self.far.can
        self.gates, self.positional = self.far.gates, self.near.positional or self.far.positional
        self.joint = self.near.joint
        self.gate = nn.Parameter(torch.full((dims.heads,), math.log(share / (1 - share))))

    def empty(self, k: Tensor, v: Tensor) -> Halves:
        near = self.near.empty(self._plain(k), v)
        return Halves(near, self.far.empty(k, v))

    def push(self, memory: Halves, k: Tensor, v: Tensor, places: Places) -> Halves:
        near = self.near.push(memory.near, self._plain(k), v, places)
        return Halves(near, self.far.push(memory.far, k, v, places))

    def read(self, memory: Halves, q: Tensor, places: Places) -> Tensor:
        near = self.near.read(memory.near, q, places)
        return gated_merge(near, self.far.read(memory.far, q, places), self.gate)

    def forget(self, memory: Halves, t: Tensor) -> Halves:
        return Halves(self.near.forget(memory.near, t), self.far.forget(memory.far, t))

    def watch(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        self.far.watch(q, k, valid)

    def scan(self, memory: Halves, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Halves]:
        near, log = self.near.scan(memory.near, q, self._plain(k), v, places)
        far, sums = self.far.scan(memory.far, q, k, v, places)
        return gated_merge(near, far, self.gate), Halves(log, sums)

    def _plain(self, k: Tensor) -> Tensor:
        """Keys without the gates of far."""
        return k[..., : self.dims.d]


def far_kernels() -> dict[str, type[Kernel]]:
    """Return every kernelized attention by its name: the public subclasses of Kernel."""
    every = list(Kernel.__subclasses__())
    for kernel in every:  # grows
        every += kernel.__subclasses__()
    public = [kernel for kernel in every if not kernel.__name__.startswith("_")]
    return {kernel.__name__.lower(): kernel for kernel in public}


def _kernel(text: str, dims: Dims) -> Kernel:
    if not isinstance(text, str):
        raise ValueError(f"far must be the text of a kernel, such as 'linear', 'gla' or 'delta(gated=True)', not {text!r}")
    made = parse_choice(text, far_kernels())(dims)
    refuse_readout(made, "far is a part of one: leave them out")
    return made
