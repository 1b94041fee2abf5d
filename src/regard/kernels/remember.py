"""A memory for what was worked out, bounded by what it holds: plans and lists of pairs are small or large as the pattern is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

from regard.kernels.transforms import untraced

ROOM = 1 << 24  # numbers that one function remembers, and the newest result whatever its size
MOST = 64  # results

Made = TypeVar("Made", bound=Callable[..., Any])


def remembered(size: Callable[[Any], int]) -> Callable[[Made], Made]:
    """Remembers the newest results, as many as there is room for: a new graph in every batch must not fill the memory."""

    def around(f: Made) -> Made:
        kept: OrderedDict[Hashable, Any] = OrderedDict()
        lock = Lock()

        @wraps(f)
        def again(*key: Hashable) -> Any:
            with lock:
                if key in kept:
                    kept.move_to_end(key)
                    return kept[key]
            with untraced():  # what is remembered outlives every transform, tracer and mode
                found = f(*key)
            with lock:
                kept[key] = found
                while len(kept) > 1 and (len(kept) > MOST or sum(map(size, kept.values())) > ROOM):
                    kept.popitem(last=False)
            return found

        return again  # type: ignore[return-value]

    return around
