"""Attention over the pairs of a pattern, and along a list of pairs, in plain differentiable operations.

The meaning is that of `tiles.py` and `walk.py`, and so is the growth: time and memory follow the pairs, no n x m tensor is made.
Nothing is written in place and no number is read, so that torch.func, forward-mode AD, a second backward pass and torch.export
can follow. Gathering indices and masks are constants. It is slower than the fast kernels: they are used wherever they can be.

B = b * h rows of heads, T tiles, r queries and x keys in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu, pad

from regard.ops.score_bias import distance_class
from regard.ops.tile.buffers import Blocked, accumulator
from regard.ops.tile.torch import TileCall
from regard.patterns.plan import Plan
from regard.patterns.tiles import MASKED_SCORE, TileBatch, TilePart
from regard.transforms import untraced

COMPOSITE_SCORES = 1 << 26  # score elements of one head that are computed together
Heads = list[int] | slice
Dropout = Callable[[Tensor, int, int, int], Tensor]  # of weights, by the numbers of the piece, the part and the run of tiles
PairOutLse = tuple[Tensor, Tensor]  # out (B n e) and log-sum-exp (B n)


def tile_attention_composite(
    pieces: Sequence[tuple[Plan, Heads]], asked: TileCall, drop: Dropout | None = None, room: int | None = None
) -> PairOutLse:
    """Compute what `tiled` does: out (b h n e), the term's columns behind it, and log-sum-exp (b h n).

    pieces: heads that follow the same plan. `room` bounds the score elements that are computed together, as a Pass does.
    """
    found, order = [], []
    for number, (work, own) in enumerate(pieces):
        every = list(range(asked.q.shape[1]))
        heads = every[own] if isinstance(own, slice) else own
        some = asked if heads == every else _select_heads(asked, heads)
        most = COMPOSITE_SCORES if room is None else max(1, room // (asked.q.shape[0] * len(heads)))
        found.append(_Piece(work, some, None if drop is None else _dropout_of(drop, number), most).answer())
        order += heads
    if len(found) == 1:
        out, lse = found[0]
    else:
        back = [order.index(h) for h in range(len(order))]
        out, lse = (torch.cat(x, 1)[:, back] for x in zip(*found, strict=True))
    return out.to(asked.v.dtype), lse


def _dropout_of(drop: Dropout, number: int) -> Callable[[Tensor, int, int], Tensor]:
    return lambda weights, part, turn: drop(weights, number, part, turn)


def _select_heads(asked: TileCall, own: list[int]) -> TileCall:
    q, k, v, by_query = (None if x is None else x[:, own] for x in asked[:4])
    slopes = None if asked.slopes is None else asked.slopes[own]
    return TileCall(q, k, v, by_query, slopes, *asked[5:])  # type: ignore[arg-type]


class _Tiles(NamedTuple):
    """The tiles of one part, as constants."""

    part: TilePart
    runs: list[tuple[TileBatch, Tensor, Tensor]]  # with what is hidden (T or 1, r, x), and i - j (T r x)
    blocks: Tensor | None  # of every query block, its place among the tiles of all runs, or behind them; None: it is there
    tokens: Tensor | None  # of every token, its place among those of the part, or behind them; None: it is there


def _tiles(part: TilePart, length: int, most: int, device: torch.device) -> _Tiles:
    with untraced():
        runs = [(run, _hidden(part, run), _distance(part, run)) for run in part.runs(most, device)]
        rows = torch.cat([run.rows for run, *_ in runs])
        every = torch.arange(part.queries.blocks, device=device)
        blocks = None if torch.equal(rows, every) else _inverse_index(rows, len(every))
        for layout in (part.queries, part.keys):
            if layout.index is not None:
                layout.moves(device)  # kept there from now on
        index = part.queries.index
        if index is None or part.queries.everyone:
            return _Tiles(part, runs, blocks, None)
        flat = index.flatten()
        return _Tiles(part, runs, blocks, _inverse_index(flat[flat >= 0].to(device), length))


def _inverse_index(index: Tensor, length: int) -> Tensor:
    """(length) where each number stands in the index; behind it where it does not."""
    where = torch.full((length,), len(index), device=index.device)
    where[index] = torch.arange(len(index), device=index.device)
    return where


def _hidden(part: TilePart, run: TileBatch) -> Tensor:
    wide = run.cols.shape[1] * part.keys.size
    hidden = torch.zeros(1, 1, wide, dtype=torch.bool, device=run.rows.device)
    for low, high, mask in run.hidden:
        hidden = hidden | pad(mask if mask.dtype == torch.bool else mask != 0, (low, wide - high))
    return hidden


def _distance(part: TilePart, run: TileBatch) -> Tensor:
    i, j = part.places(run.rows.device)
    return i[run.rows][:, :, None] - j[run.cols].flatten(1)[:, None]


class _Piece:
    """Heads with one plan."""

    def __init__(self, work: Plan, asked: TileCall, drop: Callable[[Tensor, int, int], Tensor] | None, most: int) -> None:
        self.acc, self.device, self.drop = accumulator(asked.q.dtype), asked.q.device, drop
        self.asked, self.h, self.width = asked, asked.q.shape[1], asked.width
        self.q, self.k, self.v = (x.to(self.acc).flatten(0, 1) for x in asked[:3])
        self.by_query = None if asked.by_query is None else asked.by_query.to(self.acc).flatten(0, 1)
        self.gone = None if asked.valid is None else (~asked.valid).to(self.acc)[..., None]  # (b m 1)
        length = self.q.shape[1]
        self.parts = [_tiles(part, length, most, self.device) for part in work.parts if part.groups]

    def answer(self) -> PairOutLse:
        """out (b h n e) and log-sum-exp (b h n)."""
        wholes = []
        for _, several in groupby(enumerate(self.parts), lambda x: id(x[1].part.queries)):  # strips of keys for the same queries
            same = list(several)
            out, lse = merge_outputs([self._part(tiles, number) for number, tiles in same])
            blocked = Blocked(self.q, same[0][1].part.queries)
            out, lse = blocked.back(out), blocked.back(lse)
            tokens = same[0][1].tokens
            wholes.append((out, lse) if tokens is None else (_spread(out, tokens, 0.0), _spread(lse, tokens, MASKED_SCORE)))
        if not wholes:
            wholes = [(self.q.new_zeros(*self.q.shape[:2], self.width), self.q.new_full(self.q.shape[:2], MASKED_SCORE))]
        out, lse = merge_outputs(wholes)
        out, lse = out.masked_fill((lse < MASKED_SCORE / 2)[..., None], 0), lse.clamp_min(MASKED_SCORE)
        return out.unflatten(0, (-1, self.h)), lse.unflatten(0, (-1, self.h))

    def _part(self, tiles: _Tiles, number: int) -> PairOutLse:
        """out (B blocks r e) and log-sum-exp (B blocks r) of one part, in its own layout."""
        part, found = tiles.part, []
        queries = Blocked(self.q, part.queries).blocks
        keys, values = (Blocked(x, part.keys).blocks for x in (self.k, self.v))
        gone = None if self.gone is None else Blocked(self.gone, part.keys).blocks
        more = None if self.by_query is None else Blocked(self.by_query, part.queries).blocks
        for turn, (run, hidden, apart) in enumerate(tiles.runs):
            q, k, v = run.take(queries), _gathered(keys, run), _gathered(values, run)
            s = self._with_term((q * self.asked.scale) @ k.mT, apart, None if more is None else run.take(more))
            s = s.masked_fill(hidden, MASKED_SCORE)
            if gone is not None:
                lost = _gathered(gone, run).mT[:, None] > 0.5  # (b 1 T 1 x)
                s = s.unflatten(0, (-1, self.h)).masked_fill(lost, MASKED_SCORE).flatten(0, 1)
            lse = s.logsumexp(-1)
            weights = (s - lse[..., None]).exp()
            weights = weights if self.drop is None else self.drop(weights, number, turn)
            out = weights @ v
            if self.asked.mass:
                out = torch.cat([out, self._masses(weights, apart)], -1)
            found.append((out, lse))
        out, lse = (torch.cat(x, 1) for x in zip(*found, strict=True))
        return (out, lse) if tiles.blocks is None else (_spread(out, tiles.blocks, 0.0), _spread(lse, tiles.blocks, MASKED_SCORE))

    def _with_term(self, s: Tensor, apart: Tensor, by_query: Tensor | None) -> Tensor:
        """Scores (B T r x) with what positions add."""
        slopes = self.asked.slopes
        if slopes is not None:
            s = s.unflatten(0, (-1, self.h)) - slopes.to(self.acc)[:, None, None, None] * apart.abs()
            s = s.flatten(0, 1)
        if by_query is not None:
            s = s + by_query.gather(-1, distance_class(apart, self.asked.clip).expand(s.shape))
        return s

    def _masses(self, weights: Tensor, apart: Tensor) -> Tensor:
        index = distance_class(apart, self.asked.clip).expand(weights.shape)
        return weights.new_zeros(*weights.shape[:-1], 2 * self.asked.clip + 1).scatter_add(-1, index, weights)


def _gathered(blocks: Tensor, run: TileBatch) -> Tensor:
    """(B blocks c y) -> (B T p*c y): the key blocks of every tile."""
    return blocks.index_select(1, run.cols.flatten()).unflatten(1, run.cols.shape).flatten(2, 3)


def _spread(x: Tensor, where: Tensor, nobody: float) -> Tensor:
    """x (B some ...) at the places (length), and a number where there is none."""
    return torch.cat([x, torch.full_like(x[:, :1], nobody)], 1).index_select(1, where)


def merge_outputs(found: Sequence[PairOutLse]) -> PairOutLse:
    """Merge attention over disjoint sets of keys, by log-sum-exp."""
    if len(found) == 1:
        return found[0]
    each = torch.stack([lse for _, lse in found])
    lse = each.logsumexp(0)
    share = (each - lse).exp().unsqueeze(-1)
    return sum(out * part for (out, _), part in zip(found, share.unbind(0), strict=True)), lse  # type: ignore[return-value]


def edge_attention_composite(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    pairs: Tensor,
    slope: float,
    drop: Callable[[Tensor], Tensor] | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Compute what `walked` does, out (n B e): q (n B d), k (m B d), v (m B e), a (B d), pairs (2, pairs).

    seen (pairs B), or one that broadcasts to it: which of the pairs there are; None: all.
    """
    i, j = pairs[0], pairs[1]
    s = (leaky_relu(q.index_select(0, i) + k.index_select(0, j), slope) * a).sum(-1)
    s = s if seen is None else s.masked_fill(~seen, MASKED_SCORE)
    none = s.new_zeros(q.shape[:2])
    top = (none + MASKED_SCORE).scatter_reduce(0, i[:, None].expand(s.shape), s.detach(), "amax").detach()
    weights = (s - top.index_select(0, i)).exp()
    weights = weights if seen is None else weights * seen
    total = _summed(none, i, weights).index_select(0, i)
    weights = weights / torch.where(total > 0, total, 1)
    weights = weights if drop is None else drop(weights)
    return _summed(v.new_zeros(*q.shape[:2], v.shape[2]), i, v.index_select(0, j) * weights.unsqueeze(-1))


def _summed(total: Tensor, i: Tensor, x: Tensor) -> Tensor:
    """total[i] + x, in the same order every time."""
    return total.index_add(0, i, x) if total.device.type == "cpu" else total.index_put((i,), x, accumulate=True)
