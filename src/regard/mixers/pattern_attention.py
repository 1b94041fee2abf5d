"""Softmax over the pairs of a pattern, for queries and keys at any positions: choosing how to compute it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.mixers.base import Places
from regard.mixers.kv_cache import KVCache, StaticCursor, StaticKVCache
from regard.mixers.places import UnpadOrder
from regard.mixers.position_interface import Positions
from regard.ops.backend import AUTO, log_backend
from regard.ops.budget import budget
from regard.ops.decode_step import StepCall, StepWindow, decoding_step, step_refuses, step_window
from regard.ops.dense import few_queries_attention, merge_by_lse
from regard.ops.ragged import ragged_tile_attention
from regard.ops.score_bias import ScoreBias
from regard.ops.tile.tile_op import MASKED_SCORE, HeadPatterns, tile_attention
from regard.patterns.tiles import Span
from regard.transforms import needs_lengths, needs_plain_ops


class PatternAttention(NamedTuple):
    """Softmax(scale * q.k) over the pairs of a pattern, of the past alone if causal."""

    patterns: HeadPatterns
    scale: float
    causal: bool
    dropout: float = 0.0
    positions: Positions | None = None  # of those that add to the scores
    backend: str = AUTO

    def __call__(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Return out (b h n e) and log-sum-exp (b h n); q (b h n d), keys and values of g heads, a divisor of h."""
        if q.numel() == 0 or log.size == 0:
            return self._nothing(log, q)
        if self.patterns.bends:
            return self._by_length(log, q, places)
        known = places.start is not None and log.start is not None
        traced = isinstance(q.shape[2], torch.SymInt) or (torch.compiler.is_compiling() and self.patterns.draws)
        if known and traced:  # a comparison would fix the length of an exported program
            return self._tiles(log, q, places)
        if q.shape[2] <= budget(q.device).few_queries:
            return self._small(log, q, places)
        if known:
            return self._tiles(log, q, places)
        if places.start is None:
            return self._by_row(log, q, places)
        return self._beside_memory(log, q, places)

    def step(self, memory: KVCache, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, KVCache] | None:
        """Append one token to a cache and attend with it by one kernel: out (b h 1 e) and the cache; None: no kernel can."""
        window = self._window(q, places)
        if window is None or type(memory) not in (KVCache, StaticKVCache):
            return None
        static = isinstance(memory, StaticKVCache)
        room = memory.k if static else memory.keys
        call = StepCall(q, room, memory.v, memory.at, memory.valid, places.at, window, self.scale, k, v)
        if step_refuses(call) is not None:
            return None
        log_backend("step", "triton")
        if static:
            cursor: StaticCursor = memory.newest  # type: ignore[assignment]
            cursor.write(places)
            return decoding_step(call._replace(slot=cursor.slot)), memory
        log = memory.append(k, v, places)
        at, valid = log.at[:, : log.size], log.valid[:, : log.size]
        return decoding_step(StepCall(q, log.keys, log.values, at, valid, places.at, window, self.scale)), log

    def _window(self, q: Tensor, places: Places) -> StepWindow | None:
        """Return what a single query sees, where a kernel may compute it."""
        kernels = self.backend == "triton" or (self.backend == AUTO and q.is_cuda)
        if not kernels or q.shape[2] != 1 or not self.causal or places.valid is not None:
            return None
        if self.dropout or self.positions is not None or torch.compiler.is_compiling() or needs_plain_ops():
            return None
        return step_window(self.patterns.each)

    def _nothing(self, log: KVCache, q: Tensor) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(*q.shape[:3], log.v.shape[-1])
        return out, torch.full(q.shape[:3], MASKED_SCORE, dtype=torch.float32, device=q.device)

    def _small(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Compute the scores of all keys in the memory."""
        there = log.places
        i, j = places.at[:, None, :, None], there.at[:, None, None]
        one, *others = self.patterns.each
        seen = one(0, i, j)
        if any(p is not one and p != one for p in others):
            seen = torch.cat([seen, *(p(0, i, j) for p in others)], 1)
        if there.valid is not None:
            seen = seen & there.valid[:, None, None]
        if self.causal:
            seen = seen & (i >= j)
        out, lse = few_queries_attention(
            q, log.keys, log.values, seen, scale=self.scale, dropout=self.dropout, term=self._bias(q, places.at), apart=i - j
        )
        return self._finished(out, log.v), lse

    def _bias(self, q: Tensor, at: Tensor) -> ScoreBias | None:
        """Return the bias of queries (b h n d) at positions (b n)."""
        if self.positions is None:
            return None
        return self.positions.term(q, self.scale, at)

    def _ordered_bias(self, q: Tensor, start: int) -> ScoreBias | None:
        """Return the bias of queries that lie side by side from position `start` on."""
        if self.positions is None:
            return None
        return self._bias(q, torch.arange(start, start + q.shape[2], device=q.device)[None])

    def _finished(self, out: Tensor, v: Tensor) -> Tensor:
        if self.positions is None:
            return out
        return self.positions.finish(out, v.shape[-1])

    def _tiles(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Compute by tiles, with the real tokens of every row side by side, in order: one plan serves all rows."""
        assert places.start is not None and log.start is not None
        k, v = log.k, log.v
        if k.shape[2] != log.size:
            k, v = log.keys, log.values
        valid = back = None
        if not log.plain:
            k, v, valid = compact_keys(k, v, log.places)
        if places.valid is not None:
            q, back = compact_queries(q, places)
        out, lse = self._side_by_side(q, k, v, Span(places.start, q.shape[2], log.start, k.shape[2]), valid)
        if back is None:
            return out, lse
        return _in_order(out, lse, back)

    def _beside_memory(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Compute a chunk by tiles and the memory before it, which has gaps and is short because it forgets, in full."""
        old = log.size - q.shape[2] if self.causal else log.size
        past = log if old == log.size else log._replace(size=old, whole=None)
        out = self._small(past, q, places)
        if not self.causal:
            return out
        at, real = (x[:, old : log.size] for x in (log.at, log.valid))
        new = KVCache(
            log.keys[:, :, old:], log.values[:, :, old:], at, real, q.shape[2], places.start, places.valid is None, log.newest
        )
        return merge_by_lse(self._tiles(new, q, places), out)

    def _by_length(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Bind a pattern that depends on the length to that of every row: real tokens only."""
        if log.start != 0 or places.start != 0:
            raise ValueError(f"{self.patterns.text} is drawn for one length: it cannot continue from a memory")
        if log.plain and places.valid is None:
            return self._tiles(log, q, places)
        if torch.compiler.is_compiling():
            return self._opaque(log, q, places)
        if self.patterns.grain > 1:
            return self._by_pieces(log, q, places)
        return self._by_row(log, q, places)

    def _by_pieces(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Compute rows of as many pieces (blocks that are drawn) together: they share a plan, and padding hides the rest."""
        needs_lengths(self.patterns.text, places.valid)
        k, v, real = compact_keys(log.keys, log.values, log.places)
        q, back = compact_queries(q, places)
        pieces = -(-_real_counts(q, places.valid, k, real) // self.patterns.grain)
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, count in enumerate(pieces.tolist()):
            groups.setdefault(tuple(count), []).append(row)
        found = []
        for count, rows in groups.items():
            n, m = (min(c * self.patterns.grain, x.shape[2]) for c, x in zip(count, (q, k), strict=True))
            own = torch.tensor(rows, device=q.device)
            there = None if real is None else real[own, :m]
            out, lse = self._side_by_side(q[own, :, :n], k[own, :, :m], v[own, :, :m], Span(0, n, 0, m), there)
            missing = q.shape[2] - n
            found.append((pad(out, (0, 0, 0, missing)), pad(lse, (0, missing), value=MASKED_SCORE)))
        order = torch.tensor([row for rows in groups.values() for row in rows], device=q.device).argsort()
        out, lse = (torch.cat(each)[order] for each in zip(*found, strict=True))
        if back is None:
            return out, lse
        return _in_order(out, lse, back)

    def _side_by_side(self, q: Tensor, k: Tensor, v: Tensor, span: Span, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute by tiles: queries and keys are those of a span, in order; valid (b m) keys exist."""
        out, lse = tile_attention(
            *(q, k, v, self.patterns, span),
            scale=self.scale,
            causal=self.causal,
            valid=valid,
            bias=self._ordered_bias(q, span[0]),
            dropout=self.dropout,
            backend=self.backend,
        )
        return self._finished(out, v), lse

    def _opaque(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Compute the same under torch.compile, which has no lengths: real tokens in front, and an operator that counts them."""
        k, v, real = compact_keys(log.keys, log.values, log.places)
        q, back = compact_queries(q, places)
        out, lse = ragged_tile_attention(
            *(q, k, v, _real_counts(q, places.valid, k, real), self.patterns),
            scale=self.scale,
            causal=self.causal,
            dropout=self.dropout,
            bias=self._ordered_bias(q, 0),
            backend=self.backend,
        )
        out = self._finished(out, v)
        if back is None:
            return out, lse
        return _in_order(out, lse, back)

    def _by_row(self, log: KVCache, q: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Compute rows at different positions or with lengths of their own one after another, without their padding."""
        needs_lengths(self.patterns.text, places.valid)
        found = []
        for row in range(len(q)):
            out, lse = self._nothing(log, q[row : row + 1])
            here = slice(None) if places.valid is None else places.valid[row]
            mine, at = q[row : row + 1, :, here], places.at[row, here]
            if len(at):
                own = Places.of(mine[:, 0], start=int(at[0]))
                some, sums = self(log.row(row), mine, own)
                out = out.to(some.dtype)
                lse = lse.to(sums.dtype)
                out[:, :, here], lse[:, :, here] = some, sums
            found.append((out, lse))
        return torch.cat([x for x, _ in found]), torch.cat([x for _, x in found])


def _real_counts(q: Tensor, asking: Tensor | None, k: Tensor, there: Tensor | None) -> Tensor:
    """Return how many queries and keys of every row are real, (b 2)."""
    pairs = ((q, asking), (k, there))
    each = [torch.full((len(x),), x.shape[2], device=x.device) if real is None else real.sum(1) for x, real in pairs]
    return torch.stack(each, 1)


def expand_heads(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Repeat keys and values so that every query head has its own."""
    share = heads // k.shape[1]
    if share == 1:
        return k, v
    return k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)


def _moved(x: Tensor, order: UnpadOrder) -> Tensor:
    return x.gather(2, order.there[:, None, :, None].expand_as(x))


def _in_order(out: Tensor, lse: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs in the order of the queries before they were compacted."""
    out = out.gather(2, back[:, None, :, None].expand_as(out))
    return out, lse.gather(2, back[:, None].expand_as(lse))


def compact_keys(k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor | None]:
    """Move real keys and values to the front of their rows; return which places hold one."""
    order = places.unpad_order
    if order is None:
        return k, v, places.valid
    return _moved(k, order), _moved(v, order), order.real


def compact_queries(q: Tensor, places: Places) -> tuple[Tensor, Tensor | None]:
    """Move real queries to the front of their rows; return where each came from, or None where none moved."""
    order = places.unpad_order
    if order is None:
        return q, None
    return _moved(q, order), order.back
