"""The backend "torch": a pass over a plan, forward or backward, in plain PyTorch on any device.

G = b * key heads, S query heads for each of them, T tiles, r queries and c keys per block, p key blocks per tile, x = p * c.
Tensors by query are (G blocks S r .), by key (G blocks c .), by tile (G T S r .): query heads that share a key head are further
rows of the same tile, so keys and values are never repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.budget import Budget, budget
from regard.ops.dropout_hash import head_numbers, kept_pairs, key_keys, query_keys
from regard.ops.score_bias import TileBias
from regard.ops.tile.buffers import Scratch, scratch_buffers, softmax_in_place
from regard.ops.tile.call import Gradients, HeadPlans, TileCall, accumulator
from regard.ops.tile.head_pieces import HeadPiece, split_heads
from regard.patterns.plan import Plan
from regard.patterns.tiles import MASKED_SCORE, Layout, TileBatch, TilePart


class TorchTiles:
    """Tile attention in plain PyTorch."""

    name = "torch"

    def refuses(self, call: TileCall, plans: HeadPlans) -> str | None:  # noqa: ARG002
        return None

    def forward(self, call: TileCall, plans: HeadPlans) -> tuple[Tensor, Tensor]:
        use = budget(call.q.device), scratch_buffers(call.q.device)
        pieces = _head_pieces(call, plans, use[0])
        if len(pieces) == 1:
            return TilePass(*pieces[0], call, *use).forward()
        shape, acc = call.q.shape[:3], accumulator(call.q.dtype)
        out = torch.empty(*shape, call.width, dtype=acc, device=call.q.device)
        lse = torch.empty(shape, dtype=acc, device=call.q.device)
        for plan, piece in pieces:
            out[:, piece.heads], lse[:, piece.heads] = TilePass(plan, piece, call, *use).forward()
        return out, lse

    def backward(
        self, call: TileCall, plans: HeadPlans, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        if d_lse is None:
            d_lse = torch.zeros_like(lse)
        use = budget(call.q.device), scratch_buffers(call.q.device)
        pieces = _head_pieces(call, plans, use[0])
        results = (out, lse, d_out, d_lse)
        if len(pieces) == 1:
            return TilePass(*pieces[0], call, *use).backward(*results)
        by_query = None if call.bias is None else call.bias.by_query
        shared = call.k.shape[1] < call.q.shape[1]  # then a key head may belong to several pieces
        totals = [None if x is None else torch.zeros_like(x) for x in (call.q, call.k, call.v, by_query)]
        for plan, piece in pieces:
            found = TilePass(plan, piece, call, *use).backward(*(x[:, piece.heads] for x in results))
            own = (piece.heads, piece.key_heads, piece.key_heads, piece.heads)
            for total, grad, heads in zip(totals, found, own, strict=True):
                if total is not None and grad is not None:
                    total[:, heads] = total[:, heads] + grad if shared else grad
        return tuple(totals)


def _head_pieces(call: TileCall, plans: HeadPlans, room: Budget) -> list[tuple[Plan, HeadPiece]]:
    """Return the heads that are computed together.

    On a CPU not too many: the C library gives back every tensor of more than 32 MB to the system, and getting its pages anew
    costs more than the arithmetic does.
    """
    b, h, n, d = call.q.shape
    limit = h if room.tile_queries is None else max(1, room.tile_queries // (b * n * d))
    share = h // call.k.shape[1]
    return [(plan, piece) for plan, heads in plans for piece in split_heads(heads, share, limit)]


class _Operands(NamedTuple):
    """What the tiles of a part are made of, in its layouts."""

    queries: Tensor  # (G blocks S r d)
    keys: Tensor  # (G blocks c d)
    values: Tensor  # (G blocks c e)
    gaps: Tensor | None  # (b blocks c) what hides keys that do not exist
    by_query: Tensor | None  # (G blocks S r classes)
    dropout_keys: tuple[Tensor, Tensor] | None  # (G blocks S r 1) of queries, (blocks c) of keys


class TilePass:
    """One pass over the plan of a piece of heads."""

    def __init__(self, plan: Plan, piece: HeadPiece, call: TileCall, room: Budget, scratch: Scratch) -> None:
        q, k, v = call.q[:, piece.heads], call.k[:, piece.key_heads], call.v[:, piece.key_heads]
        self.plan, self.piece, self.call, self.device = plan, piece, call, q.device
        self.b, self.g, self.s = k.shape[0], k.shape[1], piece.share
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32  # of sums
        # Half precision is for tensor cores; a CPU is as fast, and more precise, in float32.
        self.type = q.dtype if q.device.type == "cuda" else self.acc
        self.q, self.k, self.v = (x.flatten(0, 1).to(self.type).contiguous() for x in (q, k, v))
        self.gap = None
        if call.valid is not None:
            self.gap = torch.where(call.valid, 0.0, MASKED_SCORE).to(self.acc)[..., None]  # (b m 1)
        self.bias = None
        self.width = self.v.shape[-1]  # of the outputs
        if call.bias is not None:
            self.bias = TileBias(call.bias.heads(piece.heads), self.b, piece.share, self.acc)
            self.width += call.bias.more
        self.scratch = scratch
        self.limit = max(1, room.tile_scores // len(self.q))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return out (b heads n width) and log-sum-exp (b heads n), both in the accumulating type."""
        total: tuple[Tensor, Tensor] | None = None
        n = self.q.shape[1]
        for part in self.plan.parts:
            out, lse = self._part(part)
            found = part.queries.join(out, n), part.queries.join(lse, n)
            total = found if total is None and part.queries.complete else self._merge(total, part.queries, *found)
        if total is None:
            out = torch.zeros(*self.q.shape[:2], self.width, dtype=self.acc, device=self.device)
            total = out, torch.full(out.shape[:2], MASKED_SCORE, dtype=self.acc, device=self.device)
        out, lse = total
        if self.call.dropout:
            out = out * (1 / (1 - self.call.dropout))
        empty = lse < MASKED_SCORE / 2
        if self.device.type != "cpu" or bool(empty.any()):  # where reading is free it is cheaper than a pass over out
            out.masked_fill_(empty[..., None], 0)
        shape = (self.b, self.g * self.s)
        return out.unflatten(0, shape), lse.clamp_min(MASKED_SCORE).unflatten(0, shape)

    def _part(self, part: TilePart) -> tuple[Tensor, Tensor]:
        """Return out (B blocks r width) and log-sum-exp (B blocks r) of one part, in its own layout."""
        x = self._operands(part)
        G, blocks, S, r = x.queries.shape[:4]
        out = torch.empty(G, S, blocks, r, self.width, dtype=self.acc, device=self.device)
        lse = torch.empty(G, S, blocks, r, dtype=self.acc, device=self.device)
        if not part.whole:
            out = out.zero_()
            lse = lse.fill_(MASKED_SCORE)
        outs, sums = out.transpose(1, 2), lse.transpose(1, 2)
        for batch in part.batches(self.limit, self.device):
            s, _, v, _ = self._scores(batch, x)
            distance = None if self.bias is None else self._add_bias(s, part, batch, x.by_query)
            here = softmax_in_place(s)
            if x.dropout_keys is not None:
                s.mul_(self._kept(s, batch, x.dropout_keys))
            y = self.scratch.bmm("y", s.to(self.type), v, self.acc)
            if self.bias is not None and distance is not None and self.bias.bias.mass:
                y = torch.cat([y, self.bias.sums(self._by_tile(s), distance).view(*y.shape[:2], -1)], -1)
            by_tile = (G, len(batch.rows), S, r)
            outs[:, batch.at] = y.view(*by_tile, -1)
            sums[:, batch.at] = here.view(by_tile)
        return out.flatten(0, 1), lse.flatten(0, 1)

    def _by_block(self, x: Tensor) -> Tensor:
        """View (G * S, blocks, r, ...) as (G blocks S r ...)."""
        if self.s == 1:
            return x.unsqueeze(2)
        return x.unflatten(0, (-1, self.s)).transpose(1, 2)

    def _operands(self, part: TilePart) -> _Operands:
        split = part.queries.split
        queries = split(self.q).unflatten(0, (-1, self.s)).transpose(1, 2)
        keys = part.keys.split(self.k)
        values = part.keys.split(self.v)
        gaps = None if self.gap is None else part.keys.split(self.gap)[..., 0]
        by_query = None if self.bias is None else self.bias.by_query
        if by_query is not None:
            by_query = self._by_block(split(by_query))
        dropout_keys = self._dropout_keys(part) if self.call.dropout else None
        return _Operands(queries, keys, values, gaps, by_query, dropout_keys)

    def _dropout_keys(self, part: TilePart) -> tuple[Tensor, Tensor]:
        seed, (i, j) = self.call.seed, part.positions(self.device)
        assert seed is not None
        heads = head_numbers(self.b, self.call.q.shape[1], self.piece.heads, self.device)
        return query_keys(seed, heads.reshape(-1, 1, self.s, 1, 1), i[:, None, :, None]), key_keys(seed, j)

    def _scores(self, batch: TileBatch, x: _Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scores (G * T, S * r, x) of a batch of tiles, and the keys, values and queries they are made of."""
        (G, _, S, r, d), tiles = x.queries.shape, len(batch.rows)
        k, v = self.scratch.gather(x.keys, x.values, batch.cols)
        q = self.scratch("q", self.type, G, tiles, S, r, d)
        torch.mul(x.queries[:, batch.at], self.call.scale, out=q)
        q = q.view(G * tiles, S * r, d)
        s = self.scratch.bmm("s", q, k.mT, self.acc)
        by_tile = s.view(G, tiles, S, r, -1)
        for low, high, mask in batch.hidden:
            if mask.dtype == torch.bool:
                by_tile[..., low:high].masked_fill_(mask, MASKED_SCORE)
            else:
                by_tile[..., low:high].add_(mask)
        if x.gaps is not None:
            gap = x.gaps.index_select(1, batch.cols.flatten())
            by_row = s.view(self.b, self.g, tiles, S * r, -1)
            by_row.add_(gap.view(self.b, 1, tiles, 1, -1))
        return s, k, v, q

    def _add_bias(self, s: Tensor, part: TilePart, batch: TileBatch, by_query: Tensor | None) -> Tensor:
        """Add what positions add to scores, in place; return the distances (T 1 r x)."""
        assert self.bias is not None
        distance = part.distances(batch)
        own = None if by_query is None else by_query[:, batch.at]
        self.bias.add(self._by_tile(s), distance, own)
        return distance

    def _by_tile(self, x: Tensor) -> Tensor:
        """View (G * T, S * r, y) as (G T S r y)."""
        G = self.b * self.g
        return x.view(G, len(x) // G, self.s, -1, x.shape[-1])

    def _kept(self, s: Tensor, batch: TileBatch, keys: tuple[Tensor, Tensor]) -> Tensor:
        """Return 1 for weights that dropout keeps and 0 for others, of the shape of s."""
        query = keys[0][:, batch.at]  # (G T S r 1)
        key = keys[1][batch.cols].flatten(1)[:, None, None]  # (T 1 1 x)
        shape = self._by_tile(s).shape
        work = self.scratch("hash", torch.int32, *shape), self.scratch("shift", torch.int32, *shape)
        kept = self.scratch("kept", self.acc, *shape)
        return kept_pairs(query, key, self.call.dropout, kept, work).view_as(s)

    def _merge(self, total: tuple[Tensor, Tensor] | None, layout: Layout, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge the attention over the parts so far, (B n width) and (B n), with that over one more part, of some tokens."""
        at = layout.tokens(self.device)
        if total is None:
            whole = out.new_zeros(out.shape[0], self.q.shape[1], out.shape[2])
            total = whole, torch.full_like(whole[..., 0], MASKED_SCORE)
        old, old_lse = total if at is None else (total[0][:, at], total[1][:, at])
        both = torch.logaddexp(old_lse, lse)
        merged = (old * (old_lse - both).exp()[..., None]).add_(out * (lse - both).exp()[..., None])
        if at is None:
            return merged, both
        total[0][:, at], total[1][:, at] = merged, both
        return total

    def backward(self, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Gradients:
        """Return the gradients of q, k, v and of what the bias adds by query."""
        d_out = d_out.flatten(0, 1).to(self.acc)
        out = out.flatten(0, 1)
        lse = lse.flatten(0, 1)
        pull = (d_out * out).sum(-1) - d_lse.flatten(0, 1)  # what every score of a row loses
        lse = torch.where(lse < MASKED_SCORE / 2, -MASKED_SCORE, lse)  # a row without pairs: all its weights come out 0
        if self.call.dropout:
            d_out = d_out * (1 / (1 - self.call.dropout))
        by_row = torch.stack([pull, lse], -1), d_out.to(self.type)
        grads: list[Tensor | None] = [None] * 4
        for part in self.plan.parts:
            found = self._part_backward(part, *(self._by_block(part.queries.split(x)) for x in by_row))
            layouts = (part.queries, part.keys, part.keys, part.queries)
            for number, (layout, grad) in enumerate(zip(layouts, found, strict=True)):
                if grad is not None:
                    whole = self.k if layout is part.keys else self.q
                    grads[number] = _accumulate(grads[number], layout, grad, whole.shape[1])
        return self._finished(grads)

    def _finished(self, grads: list[Tensor | None]) -> Gradients:
        """Return the sums over all parts in the shapes and types of the operands; zeros where there was no part."""
        made = (self.q, self.k, self.v, None if self.bias is None else self.bias.by_query)
        grads = [torch.zeros_like(x) if g is None and x is not None else g for g, x in zip(grads, made, strict=True)]
        if grads[0] is not None:
            grads[0].mul_(self.call.scale)
        types = (self.call.q.dtype, self.call.k.dtype, self.call.v.dtype, self.acc)
        every = zip(grads, types, strict=True)
        return tuple(None if x is None else x.unflatten(0, (self.b, -1)).to(t).contiguous() for x, t in every)

    def _part_backward(self, part: TilePart, by_row: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of one part in its layouts; by_row (G blocks S r 2): pull and log-sum-exp, up: those of out."""
        x = self._operands(part)
        e = self.v.shape[-1]
        G, blocks, S, r, d = x.queries.shape
        shapes = (G * S, blocks, r, d), x.keys.shape, x.values.shape
        dq, dk, dv = (torch.zeros(shape, dtype=self.acc, device=self.device) for shape in shapes)
        d_queries = self._by_block(dq)
        d_bias = None if x.by_query is None else torch.zeros_like(x.by_query)
        for batch in part.batches(self.limit // 2, self.device):
            weights, k, v, q = self._scores(batch, x)
            distance = None if self.bias is None else self._add_bias(weights, part, batch, x.by_query)
            here = softmax_in_place(weights)
            own = _rows_of_tiles(by_row, batch)
            # The weights are now those of this tile alone. Its share of the row goes to the gradient, which is smaller.
            share = (here - own[..., 1]).exp()[..., None]
            u = (_rows_of_tiles(up, batch) * share).to(self.type)
            ds = self.scratch.bmm("d", u[..., :e], v.mT, self.acc)
            if self.bias is not None and distance is not None and u.shape[-1] > e:
                by_tile = self._by_tile(ds)
                by_tile += self._by_tile(u)[..., e:].gather(-1, self.bias.index(distance, by_tile))
            kept = None if x.dropout_keys is None else self._kept(weights, batch, x.dropout_keys)
            if kept is not None:
                ds = ds.mul_(kept)
            ds.sub_(own[..., :1] * share).mul_(weights)
            if kept is not None:
                weights = weights.mul_(kept)
            self._add_by_key(dv, batch, self.scratch.bmm("dv", weights.to(self.type).mT, u[..., :e], self.acc))
            low = ds.to(self.type)
            self._add_by_key(dk, batch, self.scratch.bmm("dk", low.mT, q, self.acc))
            d_queries[:, batch.at] = self._by_tile(self.scratch.bmm("dq", low, k, self.acc))
            if d_bias is not None and self.bias is not None and distance is not None:
                d_bias[:, batch.at] = self.bias.sums(self._by_tile(ds), distance)
        return dq, dk, dv, None if d_bias is None else d_bias.transpose(1, 2).flatten(0, 1)

    @staticmethod
    def _add_by_key(total: Tensor, batch: TileBatch, found: Tensor) -> None:
        """Add what was found for the keys of the tiles (G * T, p * c, x) to their blocks, total (G blocks c x)."""
        tiles, p = batch.cols.shape
        found = found.view(len(total), tiles, p, *total.shape[2:])
        if batch.slides is None:
            total.index_add_(1, batch.cols.flatten(), found.flatten(1, 2))
            return
        for x in range(batch.slides, batch.slides + p):
            total[:, x : x + tiles] += found[:, :, x - batch.slides]


def _rows_of_tiles(x: Tensor, batch: TileBatch) -> Tensor:
    """Collect rows by query (G blocks S r y) for a batch of tiles: (G * T, S * r, y)."""
    rows = x.shape[2] * x.shape[3]
    return x[:, batch.at].reshape(-1, rows, x.shape[4])


def _accumulate(total: Tensor | None, layout: Layout, grad: Tensor, length: int) -> Tensor:
    """Add a gradient in the layout of a part, (B blocks size y), to that of the whole sequence, (B length y)."""
    found = layout.join(grad, length)
    at = layout.tokens(grad.device)
    if at is None:
        if total is None:
            return found
        return total.add_(found)
    if total is None:
        total = found.new_zeros(found.shape[0], length, found.shape[2])
    return total.index_add_(1, at, found)
