"""Scratch buffers of a pass over tiles, and what is computed inside them. They are used again: fresh pages cost much."""

from __future__ import annotations

import math
import threading
from weakref import WeakSet

import torch
from torch import Tensor

from regard.cache import register_cache

MAX_KEPT = 1 << 22  # elements of the largest buffer that is kept between calls


class Scratch:
    """Named buffers on one device. A buffer is overwritten by the next use of its name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return the buffer of a name, with any content."""
        size = math.prod(shape)
        flat = self.flat.get((name, dtype))
        if flat is None or len(flat) < size:
            flat = self._grow(name, dtype, size)
        return flat[:size].view(shape)

    def gather(self, keys: Tensor, values: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Collect the key and value blocks (G blocks c .) of every tile, cols (T p): (G * T, p * c, .) each."""
        found = []
        tiles, p = cols.shape
        index = cols.flatten()
        for name, blocks in (("k", keys), ("v", values)):
            G, _, c, x = blocks.shape
            size = G * tiles * p * c * x
            flat = self.flat.get((name, blocks.dtype))
            if flat is None or len(flat) < size:
                flat = self._grow(name, blocks.dtype, size)
            used = flat[:size]
            torch.index_select(blocks, 1, index, out=used.view(G, tiles * p, c, x))
            found.append(used.view(G * tiles, p * c, x))
        return found[0], found[1]

    def bmm(self, name: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply batches of matrices into a buffer of the accumulating type."""
        if a.dtype != dtype:
            return torch.bmm(a, b, out_dtype=dtype)  # half precision on a GPU: operands stay half, sums are float32
        shape = (a.shape[0], a.shape[1], b.shape[2])
        size = math.prod(shape)
        flat = self.flat.get((name, dtype))
        if flat is None or len(flat) < size:
            flat = self._grow(name, dtype, size)
        return torch.bmm(a, b, out=flat[:size].view(shape))

    def _grow(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        with torch.inference_mode(False):  # a buffer outlives the mode it is made in
            flat = torch.empty(size, dtype=dtype, device=self.device)
        if size <= MAX_KEPT:
            self.flat[name, dtype] = flat
        return flat


def softmax_in_place(s: Tensor) -> Tensor:
    """Turn scores into weights, in place; return their log-sum-exp."""
    top = s.amax(-1)
    torch.softmax(s, -1, out=s) if s.device.type == "cpu" else s.copy_(torch.softmax(s, -1))
    return top - s.amax(-1).log()  # the largest weight is exp(top - lse)


class _ThreadBuffers(threading.local):
    """On a CPU a thread keeps its buffers from call to call: some tens of megabytes, and twice the speed of a short pass."""

    def __init__(self) -> None:
        self.kept = Scratch(torch.device("cpu"))
        _every_scratch.add(self.kept)


_every_scratch: WeakSet[Scratch] = WeakSet()
_thread_buffers = _ThreadBuffers()


def scratch_buffers(device: torch.device) -> Scratch:
    """Return the buffers of this thread on a CPU, new ones on other devices, whose allocator keeps memory itself."""
    if device.type == "cpu":
        return _thread_buffers.kept
    return Scratch(device)


def clear_scratch() -> None:
    """Free the buffers of all threads."""
    for scratch in list(_every_scratch):
        scratch.flat = {}  # a pass that runs now keeps the buffers it has taken


register_cache(clear_scratch)
