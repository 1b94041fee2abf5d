"""KV caches: an append-only one with room to grow, and static ones of fixed room for CUDA graphs.

Nothing written into a `KVCache` is overwritten, so a state is a value: the newest state is extended in place, an older one is
copied first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.checks import missing_method
from regard.mixers.base import Core, Places

ROOM_MULTIPLE = 32  # room is made in multiples of this many tokens


def with_spare_room(size: int) -> int:
    """Return the growth after which a cache is enlarged or searched: a share of its size, so that this costs O(1) a token."""
    return max(ROOM_MULTIPLE, size // 4)


class WriteCursor:
    """Count the written tokens of a buffer, for all caches on it."""

    def __init__(self, used: int) -> None:
        self.used = used


class KVCache(NamedTuple):
    """Hold keys and values with their positions; only the first `size` slots are used."""

    k: Tensor  # (b g room d)
    v: Tensor  # (b g room e)
    at: Tensor  # (b room)
    valid: Tensor  # (b room)
    size: int
    start: int | None  # on the host: the real tokens of every row are at start, start + 1, ...
    plain: bool  # every token is real
    newest: WriteCursor
    looked: int = 0  # its size when it was last searched for what can be dropped
    whole: Places | None = None  # the places of all its tokens, one object for the caches of all layers; None: made when needed

    @staticmethod
    def empty(k: Tensor, v: Tensor) -> KVCache:
        at, valid = (torch.empty(k.shape[0], 0, dtype=kind, device=k.device) for kind in (torch.long, torch.bool))
        return KVCache(k[:, :, :0], v[:, :, :0], at, valid, 0, None, True, WriteCursor(0))

    @staticmethod
    def whole_of(k: Tensor, v: Tensor, places: Places, looked: int = 0) -> KVCache:
        """Return a cache of these tokens alone, which takes the tensors as they are."""
        n, plain = k.shape[2], places.valid is None
        cursor = WriteCursor(n)
        return KVCache(k, v, places.at, places.real, n, places.start, plain, cursor, looked, places)

    @property
    def keys(self) -> Tensor:
        return self.k if self.k.shape[2] == self.size else self.k[:, :, : self.size]

    @property
    def values(self) -> Tensor:
        return self.v if self.v.shape[2] == self.size else self.v[:, :, : self.size]

    @property
    def places(self) -> Places:
        """The places of its tokens, with the masks that layers share."""
        if self.whole is None:
            return self._places()
        return self.whole

    def _places(self) -> Places:
        return Places(self.at[:, : self.size], None if self.plain else self.valid[:, : self.size], self.start)

    def append(self, k: Tensor, v: Tensor, places: Places) -> KVCache:
        """Return the cache with more tokens."""
        n = k.shape[2]
        if n == 0:
            return self
        traced = torch.is_grad_enabled() and any(x.requires_grad for x in (self.k, self.v, k, v))
        if self.size and not traced:
            return self._written(k, v, places)
        if self.size == 0:  # nothing to join with
            return KVCache.whole_of(k, v, places, self.looked)
        both = zip(self[:4], (k, v, places.at, places.real), (2, 2, 1, 1), strict=True)
        joined = [torch.cat([x.narrow(dim, 0, self.size).to(y.dtype), y], dim) for x, y, dim in both]
        keys, values, at, there = joined
        size = self.size + n
        plain = self.plain and places.valid is None
        log = KVCache(keys, values, at, there, size, self._joined(places), plain, WriteCursor(size), self.looked)
        return self._shared(log, places)

    def _written(self, k: Tensor, v: Tensor, places: Places) -> KVCache:
        """Return the cache with more tokens in its spare room."""
        n, log = k.shape[2], self
        full = self.size + n > self.at.shape[1] or self.newest.used != self.size or self.k.dtype != k.dtype
        if full or (self.k.is_inference() and not torch.is_inference_mode_enabled()):  # those cannot be written to any more
            log = self.with_room(n, k.dtype)
        # autograd may hold views of earlier tokens, which are not overwritten: it need not know of this write
        apart = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        room = [x.data if apart else x for x in log[:4]]
        both = zip(room, (k, v, places.at, places.valid), (2, 2, 1, 1), strict=True)
        for own, given, dim in both:
            if given is not None:  # spare room is as if every token were real
                own.narrow(dim, log.size, n).copy_(given)
        size = log.newest.used = log.size + n
        start = self._joined(places)
        plain = self.plain and places.valid is None
        log = log._replace(size=size, start=start, plain=plain, whole=None)
        return self._shared(log, places)

    def _shared(self, log: KVCache, places: Places) -> KVCache:
        """Give a cache, made of this one and of tokens at `places`, the places that the caches of other layers have."""
        return log if self.whole is None else log._replace(whole=places.behind(self.whole, log._places))

    def _joined(self, places: Places) -> int | None:
        """Return the start of the cache with these tokens behind it; None where rows differ."""
        known = self.start is not None and places.start is not None and self.plain
        return self.start if known and self.start + self.size == places.start else None  # type: ignore[operator]

    def keep(self, alive: Tensor) -> KVCache:
        """Keep the tokens that are alive (b size), in order; rows with fewer get padding behind them."""
        alive = alive & self.valid[:, : self.size]
        count = alive.sum(1)
        size = int(count.max()) if count.numel() else 0
        if size == self.size:
            return self._replace(looked=size)
        order = alive.long().argsort(dim=1, descending=True, stable=True)[:, :size]
        there = torch.arange(size, device=order.device) < count[:, None]
        index = order[:, None, :, None]
        k, v = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (self.keys, self.values))
        at = self.at.gather(1, order)
        plain = bool(there.all())
        run = plain and self.start is not None and size > 0 and int(at[0, -1] - at[0, 0]) == size - 1
        start = int(at[0, 0]) if run else None
        return KVCache(k, v, at, there, size, start, plain, WriteCursor(size), size)

    def row(self, row: int) -> KVCache:
        """Return the real tokens of one row."""
        here = slice(None, self.size) if self.plain else self.valid[row, : self.size].nonzero()[:, 0]
        k = self.k[row : row + 1, :, here]
        v = self.v[row : row + 1, :, here]
        at = self.at[row : row + 1, here]
        size = at.shape[1]
        run = size > 0 and int(at[0, -1] - at[0, 0]) == size - 1
        start = int(at[0, 0]) if run else None
        there = torch.ones_like(at, dtype=torch.bool)
        return KVCache(k, v, at, there, size, start, True, WriteCursor(size))

    def with_room(self, n: int, dtype: torch.dtype) -> KVCache:
        """Return a copy with room for n more tokens and some to spare."""
        room = -(-(self.size + n + with_spare_room(self.size)) // ROOM_MULTIPLE) * ROOM_MULTIPLE
        new = []
        for x, dim in zip(self[:4], (2, 2, 1, 1), strict=True):
            shape = list(x.shape)
            shape[dim] = room
            kind = dtype if dim == 2 else x.dtype
            y = x.new_ones(shape) if x.dtype == torch.bool else x.new_zeros(shape, dtype=kind)
            y.narrow(dim, 0, self.size).copy_(x.narrow(dim, 0, self.size))
            new.append(y)
        k, v, at, valid = new
        return KVCache(k, v, at, valid, self.size, self.start, self.plain, WriteCursor(self.size), self.looked)


class PassCache(KVCache):
    """The tokens of one pass, which is never appended to: positions and the mask are tensors only when something reads them."""

    __slots__ = ()

    @staticmethod
    def of(k: Tensor, v: Tensor, places: Places) -> PassCache:
        n, plain = k.shape[2], places.valid is None
        unmade: Any = None
        return PassCache(k, v, unmade, unmade, n, places.start, plain, WriteCursor(n), 0, places)

    @property
    def at(self) -> Tensor:
        return self.places.at

    @property
    def valid(self) -> Tensor:
        return self.places.real


class StaticCursor:
    """Hold the slot that static caches write to, one for all rows, on the device. Caches that share it share `at` and `valid`.

    `write` is called by every cache that appends a token; the first call of a step writes the position and the mask.
    """

    def __init__(self, at: Tensor, valid: Tensor, start: int | None = None) -> None:
        self.at, self.valid, self.start = at, valid, start  # (b room), (b room), and `Places.start` where it never changes
        self.slot = torch.zeros(1, dtype=torch.long, device=at.device)
        self.written = False  # in this step
        self.renew()

    def write(self, places: Places) -> None:
        if self.written:
            return
        self.at.index_copy_(1, self.slot, places.at)
        self.valid.index_fill_(1, self.slot, True)
        self.written = True
        self.renew()

    def renew(self) -> None:
        """Drop the masks derived from earlier contents: masks of a step belong to it alone."""
        self.places = Places(self.at, self.valid, self.start)

    def advance(self) -> None:
        """End a step: the next token goes into the next slot."""
        self.slot += 1
        self.written = False


class StaticKVCache(KVCache):
    """A cache of fixed room, written in place by a device index: its shapes never change, so a CUDA graph can hold it.

    Slots that hold no token yet are padding: `size` is the whole room and `valid` the only mask. `newest` is a `StaticCursor`.
    """

    __slots__ = ()

    @property
    def places(self) -> Places:
        """The places of all slots, one object for the caches of all layers."""
        return self.newest.places  # type: ignore[attr-defined]

    @staticmethod
    def of(k: Tensor, v: Tensor, cursor: StaticCursor) -> StaticKVCache:
        room = k.shape[2]
        return StaticKVCache(k, v, cursor.at, cursor.valid, room, None, False, cursor, room)  # type: ignore[arg-type]

    def append(self, k: Tensor, v: Tensor, places: Places) -> KVCache:
        """Write one real token of every row into the current slot."""
        _check_one_token(k, places)
        cursor: StaticCursor = self.newest  # type: ignore[assignment]
        cursor.write(places)
        self.k.index_copy_(2, cursor.slot, k.to(self.k.dtype))
        self.v.index_copy_(2, cursor.slot, v.to(self.v.dtype))
        return self


class StaticContextCache(KVCache):
    """A cache of fixed room that nothing is appended to: of a context. `newest` is a `StaticCursor` whose mask layers share."""

    __slots__ = ()

    @property
    def places(self) -> Places:
        """The places of all slots, one object for the caches of all layers."""
        return self.newest.places  # type: ignore[attr-defined]

    @staticmethod
    def of(k: Tensor, v: Tensor, cursor: StaticCursor) -> StaticContextCache:
        room, start = k.shape[2], cursor.places.start
        return StaticContextCache(k, v, cursor.at, cursor.valid, room, start, False, cursor, room)  # type: ignore[arg-type]


class RollingKVCache(KVCache):
    """A cache of fixed room whose newest token is always the last one: to append shifts it by a token.

    For mechanisms whose queries are the newest tokens of the cache. Slots in front that hold no token yet are padding.
    """

    __slots__ = ()

    @staticmethod
    def of(k: Tensor, v: Tensor, at: Tensor, valid: Tensor) -> RollingKVCache:
        room = k.shape[2]
        return RollingKVCache(k, v, at, valid, room, None, False, WriteCursor(room), room)

    def append(self, k: Tensor, v: Tensor, places: Places) -> KVCache:
        """Return a cache with one real token of every row at the end, and without the first slot."""
        _check_one_token(k, places)
        new = (k, v, places.at, torch.ones_like(places.at, dtype=torch.bool))
        shifted = []
        for x, y, dim in zip(self[:4], new, (2, 2, 1, 1), strict=True):
            kept = x.narrow(dim, 1, self.size - 1)
            shifted.append(torch.cat([kept, y.to(x.dtype)], dim))
        return RollingKVCache.of(*shifted)


def _check_one_token(k: Tensor, places: Places) -> None:
    if k.shape[2] != 1 or places.valid is not None:
        raise ValueError("a static cache is extended by one real token of every row at a time")


class CachedCore(Core):
    """A core whose memory is a KV cache."""

    def empty(self, k: Tensor, v: Tensor) -> KVCache:
        return KVCache.empty(k, v)

    def push(self, memory: KVCache, k: Tensor, v: Tensor, places: Places) -> KVCache:
        return memory.append(k, v, places)

    def alive(self, j: Tensor, t: Tensor) -> Tensor:
        """Tell whether a query at position t or later can still see the key at j."""
        return torch.ones_like(j + t, dtype=torch.bool)

    def forget(self, memory: KVCache, t: Tensor) -> KVCache:
        if memory.size - memory.looked < with_spare_room(memory.looked):
            return memory  # a search costs as much as a read: only now and then
        return memory.keep(self.alive(memory.at[:, : memory.size], t[:, None]))

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        """Attend with queries to a cache; causal: only to keys that are not behind them."""
        raise NotImplementedError(
            missing_method(self, "answer(log, q, places, causal)", "the answers (b h n e) of the queries q (b h n d)")
        )

    def read(self, memory: KVCache, q: Tensor, places: Places) -> Tensor:
        return self.answer(memory, q, places, causal=False)

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places, query_places: Places) -> Tensor:
        if k.shape[2] == 0 or type(self).push is not CachedCore.push:
            return super().read_all(q, k, v, places, query_places)
        return self.read(PassCache.of(k, v, places), q, query_places)

    def scan(self, memory: KVCache, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, KVCache]:
        if q.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], v.shape[-1]), memory
        done = self.scan_one(memory, q, k, v, places) if q.shape[2] == 1 else None
        if done is not None:
            return done
        log = memory.append(k, v, places)
        return self.answer(log, q, places, causal=True), log

    def scan_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        if q.shape[2] <= 1 or type(self).scan is not CachedCore.scan:
            return super().scan_all(q, k, v, places)
        return self.answer(PassCache.of(k, v, places), q, places, causal=True)

    def scan_one(self, memory: KVCache, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, KVCache] | None:  # noqa: ARG002
        """Append one token and attend with it by a kernel of its own: out and the cache; None: there is none for this call."""
        return None
