"""States that a decoding step may overwrite: the buffers of a captured step, whose kernels then copy nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


class _Overwritten(threading.local):
    """The ids of tensors that a step may overwrite."""

    ids: frozenset[int] = frozenset()


_overwritten = _Overwritten()


@contextmanager
def overwritten_states(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let a step write states into these very tensors, where its kernel can; the caller keeps them alive."""
    outer, _overwritten.ids = _overwritten.ids, frozenset(map(id, tensors))
    try:
        yield
    finally:
        _overwritten.ids = outer


def may_overwrite(state: Tensor) -> bool:
    """Return whether a kernel that reads each number once, before it writes it, may write into the state itself."""
    return id(state) in _overwritten.ids and state.is_contiguous()
