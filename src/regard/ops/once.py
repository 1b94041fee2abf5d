"""What the layers of one pass need alike is made by the first of them: masks, positions, counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

OnceT = TypeVar("OnceT")


class _Now(threading.local):
    """By what it was made of; None where no pass is on."""

    found: dict[Hashable, tuple[Tensor | None, Any]] | None = None


_now = _Now()


class _Pass:
    def __enter__(self) -> None:
        self.outer = _now.found
        _now.found = {} if self.outer is None else self.outer

    def __exit__(self, *_: object) -> None:
        _now.found = self.outer


def one_pass() -> AbstractContextManager[None]:
    """Until it ends, `once` remembers. No longer: what is made while a CUDA graph is captured has no content outside of it."""
    return nullcontext() if torch.compiler.is_compiling() else _Pass()


def once(what: Hashable, x: Tensor | None, make: Callable[[], OnceT]) -> OnceT:
    """make(), which depends on `what` and on the content of x alone; or what it gave before in this pass. Never change it."""
    found = None if torch.compiler.is_compiling() else _now.found
    if found is None:
        return make()
    key = (what, id(x), 0 if x is None or x.is_inference() else x._version)
    if key not in found:
        found[key] = (x, make())  # with x, so that no other tensor gets its id
    return found[key][1]
