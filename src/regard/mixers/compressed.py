"""Compressed keys: consecutive tokens become one, by a convolution whose stride is its width."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.checks import need
from regard.mixers.base import Core, Dims, Places
from regard.mixers.kv_cache import KVCache, WriteCursor, with_spare_room
from regard.mixers.pattern_attention import PatternAttention, compact_keys, compact_queries
from regard.mixers.softmax import SOFTMAX_CLAIMS
from regard.ops.budget import budget
from regard.ops.dense import few_queries_attention, merge_by_lse, sdpa
from regard.ops.stride_merge import StrideSplit, divide_strides, merge_stride_answers
from regard.ops.stride_pool import pool_shared_strides, pool_strides, takes_strides
from regard.ops.strip import in_strips
from regard.ops.tile.tile_op import HeadPatterns, accumulator, tile_attention
from regard.patterns import Blocks, Everything
from regard.patterns.tiles import Span

OutLse = tuple[Tensor, Tensor]  # out and log-sum-exp


class Strides(NamedTuple):
    slots: KVCache  # finished strides, seen as one key and value each, at their number
    raw: KVCache  # the tokens since, from the beginning of a stride on


class Compressed(Core):
    """Memory-compressed attention: every `rate` consecutive keys become one, and so do their values.

    k'_s = sum_u W_u k_(s rate + u), v'_s = sum_u w_u v_(s rate + u), out = softmax(q k'^T / sqrt(d)) v'. The weights are learned
    for each key-value head and start as the mean: w_u is a number, so that out stays a mixture of values, W_u is a number
    (kernel="taps") or a matrix ("full"; in the paper both are matrices). The last stride, if it is not full, sums over the
    tokens that exist and is scaled up by rate / their number.
    Causal: a token sees those of its own stride up to itself, and of `near` strides before it, one by one, and all earlier ones
    through their strides, which are finished: every token of the past is seen exactly once, all in one softmax. (The paper
    masks strides, and leaves what is near to other layers.)
    Cost: (d + e) n^2 / rate + n rate (near + 1), memory n; a stream keeps n / rate. Liu et al. 2018, arXiv:1801.10198.
    """

    can = SOFTMAX_CLAIMS
    operations = ("tile",)  # of the causal form
    positional = False  # a causal query is, and that is for `scan`

    def __init__(self, dims: Dims, *, rate: int = 3, near: int = 0, kernel: str = "taps") -> None:
        super().__init__(dims)
        if kernel not in ("taps", "full"):
            raise ValueError(f"kernel must be 'taps' or 'full', not {kernel!r}")
        self.stride = need("rate", rate, 1, 1024)
        self.near = need("near", near, 0)
        self.scale = dims.d**-0.5
        self.full = kernel == "full"
        mean = torch.full((dims.g, rate), 1 / rate)
        kernel_k = mean[..., None, None] * torch.eye(dims.d) if self.full else mean
        self.kernel_k = nn.Parameter(kernel_k)
        self.kernel_v = nn.Parameter(mean.clone())
        self.local = HeadPatterns.of(Blocks(rate, near), dims.heads)
        self.every = HeadPatterns.of(Everything(), dims.heads * rate)

    def extra_repr(self) -> str:
        return f"rate={self.stride}, near={self.near}"

    def empty(self, k: Tensor, v: Tensor) -> Strides:
        return Strides(KVCache.empty(k, v), KVCache.empty(k, v))

    def push(self, memory: Strides, k: Tensor, v: Tensor, places: Places) -> Strides:
        memory = Strides(memory.slots, _extended(memory.raw, k, v, places))
        later = self.dims.causal or torch.compiler.is_compiling()  # there what is left over has a graph for each length
        return memory if later else self._settled(memory, self.near)  # which `attend` may still scan from, token by token

    def forget(self, memory: Strides, t: Tensor) -> Strides:  # noqa: ARG002 - the cache has the positions
        if memory.raw.size < (self.near + 1) * self.stride:
            return memory
        return self._settled(memory, self.near)

    def read(self, memory: Strides, q: Tensor, places: Places) -> Tensor:
        if self.dims.causal:
            if q.shape[2] > 1:
                raise ValueError("compressed was built with causal=True: it reads one token at a time, and scans many")
            return self._answer(memory, q, places)[0]
        slots, raw = memory
        k, v, valid = slots.keys, slots.values, slots.places.valid
        if raw.size:  # a stride that is not full
            last_k, last_v, there = self._compressed(raw)
            if not (slots.plain and raw.plain) or torch.compiler.is_compiling():
                valid = torch.cat([slots.valid[:, : slots.size], there], 1)
            k = torch.cat([k, last_k], 2)
            v = torch.cat([v, last_v], 2)
        if k.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], v.shape[-1])
        return sdpa(q, k, v, scale=self.scale, valid=valid, dropout=self.drop)

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places, query_places: Places) -> Tensor:
        if self.full or places.valid is not None or not takes_strides(k, v):
            return super().read_all(q, k, v, places, query_places)
        k, v = pool_strides(k, v, self.kernel_k, self.kernel_v)
        return sdpa(q, k, v, scale=self.scale, dropout=self.drop)

    def scan(self, memory: Strides, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Strides]:
        n = q.shape[2]
        if n == 0:
            return q.new_zeros(*q.shape[:3], v.shape[-1]), memory
        later = Strides(memory.slots, _extended(memory.raw, k, v, places))
        few = max(budget(q.device).few_queries, (self.near + 1) * self.stride)
        if later.raw.size > n or memory.slots.size or n <= few:
            return self._answer(later, q, places)[0], later
        k, v, _ = compact_keys(k, v, places)
        q, back = compact_queries(q, places)  # with real tokens in front, none of them has padding in its past
        out = self._all(q, k, v)
        if back is not None:
            out = out.gather(2, back[:, None, :, None].expand_as(out))
        return out, later

    def _all(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every token of a sequence. The queries of one stride see the same slots: as heads of their own, they are causal."""
        h, n = q.shape[1:3]
        first = (self.near + 1) * self.stride  # tokens before this one see no slot
        slots = -(-(n - first) // self.stride)
        if not self.full and takes_strides(k, v):
            split = StrideSplit(first, slots, self.stride)
            k, v, keys, values = pool_shared_strides(k, v, self.kernel_k, self.kernel_v, slots)
            q, asked = divide_strides(q, split)
            return merge_stride_answers(self._near(q, k, v), self._far(asked, keys, values), split)
        out, lse = self._near(q, k, v)
        if torch.compiler.is_compiling():  # one more than needed where all are full, and cut when they are made
            slots = (n - first) // self.stride + 1
            keys, values = (x[:, :, :slots] for x in self._convolved(k, v, None)[:2])
        else:
            keys, values, _ = self._convolved(k[:, :, : slots * self.stride], v[:, :, : slots * self.stride], None)
        size = slots * self.stride
        filled = pad(q[:, :, first:], (0, 0, 0, size + first - n))
        asked = filled.unflatten(2, (slots, self.stride))
        asked = asked.transpose(2, 3).flatten(1, 2)  # (b h*rate slots d)
        far = self._far(asked, keys, values)
        by_stride = [x.unflatten(1, (h, self.stride)).transpose(2, 3) for x in far]
        y, y_lse = (x.flatten(2, 3)[:, :, : n - first] for x in by_stride)
        both, _ = merge_by_lse((out[:, :, first:], lse[:, :, first:]), (y, y_lse))
        return torch.cat([out[:, :, :first], both], 2)

    def _near(self, q: Tensor, k: Tensor, v: Tensor) -> OutLse:
        """Attend with every token of a sequence to those near it."""
        places = Places.of(k[:, 0])
        near = PatternAttention(self.local, self.scale, True, self.drop, None, self.dims.backend)
        return near(KVCache.whole_of(k, v, places), q, places)

    def _far(self, asked: Tensor, keys: Tensor, values: Tensor) -> OutLse:
        """Attend with queries by strides (b h*rate slots d) to slots (b g slots .), causally."""
        slots = asked.shape[2]
        span = Span(0, slots, 0, slots)
        return tile_attention(
            asked, keys, values, self.every, span, scale=self.scale, causal=True, dropout=self.drop, backend=self.dims.backend
        )

    def _answer(self, memory: Strides, q: Tensor, places: Places) -> OutLse:
        """Compute the answers of queries at any positions: from the raw tokens near them, and from the slots before those."""
        slots, raw = memory
        found = PatternAttention(self.local, self.scale, True, self.drop, None, self.dims.backend)(raw, q, places)
        beyond = raw.size > (self.near + 1) * self.stride
        if beyond or torch.is_grad_enabled():  # otherwise all are near; but the weights need a gradient
            k, v, there = self._compressed(raw)
            number = raw.at[:, :1] // self.stride + torch.arange(k.shape[2], device=k.device)
            found = merge_by_lse(found, self._look(q, places, k, v, number, there))
        if slots.size:
            found = merge_by_lse(found, self._look(q, places, slots.keys, slots.values, slots.places.at, slots.places.valid))
        return found

    def _look(self, q: Tensor, places: Places, k: Tensor, v: Tensor, number: Tensor, valid: Tensor | None) -> OutLse:
        """From slots k, v (b g m ...) of the strides numbered (b m), as far as they are behind; a strip of queries at a time."""
        behind = (places.at // self.stride - self.near)[:, None, :, None]

        def strip(q: Tensor, behind: Tensor) -> OutLse:
            seen = number[:, None, None] < behind
            if valid is not None:
                seen = seen & valid[:, None, None]
            out, lse = few_queries_attention(q, k, v, seen, scale=self.scale, dropout=self.drop)
            return out, lse.unsqueeze(-1)

        out, lse = in_strips(strip, (q, behind), 2, q.shape[0] * q.shape[1] * k.shape[2])
        return out, lse.squeeze(-1)

    def _settled(self, memory: Strides, near: int) -> Strides:
        """The memory with all strides turned into slots but the last `near` full ones, and the one that is not full."""
        slots, raw = memory
        rate = self.stride
        size = raw.size
        room = (near + 1) * self.stride
        if not size:
            return memory
        if raw.plain and raw.start is not None:
            whole = size // rate - near
            done = max(0, whole * rate)
            if not done:
                return memory
            k, v, _ = self._convolved(raw.k[:, :, :done], raw.v[:, :, :done], None)
            slots = slots.append(k, v, Places.of(k[:, 0], start=raw.start // rate))
            # copies, or the rest would keep the whole buffer alive
            rest = size - done
            dims = (2, 2, 1, 1)
            k, v, at, valid = (x.narrow(dim, done, rest).clone() for x, dim in zip(raw[:4], dims, strict=True))
            raw = KVCache(k, v, at, valid, rest, raw.start + done, True, WriteCursor(rest))
            return Strides(slots, raw)
        valid = raw.valid[:, :size]
        k, v, real = compact_keys(raw.keys, raw.values, Places(raw.at[:, :size], valid))
        if real is None:
            real = valid
        count, first = real.sum(1, keepdim=True), raw.at[:, :1]
        settled = count // rate - near  # strides of each row
        gone = (settled * rate).clamp_min(0)
        full = size // rate * rate
        new_k, new_v, _ = self._convolved(k[:, :, :full], v[:, :, :full], None)
        number = torch.arange(size // rate, device=k.device)
        finished = (number + 1) * rate <= gone
        slots = slots.append(new_k, new_v, Places(first // rate + number, finished))
        grown = slots.size - slots.looked
        if grown >= with_spare_room(slots.looked) and self.dims.causal:
            slots = slots.keep(slots.valid[:, : slots.size])
        index = gone + torch.arange(room, device=k.device)
        take = index.clamp_max(size - 1)[:, None, :, None]
        k, v = (x.gather(2, take.expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v))
        raw = KVCache(k, v, first + index, index < count, room, None, False, WriteCursor(room))
        return Strides(slots, raw)

    def _compressed(self, raw: KVCache) -> tuple[Tensor, Tensor, Tensor]:
        """Slots of the strides of raw tokens, full or not, and which of them there are (b s)."""
        k, v, real = compact_keys(raw.keys, raw.values, raw.places)
        return self._convolved(k, v, real)

    def _convolved(self, k: Tensor, v: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """As above, of tokens with the real ones in front."""
        (b, _, n, _), rate = k.shape, self.stride
        if real is None and not self.full and takes_strides(k, v):
            k, v = pool_strides(k, v, self.kernel_k, self.kernel_v)
            return k, v, torch.ones(1, 1, dtype=torch.bool, device=k.device).expand(b, k.shape[2])
        strides = -(-n // rate)
        missing = -n % rate
        if torch.compiler.is_compiling():  # two or more, the last never full: graphs differ for sizes of 0 and 1
            strides = max(n // rate + 1, 2)
            missing = strides * rate - n
        if real is None and missing:
            real = torch.ones(b, n, dtype=torch.bool, device=k.device)
        if real is None:
            count = torch.full((1, 1), rate, device=k.device).expand(b, n // rate)
        else:
            k, v = (x.masked_fill(~real[:, None, :, None], 0) for x in (k, v))
            count = pad(real, (0, missing)).unflatten(1, (strides, rate)).sum(2)
        scale, acc = None, accumulator(k.dtype)
        if real is not None:
            scale = rate / count.clamp_min(1).to(acc)
        found = []
        for x, kernel in ((k, self.kernel_k), (v, self.kernel_v)):
            y = x if kernel.dim() == 2 else x.to(acc)
            if missing:
                y = pad(y, (0, 0, 0, missing))
            y = y.unflatten(2, (strides, rate))
            y = _tap_sums(y, kernel) if kernel.dim() == 2 else torch.einsum("guxy,bgsux->bgsy", kernel.to(acc), y)
            if scale is not None:
                y = y * scale[:, None, :, None]
            found.append(y.to(x.dtype))
        return found[0], found[1], count > 0


def _tap_sums(x: Tensor, taps: Tensor) -> Tensor:
    """Return sum_u taps_gu x_bgsux (b g s x) in float32 or better. Products convert what they read: no copy in another type."""
    weights = taps.to(accumulator(x.dtype))[:, :, None, None].unbind(1)
    first, *others = (part * weight for part, weight in zip(x.unbind(3), weights, strict=True))
    for product in others:
        first = first + product
    return first


def _extended(log: KVCache, k: Tensor, v: Tensor, places: Places) -> KVCache:
    """As log.append, without room to spare: this log is short, and most of it soon forgotten."""
    n = k.shape[2]
    if log.size == 0 or n == 0:
        return log.append(k, v, places)
    valid = torch.ones_like(places.at, dtype=torch.bool) if places.valid is None else places.valid
    pairs = zip(log[:4], (k, v, places.at, valid), (2, 2, 1, 1), strict=True)
    joined = [torch.cat([x.narrow(dim, 0, log.size).to(y.dtype), y], dim) for x, y, dim in pairs]
    k, v, at, valid = joined
    known = log.plain and log.start is not None and places.start == log.start + log.size
    start = log.start if known else None
    plain = log.plain and places.valid is None
    size = log.size + n
    return KVCache(k, v, at, valid, size, start, plain, WriteCursor(size))
