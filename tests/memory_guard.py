"""A guard around the memory of interpreted kernels: every element that is loaded or stored belongs to a tensor of the launch.

On a card an address outside of a tensor is often another tensor's and goes unnoticed, until one day it is nobody's.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class MemoryGuard:
    """The tensors of the current launch, and the places in kernels from which an address outside of them was used."""

    def __init__(self) -> None:
        self.outside: set[str] = set()
        self.launches = 0
        self._first, self._end = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def enter(self, arguments: list) -> None:
        """Remember the memory of the tensors among the arguments of a launch."""
        self.launches += 1
        storages = [x.untyped_storage() for x in arguments if isinstance(x, torch.Tensor)]
        spans = sorted({(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages})
        self._first = np.array([first for first, _ in spans], np.uint64)
        self._end = np.array([end for _, end in spans], np.uint64)

    def check(self, addresses, mask) -> None:
        """Note the line of the kernel if an address that is not masked lies outside."""
        used = addresses.data[np.broadcast_to(mask.data.astype(bool), addresses.data.shape)]
        size = np.uint64(addresses.get_element_ty().primitive_bitwidth // 8)
        at = np.searchsorted(self._first, used, side="right") - 1
        if not ((at >= 0) & (used + size <= self._end[at])).all():
            lines = [f"{x.name}, line {x.lineno}" for x in traceback.extract_stack() if "interpreter" not in x.filename]
            self.outside.add(lines[-3] if len(lines) > 2 else lines[0])


@contextmanager
def guarded_memory() -> Iterator[MemoryGuard]:
    """Watch all launches of interpreted kernels inside."""
    guard = MemoryGuard()
    load, store, arguments = (
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        GridExecutor._init_args_hst,
    )

    def guarded_load(self, addresses, mask, *rest):
        guard.check(addresses, mask)
        return load(self, addresses, mask, *rest)

    def guarded_store(self, addresses, value, mask, *rest):
        guard.check(addresses, mask)
        return store(self, addresses, value, mask, *rest)

    def guarded_arguments(self, args, kwargs):
        found = arguments(self, args, kwargs)
        guard.enter([*found[0], *found[1].values()])
        return found

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = guarded_load, guarded_store
    GridExecutor._init_args_hst = guarded_arguments
    try:
        yield guard
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        GridExecutor._init_args_hst = arguments
