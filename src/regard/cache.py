"""A memory for what was worked out, bounded by what it holds: plans and lists of pairs are small or large as the pattern is."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

import torch

from regard.transforms import needs_plain_ops, untraced

MAX_ELEMENTS = 1 << 24  # numbers that one function remembers, and the newest result whatever its size
MAX_RESULTS = 64  # results

CachedFunction = TypeVar("CachedFunction", bound=Callable[..., Any])

_clearers: list[Callable[[], None]] = []  # one for every cache of this library
_cache_lock = Lock()  # of all memories; nothing is worked out while it is held
# A fork waits until it is free, so that the child gets whole memories and a free lock.
os.register_at_fork(before=_cache_lock.acquire, after_in_parent=_cache_lock.release, after_in_child=_cache_lock.release)


def outlives_tracing(f: CachedFunction) -> CachedFunction:
    """Wrap a function whose tensors are kept, so that they outlive every transform, tracer and inference mode around the call."""

    @wraps(f)
    def made(*args: Any, **more: Any) -> Any:
        if not (torch.is_inference_mode_enabled() or needs_plain_ops()):
            return f(*args, **more)
        with untraced():
            return f(*args, **more)

    return made  # type: ignore[return-value]


def register_cache(clear: Callable[[], None]) -> None:
    """Let `clear_caches` call a function that empties a cache."""
    _clearers.append(clear)


def clear_caches() -> None:
    """Free what was cached between calls: plans, edge lists, masks, parsed texts, scratch buffers. Results do not change."""
    with _cache_lock:
        for clear in _clearers:
            clear()


def bounded_cache(size: Callable[[Any], int]) -> Callable[[CachedFunction], CachedFunction]:
    """Remembers the newest results, as many as there is room for: a new graph in every batch must not fill the memory.

    A result is kept when it is whole, so that an interrupted call leaves nothing behind.
    """

    def around(f: CachedFunction) -> CachedFunction:
        kept: OrderedDict[Hashable, Any] = OrderedDict()
        make = outlives_tracing(f)

        @wraps(f)
        def again(*key: Hashable) -> Any:
            with _cache_lock:
                if key in kept:
                    kept.move_to_end(key)
                    return kept[key]
            found = make(*key)
            with _cache_lock:
                kept[key] = found
                while len(kept) > 1 and (len(kept) > MAX_RESULTS or sum(map(size, kept.values())) > MAX_ELEMENTS):
                    kept.popitem(last=False)
            return found

        again.kept = kept  # type: ignore[attr-defined]
        register_cache(kept.clear)
        return again  # type: ignore[return-value]

    return around
