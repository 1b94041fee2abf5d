"""Attention over the pairs of a pattern, and along an edge list, in plain differentiable operations.

The results are those of `tile_attention` and `edge_attention`, and so is the growth: time and memory follow the pairs, no n x m
tensor is made. No tensor is written in place and no number is read, so that torch.func, forward-mode AD, a second backward pass
and torch.export can follow. Gathering indices and masks are constants. It is slower than the kernels, which serve other calls.

G = b * key heads, S query heads for each of them, B = G * S, T tiles, r queries and x keys in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu, pad

from regard.ops.dropout_hash import head_numbers, kept_pairs_composite, key_keys, query_keys
from regard.ops.score_bias import distance_class
from regard.ops.tile.call import HeadPlans, TileCall, accumulator
from regard.ops.tile.head_pieces import HeadPiece, split_heads
from regard.patterns.plan import Plan
from regard.patterns.tiles import MASKED_SCORE, TileBatch, TilePart
from regard.transforms import untraced

COMPOSITE_SCORES = 1 << 26  # score elements of one head that are computed together
PairOutLse = tuple[Tensor, Tensor]  # out (B n e) and log-sum-exp (B n)


def tile_attention_composite(plans: HeadPlans, call: TileCall) -> PairOutLse:
    """Compute tile attention: out (b h n e), the columns of the bias behind it, and log-sum-exp (b h n)."""
    h = call.q.shape[1]
    share = h // call.k.shape[1]
    found = []
    order: list[int] = []
    for plan, heads in plans:
        for piece in split_heads(heads, share, h):
            composite = _CompositePass(plan, piece, call)
            found.append(composite.outputs())
            order += range(h)[piece.heads] if isinstance(piece.heads, slice) else piece.heads
    if len(found) == 1:
        out, lse = found[0]
    else:
        back = [order.index(head) for head in range(h)]
        out, lse = (torch.cat(x, 1)[:, back] for x in zip(*found, strict=True))
    return out.to(call.v.dtype), lse


class _Tiles(NamedTuple):
    """The tiles of one part, as constants."""

    part: TilePart
    batches: list[tuple[TileBatch, Tensor, Tensor]]  # with what is hidden (T or 1, 1, r, x), and i - j (T 1 r x)
    blocks: Tensor | None  # of every query block, its place among the tiles of all batches, or behind them; None: in order
    tokens: Tensor | None  # of every token, its place among those of the part, or behind them; None: in order


def _tiles(part: TilePart, length: int, device: torch.device) -> _Tiles:
    with untraced():
        every_batch = part.batches(COMPOSITE_SCORES, device)
        batches = [(batch, _hidden(part, batch), part.distances(batch)) for batch in every_batch]
        rows = torch.cat([batch.rows for batch, *_ in batches])
        every = torch.arange(part.queries.blocks, device=device)
        blocks = None if torch.equal(rows, every) else _inverse_index(rows, len(every))
        for layout in (part.queries, part.keys):
            if layout.index is not None:
                layout.moves(device)  # cached there from now on
        index = part.queries.index
        if index is None or part.queries.complete:
            return _Tiles(part, batches, blocks, None)
        flat = index.flatten()
        filled = flat[flat >= 0].to(device)
        return _Tiles(part, batches, blocks, _inverse_index(filled, length))


def _inverse_index(index: Tensor, length: int) -> Tensor:
    """Return the place (length) of each number in the index; behind it where it does not occur."""
    where = torch.full((length,), len(index), device=index.device)
    where[index] = torch.arange(len(index), device=index.device)
    return where


def _hidden(part: TilePart, batch: TileBatch) -> Tensor:
    wide = batch.cols.shape[1] * part.keys.size
    hidden = torch.zeros(1, 1, 1, wide, dtype=torch.bool, device=batch.rows.device)
    for low, high, mask in batch.hidden:
        if mask.dtype != torch.bool:
            mask = mask != 0
        hidden = hidden | pad(mask, (low, wide - high))
    return hidden


class _CompositePass:
    """One pass over the plan of a piece of heads."""

    def __init__(self, plan: Plan, piece: HeadPiece, call: TileCall) -> None:
        self.acc, self.device = accumulator(call.q.dtype), call.q.device
        self.call, self.piece, self.b = call, piece, call.q.shape[0]
        q, k, v = call.q[:, piece.heads], call.k[:, piece.key_heads], call.v[:, piece.key_heads]
        self.q, self.k, self.v = (x.to(self.acc).flatten(0, 1) for x in (q, k, v))
        self.bias = None if call.bias is None else call.bias.heads(piece.heads)
        by_query = None if self.bias is None else self.bias.by_query
        self.by_query = None if by_query is None else by_query.to(self.acc).flatten(0, 1)
        self.gone = None
        if call.valid is not None:
            self.gone = (~call.valid).to(self.acc)[..., None]  # (b m 1)
        length = self.q.shape[1]
        self.parts = [_tiles(part, length, self.device) for part in plan.parts if part.groups]

    def outputs(self) -> PairOutLse:
        """Return out (b heads n e) and log-sum-exp (b heads n)."""
        wholes = []
        for _, several in groupby(self.parts, lambda x: id(x.part.queries)):  # strips of keys for the same queries
            same = list(several)
            layout, tokens = same[0].part.queries, same[0].tokens
            out, lse = merge_outputs([self._part(tiles) for tiles in same])
            out = layout.join(out, self.q.shape[1])
            lse = layout.join(lse, self.q.shape[1])
            if tokens is not None:
                out = _spread(out, tokens, 0.0)
                lse = _spread(lse, tokens, MASKED_SCORE)
            wholes.append((out, lse))
        if not wholes:
            shape = self.q.shape[:2]
            out = self.q.new_zeros(*shape, self.call.width)
            wholes = [(out, self.q.new_full(shape, MASKED_SCORE))]
        out, lse = merge_outputs(wholes)
        empty = lse < MASKED_SCORE / 2
        out = out.masked_fill(empty[..., None], 0)
        lse = lse.clamp_min(MASKED_SCORE)
        return out.unflatten(0, (self.b, -1)), lse.unflatten(0, (self.b, -1))

    def _part(self, tiles: _Tiles) -> PairOutLse:
        """Return out (B blocks r e) and log-sum-exp (B blocks r) of one part, in its own layout."""
        part, found = tiles.part, []
        queries = self._by_head(part.queries.split(self.q))
        keys = part.keys.split(self.k)
        values = part.keys.split(self.v)
        gone = None if self.gone is None else part.keys.split(self.gone)
        more = None if self.by_query is None else self._by_head(part.queries.split(self.by_query))
        for batch, hidden, distance in tiles.batches:
            q = _rows(queries, batch)
            k = _gathered(keys, batch)
            v = _gathered(values, batch)
            s = (q * self.call.scale).flatten(2, 3) @ k.mT
            s = s.unflatten(2, (self.piece.share, -1))  # (G T S r x)
            by_query = None if more is None else _rows(more, batch)
            s = self._with_bias(s, distance, by_query)
            s = s.masked_fill(hidden, MASKED_SCORE)
            if gone is not None:
                missing = _gathered(gone, batch).mT[:, None, :, None] > 0.5  # (b 1 T 1 1 x)
                s = s.unflatten(0, (self.b, -1)).masked_fill(missing, MASKED_SCORE)
                s = s.flatten(0, 1)
            lse = s.logsumexp(-1)
            weights = (s - lse[..., None]).exp()
            if self.call.seed is not None:
                weights = self._dropped(weights, part, batch)
            out = weights.flatten(2, 3) @ v
            out = out.unflatten(2, (self.piece.share, -1))
            if self.bias is not None and self.bias.mass:
                out = torch.cat([out, self._masses(weights, distance)], -1)
            out = out.transpose(1, 2).flatten(0, 1)
            lse = lse.transpose(1, 2).flatten(0, 1)
            found.append((out, lse))
        out, lse = (torch.cat(x, 1) for x in zip(*found, strict=True))
        if tiles.blocks is None:
            return out, lse
        return _spread(out, tiles.blocks, 0.0), _spread(lse, tiles.blocks, MASKED_SCORE)

    def _by_head(self, x: Tensor) -> Tensor:
        """View (B blocks r y) as (G S blocks r y)."""
        return x.unflatten(0, (-1, self.piece.share))

    def _with_bias(self, s: Tensor, distance: Tensor, by_query: Tensor | None) -> Tensor:
        """Add what positions add to scores (G T S r x)."""
        if self.bias is None:
            return s
        if self.bias.slopes is not None:
            slopes = self.bias.slopes.to(self.acc).repeat(self.b)
            slopes = slopes.view(-1, 1, self.piece.share, 1, 1)
            s = s - slopes * distance.abs()
        if by_query is not None:
            index = distance_class(distance, self.bias.clip).expand(s.shape)
            s = s + by_query.gather(-1, index)
        return s

    def _dropped(self, weights: Tensor, part: TilePart, batch: TileBatch) -> Tensor:
        """Drop the weights (G T S r x) that the seed drops in every backend."""
        seed, rate = self.call.seed, self.call.dropout
        assert seed is not None
        i, j = part.positions(self.device)
        heads = head_numbers(self.b, self.call.q.shape[1], self.piece.heads, self.device)
        heads = heads.reshape(-1, 1, self.piece.share, 1, 1)
        query = query_keys(seed, heads, i[batch.rows][:, None, :, None])
        key = key_keys(seed, j[batch.cols].flatten(1)[:, None, None])
        kept = kept_pairs_composite(query, key, rate)
        return weights * kept / (1 - rate)

    def _masses(self, weights: Tensor, distance: Tensor) -> Tensor:
        assert self.bias is not None
        index = distance_class(distance, self.bias.clip).expand(weights.shape)
        none = weights.new_zeros(*weights.shape[:-1], self.bias.classes)
        return none.scatter_add(-1, index, weights)


def _rows(x: Tensor, batch: TileBatch) -> Tensor:
    """Select the query blocks of a batch of tiles: (G S blocks r y) -> (G T S r y)."""
    x = x[:, :, batch.at] if isinstance(batch.at, slice) else x.index_select(2, batch.at)
    return x.transpose(1, 2)


def _gathered(blocks: Tensor, batch: TileBatch) -> Tensor:
    """Collect the key blocks of every tile: (G blocks c y) -> (G T p*c y)."""
    found = blocks.index_select(1, batch.cols.flatten())
    return found.unflatten(1, batch.cols.shape).flatten(2, 3)


def _spread(x: Tensor, where: Tensor, missing: float) -> Tensor:
    """Put x (B some ...) at the places (length), and a number where there is none."""
    none = torch.full_like(x[:, :1], missing)
    return torch.cat([x, none], 1).index_select(1, where)


def merge_outputs(found: Sequence[PairOutLse]) -> PairOutLse:
    """Merge attention over disjoint sets of keys, by log-sum-exp."""
    if len(found) == 1:
        return found[0]
    each = torch.stack([lse for _, lse in found])
    lse = each.logsumexp(0)
    share = (each - lse).exp().unsqueeze(-1)
    pairs = zip(found, share.unbind(0), strict=True)
    total = sum(out * part for (out, _), part in pairs)
    return total, lse  # type: ignore[return-value]


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
    """Compute edge attention, out (n B e): q (n B d), k (m B d), v (m B e), a (B d), pairs (2, pairs).

    seen (pairs B), or one that broadcasts to it: which of the pairs exist; None: all.
    """
    i, j = pairs[0], pairs[1]
    s = q.index_select(0, i) + k.index_select(0, j)
    s = leaky_relu(s, slope)
    s = (s * a).sum(-1)
    if seen is not None:
        s = s.masked_fill(~seen, MASKED_SCORE)
    none = s.new_zeros(q.shape[:2])
    index = i[:, None].expand(s.shape)
    top = (none + MASKED_SCORE).scatter_reduce(0, index, s.detach(), "amax").detach()
    weights = (s - top.index_select(0, i)).exp()
    if seen is not None:
        weights = weights * seen
    total = _summed(none, i, weights).index_select(0, i)
    weights = weights / torch.where(total > 0, total, 1)
    if drop is not None:
        weights = drop(weights)
    out = v.new_zeros(*q.shape[:2], v.shape[2])
    weighted = v.index_select(0, j) * weights.unsqueeze(-1)
    return _summed(out, i, weighted)


def _summed(total: Tensor, i: Tensor, x: Tensor) -> Tensor:
    """Add x to total[i], in the same order every time."""
    if total.device.type == "cpu":
        return total.index_add(0, i, x)
    return total.index_put((i,), x, accumulate=True)
