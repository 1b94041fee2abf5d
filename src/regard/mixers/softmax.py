"""Softmax attention over all pairs, and other scores and normalisations over all pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.checks import WIDEST, need
from regard.mixers.base import Can, Core, Dims, Places
from regard.mixers.kv_cache import CachedCore, KVCache
from regard.mixers.pattern_attention import PatternAttention, compact_keys, compact_queries
from regard.ops.dense import sdpa, unfused_dropout
from regard.ops.dropout_hash import draw_seed
from regard.ops.pair.pair_op import PairCall, pair_attention
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

    def scan_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        plain = self.positions is None and places.valid is None and q.shape[2] > 1
        if not plain or type(self).answer is not Softmax.answer or unfused_dropout(q, k, self.drop):
            return super().scan_all(q, k, v, places)
        return sdpa(q, k, v, scale=self.scale, causal=True, dropout=self.drop)

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        drop = self.drop
        if q.shape[2] == 0 or log.size == 0:
            return q.new_zeros(*q.shape[:3], log.v.shape[-1])
        if self.positions is not None or unfused_dropout(q, log.keys, drop):  # what no fused kernel takes
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


class _AllPairs(CachedCore):
    """Scores of any form over all pairs, by the operation "pair": never n x m at once."""

    can = SOFTMAX_CLAIMS | Can.RELATIVE
    operations = ("pair",)
    positional = False
    scale = 1.0  # of the scores, for positions that add to them

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> PairCall:
        """Return the call that scores and normalises: masks, positions and dropout are not part of it yet."""
        raise NotImplementedError

    def answer(self, log: KVCache, q: Tensor, places: Places, causal: bool) -> Tensor:
        if q.shape[2] == 0 or log.size == 0:
            return q.new_zeros(*q.shape[:3], log.v.shape[-1])
        positions, drop = self.positions, self.drop
        term = None if positions is None else positions.term(q.to(accumulator(q.dtype)), self.scale, places.at)
        call = self.call(q, log.keys, log.values)
        seed = draw_seed(q.device) if drop else None
        call = call._replace(valid=log.places.valid, seed=seed, causal=causal, dropout=drop, bias=term)
        ordered = log.plain and log.start == 0 and places.valid is None
        if ordered and places.start is not None:
            call = call._replace(start=places.start)
        elif causal or term is not None:
            call = call._replace(at=places.at, key_at=log.places.at)
        out = pair_attention(call, self.dims.backend)
        return out if positions is None else positions.finish(out, log.v.shape[-1])


class Additive(_AllPairs):
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

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> PairCall:
        acc, share = accumulator(q.dtype), q.shape[1] // k.shape[1]
        k = k.to(acc)
        if share > 1:
            k = k.repeat_interleave(share, 1)
        return PairCall(q.to(acc) @ self.wq.to(acc), k @ self.wk.to(acc), v, self.w)


class Relu(_AllPairs):
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

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> PairCall:
        return PairCall(q, k, v, norm=self.norm, scale=self.scale)


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
        repeats = q.shape[1] // memory.v.shape[1]
        return own.repeat_interleave(repeats, 1) if repeats > 1 else own

    def forget(self, memory: Values, t: Tensor) -> Values:  # noqa: ARG002
        return Values(memory.v[:, :, :0])

    def scan(self, memory: Values, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Values]:  # noqa: ARG002
        memory = Values(v)
        return self.read(memory, q, places), memory
