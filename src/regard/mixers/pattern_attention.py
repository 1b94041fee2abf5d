"""Softmax over the pairs of a pattern, for queries and keys wherever they stand: choosing how to compute it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.mixers.base import Places
from regard.mixers.kv_cache import KVCache
from regard.mixers.places import UnpadOrder
from regard.mixers.position_interface import Positions
from regard.ops.dense import few_queries_attention, merge_by_lse
from regard.ops.ragged import ragged_tile_attention
from regard.ops.score_bias import ScoreBias
from regard.ops.tile.attention import MASKED_SCORE, HeadPatterns, tile_attention
from regard.patterns.tiles import Span
from regard.transforms import needs_lengths, needs_plain_ops

FEW_QUERIES = 16  # queries up to which all keys in the memory are simply looked at


class PatternAttention(NamedTuple):
    """What to compute: softmax(scale * q.k) over the pairs of a pattern, of the past alone if causal."""

    reach: HeadPatterns
    scale: float
    causal: bool
    dropout: float = 0.0
    positions: Positions | None = None  # of those that add to the scores

    def __call__(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """out (b h n e) and log-sum-exp (b h n); q (b h n d)."""
        if q.numel() == 0 or log.size == 0:
            return self._nothing(log, q)
        if self.reach.bends:
            return self._by_length(log, q, places)
        if needs_plain_ops() and places.start is not None and log.start is not None:  # which can follow any number of queries
            return self._tiles(log, q, places)
        if q.shape[2] <= FEW_QUERIES:
            return self._small(log, q, places)
        if places.start is None:
            return self._by_row(log, q, places)
        if log.start is not None:
            return self._tiles(log, q, places)
        return self._beside_memory(log, q, places)

    def _nothing(self, log: KVCache, q: Tensor) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(*q.shape[:3], log.v.shape[-1])
        return out, torch.full(q.shape[:3], MASKED_SCORE, dtype=torch.float32, device=q.device)

    def _small(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        i, j = places.at[:, None, :, None], log.places.at[:, None, None]
        one, *others = self.reach.each
        seen = one(0, i, j)
        if any(p is not one and p != one for p in others):
            seen = torch.cat([seen, *(p(0, i, j) for p in others)], 1)
        if log.places.valid is not None:
            seen = seen & log.places.valid[:, None, None]
        seen = seen & (i >= j) if self.causal else seen
        k, v = expand_heads(log.keys, log.values, q.shape[1])
        out, lse = few_queries_attention(q, k, v, seen, scale=self.scale, dropout=self.dropout, term=self._term(q), apart=i - j)
        return self._finished(out, v), lse

    def _term(self, q: Tensor) -> ScoreBias | None:
        return None if self.positions is None else self.positions.term(q, self.scale)

    def _finished(self, out: Tensor, v: Tensor) -> Tensor:
        return out if self.positions is None else self.positions.finish(out, v.shape[-1])

    def _tiles(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Real tokens of every row side by side, in order: the plan of one row serves all."""
        assert places.start is not None and log.start is not None
        k, v, valid = compact_keys(log.keys, log.values, log.places)
        q, back = compact_queries(q, places)
        k, v = expand_heads(k, v, q.shape[1])
        span = Span(places.start, q.shape[2], log.start, k.shape[2])
        out, lse = tile_attention(
            q, k, v, self.reach, span, scale=self.scale, causal=self.causal, valid=valid, dropout=self.dropout, term=self._term(q)
        )
        return _unpacked(self._finished(out, v), lse, back)

    def _beside_memory(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """A chunk behind a memory with gaps, which is short because it forgets: the chunk by tiles, the memory in full."""
        old = log.size - q.shape[2] if self.causal else log.size
        past = log._replace(size=old, whole=None)
        out = self._small(past, q, places)
        if not self.causal:
            return out
        at, real = (x[:, old : log.size] for x in (log.at, log.valid))
        new = KVCache(
            log.keys[:, :, old:], log.values[:, :, old:], at, real, q.shape[2], places.start, places.valid is None, log.newest
        )
        return merge_by_lse(self._tiles(new, q, places), out)

    def _by_length(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """A pattern that depends on the length is bound to that of every row: real tokens only."""
        if log.start != 0 or places.start != 0:
            raise ValueError(f"{self.reach.text} is drawn for one length: it cannot continue from a memory")
        if log.plain and places.valid is None:
            return self._tiles(log, q, places)
        return self._opaque(log, q, places) if torch.compiler.is_compiling() else self._by_row(log, q, places)

    def _opaque(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """The same for torch.compile, which knows no lengths: real tokens in front, and an operator that counts them."""
        k, v, real = compact_keys(log.keys, log.values, log.places)
        q, back = compact_queries(q, places)
        k, v = expand_heads(k, v, q.shape[1])
        asking, there = (
            torch.full((len(x),), x.shape[2], device=x.device) if valid is None else valid.sum(1)
            for x, valid in ((q, places.valid), (k, real))
        )
        out, lse = ragged_tile_attention(
            *(q, k, v, torch.stack([asking, there], 1), self.reach),
            scale=self.scale,
            causal=self.causal,
            dropout=self.dropout,
            term=self._term(q),
        )
        return _unpacked(self._finished(out, v), lse, back)

    def _by_row(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Rows that stand at different positions or have lengths of their own: one after another, without their padding."""
        needs_lengths(self.reach.text, places.valid)
        found = []
        for row in range(len(q)):
            out, lse = self._nothing(log, q[row : row + 1])
            here = slice(None) if places.valid is None else places.valid[row]
            mine, at = q[row : row + 1, :, here], places.at[row, here]
            if len(at):
                some, sums = self(log.row(row), mine, Places.of(mine[:, 0], start=int(at[0])))
                out, lse = out.to(some.dtype), lse.to(sums.dtype)
                out[:, :, here], lse[:, :, here] = some, sums
            found.append((out, lse))
        return torch.cat([x for x, _ in found]), torch.cat([x for _, x in found])


def expand_heads(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Every query head its own key and value head."""
    share = heads // k.shape[1]
    return (k, v) if share == 1 else (k.repeat_interleave(share, 1), v.repeat_interleave(share, 1))


def _moved(x: Tensor, order: UnpadOrder) -> Tensor:
    return x.gather(2, order.there[:, None, :, None].expand_as(x))


def _unpacked(out: Tensor, lse: Tensor, back: Tensor | None) -> tuple[Tensor, Tensor]:
    """Answers in the order in which queries came."""
    if back is None:
        return out, lse
    return out.gather(2, back[:, None, :, None].expand_as(out)), lse.gather(2, back[:, None].expand_as(lse))


def compact_keys(k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor | None]:
    order = places.unpad_order
    return (k, v, places.valid) if order is None else (_moved(k, order), _moved(v, order), order.real)


def compact_queries(q: Tensor, places: Places) -> tuple[Tensor, Tensor | None]:
    order = places.unpad_order
    return (q, None) if order is None else (_moved(q, order), order.back)
