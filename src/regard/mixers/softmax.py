"""Softmax attention over all pairs, and other scores and normalisations over all pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from regard.checks import WIDEST, need
from regard.mixers.base import Can, Core, Dims, Places
from regard.mixers.kv_cache import CachedCore, KVCache
from regard.mixers.pattern_attention import PatternAttention, compact_keys, compact_queries, expand_heads
from regard.ops.budget import budget
from regard.ops.dense import sdpa
from regard.ops.strip import in_strips
from regard.ops.tile.tile_op import HeadPatterns, accumulator
from regard.patterns import Everything

SOFTMAX_CLAIMS = Can.CAUSAL | Can.CROSS | Can.PADDING | Can.STREAM | Can.DROPOUT
DOTS = SOFTMAX_CLAIMS | Can.ROTARY | Can.RELATIVE  # claims of scores q.k under a softmax


def default_scale(scale: float | None, d: int) -> float:
    if scale is None:
        return d**-0.5
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not number or not scale > 0:
        raise ValueError(f"scale must be a positive number, not {scale!r}")
    return float(scale)


class Softmax(CachedCore):
    """Every query weighs every key by the softmax of their scaled dot product.

    A = softmax(scale q k^T), out = A v, with scale = 1/sqrt(d) unless given.
    Cost: (d + e) n^2, memory n. Vaswani et al. 2017, arXiv:1706.03762.
    """

    can = DOTS
    positional = False

    def __init__(self, dims: Dims, *, scale: float | None = None) -> None:
        super().__init__(dims)
        self.scale = default_scale(scale, dims.d)
        self.reach = HeadPatterns.of(Everything(), dims.heads)

    def forget(self, memory: KVCache, t: Tensor) -> KVCache:  # noqa: ARG002 - every key can be seen for ever
        return memory

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        drop = self.drop
        if q.shape[2] == 0 or log.size == 0:
            return q.new_zeros(*q.shape[:3], log.v.shape[-1])
        if self.positions is not None:  # scores that the fused kernel cannot take
            return PatternAttention(self.reach, self.scale, causal, drop, self.positions, self.dims.backend)(log, q, places)[0]
        if not causal or q.shape[2] == 1:  # the newest token sees all
            seen, own = log.places, places is log.places  # own: queries are padding where keys are
            mask = seen.sdpa_mask(q.dtype)
            return sdpa(q, log.keys, log.values, scale=self.scale, valid=mask, dropout=drop, keep_empty=own)
        if log.size > q.shape[2]:  # a chunk behind a memory
            return PatternAttention(self.reach, self.scale, True, drop, None, self.dims.backend)(log, q, places)[0]
        k, v, _ = compact_keys(log.keys, log.values, log.places)
        q, back = compact_queries(q, places)  # with real tokens in front, none of them has padding in its past
        out = sdpa(q, k, v, scale=self.scale, causal=True, dropout=drop)
        if back is None:
            return out
        return out.gather(2, back[:, None, :, None].expand_as(out))


class _Strips(CachedCore):
    """Scores of any form, a strip of queries at a time and once more in the backward pass: never n x m at once."""

    can = SOFTMAX_CLAIMS | Can.RELATIVE
    positional = False
    scale = 1.0  # of the scores, for positions that add to them

    def depth(self) -> int:
        """Elements made per pair of query and key."""
        return 1

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What depends on a query or a key alone."""
        raise NotImplementedError

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(b h n m) from prepared queries and keys."""
        raise NotImplementedError

    def normalise(self, s: Tensor, seen: Tensor | None) -> Tensor:
        """A (b h n m), up to `total`; seen broadcasts to (b 1 n m), None: all; a row that sees nothing is all 0."""
        raise NotImplementedError

    def total(self, weights: Tensor, seen: Tensor | None) -> Tensor | float | None:  # noqa: ARG002 - most are normalised
        """What the rows of the weights are still to be divided by, one number or (b h n 1): outputs are fewer than weights."""
        return None

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        acc, positions = accumulator(q.dtype), self.positions
        k, v = expand_heads(log.keys.to(acc), log.values.to(acc), q.shape[1])
        term = None if positions is None else positions.term(q.to(acc), self.scale)
        q, k = self.prepare(q.to(acc), k)
        j, valid = log.places.at, log.places.valid
        rate = self.drop
        ordered = causal and log.plain and log.start == 0 and places.start is not None and places.valid is None

        def strip(end: int, q: Tensor, k: Tensor, v: Tensor, i: Tensor, by_query: Tensor | None) -> tuple[Tensor]:
            """Of queries at positions i, the last of which sees none but the first `last` keys."""
            last = min(log.size, places.start + end) if ordered else log.size  # type: ignore[operator]
            k, v = (x[:, :, :last] for x in (k, v))
            seen = None if valid is None else valid[:, None, None, :last]
            distance = i[:, None, :, None] - j[:, None, None, :last] if causal or term else i
            if causal:
                past = distance >= 0
                seen = past if seen is None else seen & past
            s = self.scores(q, k)
            own = term and term._replace(by_query=by_query)
            if own:
                s = own.add(s, distance)
            a = self.normalise(s, seen)
            total = self.total(a, seen)
            a = dropout(a, rate)
            out = a @ v
            if own and own.mass:
                out = torch.cat([out, own.masses(a, distance)], -1)
            return (out if total is None else out / total,)

        tensors = (q, k, v, places.at, term and term.by_query)
        each = q.shape[0] * q.shape[1] * k.shape[2] * self.depth()
        room = budget(q.device).softmax_strip
        out = in_strips(strip, tensors, 2, each, dims=(2, None, None, 1, 2), room=room, ends=True)[0].to(log.v.dtype)
        if positions is None:
            return out
        return positions.finish(out, v.shape[-1])


def softmax_of_seen(s: Tensor, seen: Tensor | None) -> Tensor:
    """Return the softmax of scores (b h n m) over the keys that are seen, None: all; 0 in a row that sees nothing."""
    if seen is None:
        return s.softmax(-1)
    return s.masked_fill(~seen, -1e30).softmax(-1) * seen


class Additive(_Strips):
    """Similarity learned by a small network instead of a dot product.

    s_ij = w . tanh(Wq q_i + Wk k_j), A = softmax(s), with Wq, Wk, w per head.
    Cost: n^2 hidden, memory n. Bahdanau et al. 2015, arXiv:1409.0473.
    """

    def __init__(self, dims: Dims, *, hidden: int | None = None) -> None:
        super().__init__(dims)
        self.hidden = dims.d if hidden is None else need("hidden", hidden, 1, WIDEST)
        self.wq, self.wk = (nn.Parameter(torch.randn(dims.heads, dims.d, self.hidden) * dims.d**-0.5) for _ in range(2))
        drawn = torch.randn(dims.heads, self.hidden)
        self.w = nn.Parameter(drawn * self.hidden**-0.5)

    def depth(self) -> int:
        return self.hidden

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q @ self.wq.to(q.dtype), k @ self.wk.to(q.dtype)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        made = torch.tanh(q[:, :, :, None] + k[:, :, None])  # (b h strip m hidden)
        return torch.einsum("bhnma,ha->bhnm", made, self.w.to(q.dtype))

    def normalise(self, s: Tensor, seen: Tensor | None) -> Tensor:
        return softmax_of_seen(s, seen)


class Relu(_Strips):
    """No competition between keys: a score below zero simply does not count.

    A = relu(s) / number of visible keys (norm="count"), or relu(s) / sum of relu(s) (norm="sum"), s = scale q k^T.
    Cost: (d + e) n^2, memory n. Wortsman et al. 2023, arXiv:2309.08586.
    """

    can = DOTS

    def __init__(self, dims: Dims, *, norm: str = "count", scale: float | None = None) -> None:
        super().__init__(dims)
        if norm not in ("count", "sum"):
            raise ValueError(f"norm must be 'count' or 'sum', not {norm!r}")
        self.norm, self.scale = norm, default_scale(scale, dims.d)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * self.scale, k

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT

    def normalise(self, s: Tensor, seen: Tensor | None) -> Tensor:
        positive = s.relu()
        return positive if seen is None else positive.masked_fill(~seen, 0)

    def total(self, weights: Tensor, seen: Tensor | None) -> Tensor | float | None:
        if self.norm == "sum":
            found = weights.sum(-1, keepdim=True)
        elif seen is None:
            return weights.shape[-1]
        else:
            found = seen.sum(-1, keepdim=True).to(weights.dtype)
        return torch.where(found > 0, found, 1)


class Values(NamedTuple):
    v: Tensor  # (b g m e)


class Identity(Core):
    """No mixing at all: the control row of every comparison.

    out_i = v_i, A = the identity. Cost: n.
    """

    can = Can.CAUSAL | Can.PADDING | Can.STREAM
    positional, joint = False, True  # the newest tokens answer, as many as there are queries

    def empty(self, k: Tensor, v: Tensor) -> Values:  # noqa: ARG002
        return Values(v[:, :, :0])

    def push(self, memory: Values, k: Tensor, v: Tensor, places: Places) -> Values:  # noqa: ARG002
        return Values(torch.cat([memory.v.to(v.dtype), v], 2))

    def read(self, memory: Values, q: Tensor, places: Places) -> Tensor:  # noqa: ARG002
        own = memory.v[:, :, memory.v.shape[2] - q.shape[2] :]
        return own.repeat_interleave(q.shape[1] // memory.v.shape[1], 1)

    def forget(self, memory: Values, t: Tensor) -> Values:  # noqa: ARG002
        return Values(memory.v[:, :, :0])

    def scan(self, memory: Values, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Values]:
        memory = self.push(Values(memory.v[:, :, :0]), k, v, places)
        return self.read(memory, q, places), memory
