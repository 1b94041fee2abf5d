"""A decoding state in buffers that never move or change their shape: what a CUDA graph reads and writes.

The state of any model is a tree of tuples. Tensors of constant shape get a buffer each. A KV cache that grows gets room for
more tokens and becomes a `StaticKVCache`; a cache of a context gets room up to a multiple of `CONTEXT_MULTIPLE`, so that one
graph serves many lengths. Host counters (`start`, `size`) leave the tree: inside a graph, positions are on the device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard.mixers.kv_cache import KVCache, RollingKVCache, StaticContextCache, StaticCursor, StaticKVCache, WriteCursor
from regard.mixers.state import CrossState, State

CONTEXT_MULTIPLE = 32  # tokens: with graphs a context gets room in multiples of so many
SPARE_SHARE = 8  # a cache is given room so that at least 1 / SPARE_SHARE of it is free

RoomFor = Callable[[int], int]  # tokens in a cache -> slots for it


def context_room(size: int) -> int:
    """Return the slots of a cache of `size` tokens to which nothing is appended."""
    return max(1, -(-size // CONTEXT_MULTIPLE)) * CONTEXT_MULTIPLE


def spare_room(size: int, base: int, limit: int | None) -> int:
    """Return the slots of a cache of `size` tokens: base, doubled until enough of it is free, `limit` at most."""
    room = base
    while room - size < max(1, room // SPARE_SHARE):
        room *= 2
    return room if limit is None else max(size + 1, min(room, limit))


def buffer_key(state: Any, room_for: RoomFor) -> Any:
    """Return what two states must have in common to use the same buffers."""
    return _shapes(state, room_for), cache_groups(state)


def _shapes(value: Any, room_for: RoomFor, cross: bool = False) -> Any:
    """Return types, shapes in the buffers, and all that is no tensor."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, KVCache):
        room = context_room(value.size) if cross else room_for(value.size)
        (b, g, _, d), e = value.k.shape, value.v.shape[-1]
        return KVCache, b, g, room, d, e, value.k.dtype, value.v.dtype, value.start if cross else None
    if isinstance(value, State):
        value = value._replace(start=None)
    if isinstance(value, tuple):
        inside = cross or isinstance(value, CrossState)
        return type(value), *(_shapes(part, room_for, inside) for part in value)
    return value


def host_facts(value: Any) -> Any:
    """Return the tree without its tensors: what the host counts."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, tuple):
        parts = [host_facts(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def all_caches(value: Any, cross: bool = False) -> Iterator[tuple[KVCache, bool]]:
    """Yield the caches of a state, and whether each is that of a context."""
    if isinstance(value, KVCache):
        yield value, cross
    elif isinstance(value, tuple):
        for part in value:
            yield from all_caches(part, cross or isinstance(value, CrossState))


def own_caches(state: Any) -> Iterator[KVCache]:
    """Yield the caches of a state that tokens are appended to."""
    return (cache for cache, cross in all_caches(state) if not cross)


def cache_groups(state: Any) -> tuple[int, ...]:
    """Number the caches of a state so that those with the same positions and padding have the same number."""
    known: list[tuple[KVCache, bool]] = []
    groups = []
    for cache, cross in all_caches(state):
        alike = (cross == other_cross and _same_places(cache, other) for other, other_cross in known)
        group = next((i for i, same in enumerate(alike) if same), len(known))
        if group == len(known):
            known.append((cache, cross))
        groups.append(group)
    return tuple(groups)


class StateBuffers:
    """The buffers of one state: `state` is the tree that a captured step extends.

    `load` copies a state of the same `buffer_key` into them, `value` copies it out again as an ordinary state, `store` writes
    what a step has made of `state` back into the buffers.
    """

    def __init__(self, state: Any, room_for: RoomFor) -> None:
        self.room_for = room_for
        self.cursors: dict[int, StaticCursor] = {}  # of caches that grow, by number of their group
        self.contexts: dict[int, StaticCursor] = {}  # of contexts
        self._groups = iter(cache_groups(state))
        self._counts: dict[int, Tensor] = {}  # buffers of `State.t`, which layers share
        self.state = self._static(state)
        self.moved = {id(x): x for x in _tensors(self.state, cross=False)}  # what beams reorder
        self.load(state)

    def _static(self, value: Any, cross: bool = False, rolls: bool = False) -> Any:
        if isinstance(value, Tensor):
            return _blank(value)
        if isinstance(value, KVCache):
            return self._context(value) if cross else self._cache(value, rolls)
        if isinstance(value, State):
            cross = cross or isinstance(value, CrossState)
            t = self._counts.setdefault(id(value.t), _blank(value.t))
            return type(value)(self._static(value.memory, cross), t, None, value.maker)
        if isinstance(value, tuple):
            rolls = getattr(value, "newest_last", False)
            parts = [self._static(part, cross, rolls) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    def _cache(self, cache: KVCache, rolls: bool) -> KVCache:
        room, group = self.room_for(cache.size), next(self._groups)
        if not rolls:
            if group not in self.cursors:
                self.cursors[group] = StaticCursor(_roomy(cache.at, 1, room), _roomy(cache.valid, 1, room))
            return StaticKVCache.of(_roomy(cache.k, 2, room), _roomy(cache.v, 2, room), self.cursors[group])
        return RollingKVCache.of(*(_roomy(x, dim, room) for x, dim in zip(cache[:4], (2, 2, 1, 1), strict=True)))

    def _context(self, cache: KVCache) -> KVCache:
        room, group = context_room(cache.size), next(self._groups)
        if group not in self.contexts:
            self.contexts[group] = StaticCursor(_roomy(cache.at, 1, room), _roomy(cache.valid, 1, room), cache.start)
        return StaticContextCache.of(_roomy(cache.k, 2, room), _roomy(cache.v, 2, room), self.contexts[group])

    def begin(self) -> None:
        """Begin a step: masks of contexts are made anew in it, so that a graph makes them of what was loaded."""
        for cursor in self.contexts.values():
            cursor.renew()

    def load(self, state: Any) -> None:
        """Copy a state into the buffers."""
        self.facts, self.steps = host_facts(state), 0
        done: set[int] = set()
        self._load(self.state, state, done)

    def _load(self, to: Any, value: Any, done: set[int]) -> None:
        if isinstance(to, Tensor):
            if id(to) not in done:
                to.copy_(value)
                done.add(id(to))
        elif isinstance(to, KVCache):
            size, room = value.size, to.size
            first = room - size if isinstance(to, RollingKVCache) else 0
            for x, y, dim in zip(to[:4], value[:4], (2, 2, 1, 1), strict=True):
                if id(x) not in done:
                    x.zero_().narrow(dim, first, size).copy_(y.narrow(dim, 0, size))
                    done.add(id(x))
            if isinstance(to, StaticKVCache):
                to.newest.slot.fill_(size)  # type: ignore[attr-defined]
                to.newest.written = False  # type: ignore[attr-defined]
        elif isinstance(to, tuple):
            for part, own in zip(to, value, strict=True):
                self._load(part, own, done)

    def value(self) -> Any:
        """Return the ordinary state that the buffers hold, as a copy."""
        return self._value(self.state, self.facts, {})

    def _value(self, own: Any, facts: Any, made: dict[int, Any]) -> Any:
        """`made` holds copies by the id of their buffer, and places by the id of their cursor: layers share both."""
        if isinstance(own, Tensor):
            return made.setdefault(id(own), own.clone())
        if isinstance(own, KVCache):
            size = facts.size if isinstance(own, StaticContextCache) else facts.size + self.steps
            first = own.size - size if isinstance(own, RollingKVCache) else 0
            k, v, at, valid = (x.narrow(dim, first, size).clone() for x, dim in zip(own[:4], (2, 2, 1, 1), strict=True))
            cache = facts._replace(k=k, v=v, at=at, valid=valid, size=size, newest=WriteCursor(size), whole=None)
            return cache._replace(whole=made.setdefault(id(own.newest), cache.places))
        if isinstance(own, tuple):
            parts = [self._value(part, fact, made) for part, fact in zip(own, facts, strict=True)]
            value = type(own)(*parts) if hasattr(own, "_fields") else tuple(parts)
            if isinstance(value, State) and facts.start is not None:
                value = value._replace(start=facts.start + self.steps)
            return value
        return facts

    def why_not_static(self, after: Any) -> str | None:
        """Explain why a step that made `after` of `state` cannot be repeated in these buffers; None if it can."""
        if not all(cursor.written for cursor in self.cursors.values()):
            return "one of its caches gets no token in a step"
        return _difference(self.state, after)

    def store(self, after: Any) -> None:
        """Write what a step has made of `state` into the buffers, and move on to the next slot."""
        fresh: dict[int, tuple[Tensor, Tensor]] = {}
        for own, new in _pairs(self.state, after):
            if new is not own:
                fresh[id(own)] = own, new
        held = {_storage(own) for own in _tensors(self.state, cross=True)}
        copies = []
        for _, new in fresh.values():
            copies.append(new.clone() if _storage(new) in held else new)  # a view of a buffer that is overwritten here
        _copy_all([own for own, _ in fresh.values()], copies)
        for cursor in self.cursors.values():
            cursor.advance()

    def reorder(self, rows: Tensor) -> None:
        """Replace every row by another one (r): all that beams of one context do not share."""
        moved = list(self.moved.values())
        _copy_all(moved, [own.index_select(0, rows) for own in moved])


def _storage(x: Tensor) -> int:
    """Identify the memory of a tensor, on the meta device too."""
    return x.untyped_storage()._cdata


def _copy_all(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy tensors of the same shapes, on a GPU by few kernels."""
    if to:
        torch._foreach_copy_(to, values)


def _blank(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _roomy(x: Tensor, dim: int, room: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = room
    return torch.zeros(shape, dtype=x.dtype, device=x.device)


def _same_places(a: KVCache, b: KVCache) -> bool:
    """Tell whether two caches hold the same positions and the same padding."""
    if a.whole is not None and a.whole is b.whole:
        return True
    if a.size != b.size or len(a.at) != len(b.at):
        return False
    if a.plain and b.plain and a.start is not None and b.start is not None:
        return a.start == b.start
    places = ((a.at, b.at), (a.valid, b.valid))
    return all(torch.equal(x[:, : a.size], y[:, : a.size]) for x, y in places)


def _tensors(value: Any, cross: bool) -> Iterator[Tensor]:
    """Yield all tensors of a tree, once or more; cross=False: without those of contexts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) and (cross or not isinstance(value, CrossState)):
        for part in value:
            yield from _tensors(part, cross)


def _pairs(own: Any, new: Any) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(own, Tensor):
        yield own, new
    elif isinstance(own, tuple):
        for x, y in zip(own, new, strict=True):
            yield from _pairs(x, y)


def _difference(own: Any, new: Any) -> str | None:
    """Describe the first part of a state that a step leaves with another type, shape or number."""
    if type(own) is not type(new):
        return f"a {type(own).__name__} of its state becomes a {type(new).__name__}"
    if isinstance(own, Tensor):
        same = own.shape == new.shape and own.dtype == new.dtype
        return None if same else f"a tensor {tuple(own.shape)} of its state becomes {tuple(new.shape)}"
    if isinstance(own, tuple):
        if len(own) != len(new):
            return "its state gets another number of parts"
        return next(filter(None, map(_difference, own, new)), None)
    if isinstance(own, WriteCursor):
        return None
    return None if own == new else f"its state counts on the host: {own!r} becomes {new!r}"
