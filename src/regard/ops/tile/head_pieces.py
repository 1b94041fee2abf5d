"""Which heads are computed together, without repeating the keys and values that they share."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from regard.cache import register_cache

Heads = list[int] | slice


class HeadPiece(NamedTuple):
    """Query heads that are computed together: of one plan, and equally many for each of their key heads."""

    heads: Heads  # those of one key head side by side
    key_heads: Heads
    share: int  # query heads for each key head


@lru_cache(maxsize=256)
def split_heads(heads: tuple[int, ...], share: int, limit: int) -> tuple[HeadPiece, ...]:
    """Split query heads into pieces of at most `limit` heads, with equally many for each key head."""
    by_key: dict[int, list[int]] = {}
    for head in heads:
        by_key.setdefault(head // share, []).append(head)
    by_count: dict[int, list[int]] = {}
    for key_head, own in by_key.items():
        by_count.setdefault(len(own), []).append(key_head)
    pieces = []
    for count, key_heads in by_count.items():
        if count > limit:
            for key_head in key_heads:
                for low in range(0, count, limit):
                    own = by_key[key_head][low : low + limit]
                    pieces.append(HeadPiece(_as_slice(own), _as_slice([key_head]), len(own)))
            continue
        for low in range(0, len(key_heads), limit // count):
            some = key_heads[low : low + limit // count]
            own = [head for key_head in some for head in by_key[key_head]]
            pieces.append(HeadPiece(_as_slice(own), _as_slice(some), count))
    return tuple(pieces)


register_cache(split_heads.cache_clear)


def _as_slice(heads: list[int]) -> Heads:
    """Return consecutive heads as a slice, which takes a view and no copy."""
    if heads == list(range(heads[0], heads[-1] + 1)):
        return slice(heads[0], heads[-1] + 1)
    return heads
