"""Change the order of multiplication: kernels whose memory is a sum over the tokens, of a size that never grows.

    out_i = phi(q_i) S / phi(q_i) . z,   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)

Sums are kept in float32 or better. f is the number of features; the other letters are those of the contract.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels import chunks
from regard.mixers.base import Can, Core, Dims, Places


class Sums(NamedTuple):
    s: Tensor  # (b g f e) sum of phi(k_j) v_j^T
    z: Tensor  # (b g f) sum of phi(k_j)


class Mass(NamedTuple):
    s: Tensor
    z: Tensor
    mass: Tensor  # (b g 1) total weight of the keys: their number, unless a gate weighs them


class Peaks(NamedTuple):
    top: Tensor  # (b g 1) or (b g f) largest log feature so far, -inf before the first; s and z are in units of exp(top)
    s: Tensor
    z: Tensor


class Kernel(Core):
    """What the kernel cores share: one token, or none, is written and read directly; many go through chunks."""

    can = Can.CAUSAL | Can.CROSS | Can.PADDING | Can.STREAM

    def scan(self, memory: Any, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Any]:
        if k.shape[2] > 1:
            out, memory = self._scan(memory, wide(q), wide(k), wide(v), places)
            return out.to(v.dtype), memory
        memory = self.push(memory, k, v, places)
        return self.read(memory, q, places), memory

    def _scan(self, memory: Any, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Any]:
        raise NotImplementedError


class Linear(Kernel):
    """Linear transformer: a kernel that is positive because its features are.

    phi(x) = elu(x) + 1;  out_i = phi(q_i) S / phi(q_i) . z
    Time n d e, memory d (e + 1) whatever n. Katharopoulos et al. 2020, arXiv:2006.16236.
    """

    def empty(self, k: Tensor, v: Tensor) -> Sums:
        return Sums(*nothing(k, v, k.shape[-1]))

    def push(self, memory: Sums, k: Tensor, v: Tensor, places: Places) -> Sums:
        k = self._keys(wide(k), places)
        return Sums(memory.s + k.mT @ wide(v), memory.z + k.sum(2))

    def read(self, memory: Sums, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002 - every query sees all
        q = positive(wide(q))
        return ratio(ask(q, memory.s), ask(q, memory.z.unsqueeze(-1))).to(q.dtype)

    def _scan(self, memory: Sums, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Sums]:
        got = chunks.scan(positive(q), self._keys(k, places), v, *memory)
        return ratio(got.out, got.norm), Sums(got.s, got.z)

    @staticmethod
    def _keys(k: Tensor, places: Places) -> Tensor:
        return only_valid(positive(k), places, 0)
