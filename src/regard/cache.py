"""A memory for what was worked out, bounded by what it holds: plans and lists of pairs are small or large as the pattern is."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

import torch

from regard.transforms import plainly, untraced

ROOM = 1 << 24  # numbers that one function remembers, and the newest result whatever its size
MOST = 64  # results

Made = TypeVar("Made", bound=Callable[..., Any])

_lock = Lock()  # of all memories; nothing is worked out while it is held
# A fork waits until it is free, so that the child gets whole memories and a free lock.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def lasting(f: Made) -> Made:
    """Wrap a function whose tensors are kept, so that they outlive every transform, tracer and inference mode around the call."""

    @wraps(f)
    def made(*args: Any, **more: Any) -> Any:
        if not (torch.is_inference_mode_enabled() or plainly()):
            return f(*args, **more)
        with untraced():
            return f(*args, **more)

    return made  # type: ignore[return-value]


def remembered(size: Callable[[Any], int]) -> Callable[[Made], Made]:
    """Remembers the newest results, as many as there is room for: a new graph in every batch must not fill the memory.

    A result is kept when it is whole, so that an interrupted call leaves nothing behind.
    """

    def around(f: Made) -> Made:
        kept: OrderedDict[Hashable, Any] = OrderedDict()
        make = lasting(f)

        @wraps(f)
        def again(*key: Hashable) -> Any:
            with _lock:
                if key in kept:
                    kept.move_to_end(key)
                    return kept[key]
            found = make(*key)
            with _lock:
                kept[key] = found
                while len(kept) > 1 and (len(kept) > MOST or sum(map(size, kept.values())) > ROOM):
                    kept.popitem(last=False)
            return found

        again.kept = kept  # type: ignore[attr-defined]
        return again  # type: ignore[return-value]

    return around
