"""Bounded caches of computed results (plans, edge lists, masks), limited by count and by total size, and a way to clear all."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

import torch

from regard.transforms import needs_plain_ops, untraced

MAX_ELEMENTS = 1 << 24  # elements that one cache holds; the newest result is kept whatever its size
MAX_RESULTS = 64  # results that one cache holds
MAX_SIGNATURES = 512  # results that a cache by signature holds

CachedFunction = TypeVar("CachedFunction", bound=Callable[..., Any])

_clearers: list[Callable[[], None]] = []  # one for every cache of this library
_by_signature: list[dict[Hashable, Any]] = []  # the contents of caches by signature
_cache_lock = Lock()  # of all caches; nothing is computed while it is held
# A fork waits until it is free, so that the child gets consistent caches and a free lock.
os.register_at_fork(before=_cache_lock.acquire, after_in_parent=_cache_lock.release, after_in_child=_cache_lock.release)


def outlives_tracing(f: CachedFunction) -> CachedFunction:
    """Wrap a function whose tensors are cached: they outlive every transform, tracer and inference mode around the call."""

    @wraps(f)
    def wrapped(*args: Any, **options: Any) -> Any:
        if not (torch.is_inference_mode_enabled() or needs_plain_ops()):
            return f(*args, **options)
        with untraced():
            return f(*args, **options)

    return wrapped  # type: ignore[return-value]


def register_cache(clear: Callable[[], None]) -> None:
    """Let `clear_caches` call a function that empties a cache."""
    _clearers.append(clear)


def clear_caches() -> None:
    """Free all results cached between calls: plans, edge lists, masks, parsed texts, scratch buffers. Outputs do not change.

    It has no parameters.

    >>> import regard
    >>> regard.clear_caches()
    """
    with _cache_lock:
        for clear in _clearers:
            clear()


def bounded_cache(size: Callable[[Any], int]) -> Callable[[CachedFunction], CachedFunction]:
    """Decorate a function with a least-recently-used cache, limited by count and by the sum of `size` over its results.

    A result is stored only when it is complete: an interrupted call stores nothing.
    """

    def decorate(f: CachedFunction) -> CachedFunction:
        kept: OrderedDict[Hashable, Any] = OrderedDict()
        make = outlives_tracing(f)

        @wraps(f)
        def cached(*key: Hashable) -> Any:
            with _cache_lock:
                if key in kept:
                    kept.move_to_end(key)
                    return kept[key]
            found = make(*key)
            with _cache_lock:
                kept[key] = found
                while len(kept) > 1 and _over_limit(kept, size):
                    kept.popitem(last=False)
            return found

        cached.kept = kept  # type: ignore[attr-defined]
        register_cache(kept.clear)
        return cached  # type: ignore[return-value]

    return decorate


def _over_limit(kept: OrderedDict[Hashable, Any], size: Callable[[Any], int]) -> bool:
    return len(kept) > MAX_RESULTS or sum(map(size, kept.values())) > MAX_ELEMENTS


def signature_cache(make: CachedFunction) -> CachedFunction:
    """Decorate make(key, *more), whose result depends on the key alone: made once, kept for the newest keys.

    For results such as prepared launches of kernels; `size`, if they have it, counts the numbers they hold. A hit takes no lock.
    """
    kept: dict[Hashable, Any] = {}
    build = outlives_tracing(make)

    @wraps(make)
    def cached(key: Hashable, *more: Any) -> Any:
        found = kept.get(key)
        if found is None:
            found = build(key, *more)
            with _cache_lock:
                kept[key] = found
                while len(kept) > MAX_SIGNATURES or (len(kept) > 1 and sum(map(_held, kept.values())) > MAX_ELEMENTS):
                    del kept[next(iter(kept))]
        return found

    cached.kept = kept  # type: ignore[attr-defined]
    register_cache(kept.clear)
    _by_signature.append(kept)
    return cached  # type: ignore[return-value]


def _held(result: Any) -> int:
    return getattr(result, "size", 0)


def forget_signatures() -> None:
    """Empty all caches by signature: for when what their results were made of changes, such as configurations of kernels."""
    with _cache_lock:
        for kept in _by_signature:
            kept.clear()
