"""One pass over a plan, forward or backward, in plain PyTorch on any device.

B = b * h rows of heads, T tiles, r queries and c keys per block, p key blocks per tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.score_bias import ScoreBias, TileBias
from regard.ops.tile.buffers import Blocked, accumulator, kept_buffers, product
from regard.patterns.plan import Plan
from regard.patterns.tiles import MASKED_SCORE, TileBatch, TilePart

CPU_SCORES = 1 << 20  # score elements at a time on a CPU, half as many in the backward pass: its buffers should stay in the cache
DEVICE_SCORES = 1 << 26  # and on other devices


class TileCall(NamedTuple):
    """A question for the tiles; tensors first, as autograd and operators like them."""

    q: Tensor  # (b h n d)
    k: Tensor  # (b h m d)
    v: Tensor  # (b h m e)
    by_query: Tensor | None  # what a Term holds
    slopes: Tensor | None
    valid: Tensor | None  # (b m)
    seed: Tensor | None  # of dropout
    clip: int
    mass: bool
    scale: float
    dropout: float

    @property
    def term(self) -> ScoreBias | None:
        term = ScoreBias(self.slopes, self.clip, self.by_query, self.mass)
        return None if self.slopes is None and self.by_query is None and not self.mass else term

    @property
    def width(self) -> int:
        """Columns of the answers."""
        return self.v.shape[-1] + (2 * self.clip + 1 if self.mass else 0)


class TilePass:
    """One pass over a plan."""

    def __init__(self, work: Plan, asked: TileCall) -> None:
        q, k, v, valid, seed = asked.q, asked.k, asked.v, asked.valid, asked.seed
        self.b, self.h, self.plan, self.scale = q.shape[0], q.shape[1], work, asked.scale
        self.dropout, self.seed, self.device = asked.dropout, 0 if seed is None else int(seed), q.device
        self.types = [x.dtype for x in (q, k, v)]
        self.acc = accumulator(q.dtype)
        # Half precision is for tensor cores; a CPU is as fast, and closer to the truth, in float32.
        self.type = q.dtype if q.device.type == "cuda" else self.acc
        self.q, self.k, self.v = (x.flatten(0, 1).to(self.type).contiguous() for x in (q, k, v))
        self.gap = None if valid is None else torch.where(valid, 0.0, MASKED_SCORE).to(self.acc)[..., None]  # (b m 1)
        self.scratch, self.sums = (kept_buffers.scratch(*x, q.device) for x in (("operands", self.type), ("sums", self.acc)))
        self.term = None if asked.term is None else TileBias(asked.term, self.b, self.acc)
        self.width = asked.width
        self.most = max(1, (CPU_SCORES if q.device.type == "cpu" else DEVICE_SCORES) // len(self.q))

    def forward(self) -> tuple[Tensor, Tensor]:
        """out (b h n e), the term's columns behind it, and log-sum-exp (b h n), both in the accumulating type."""
        total: tuple[Tensor, Tensor] | None = None
        for number, part in enumerate(self.plan.parts):
            queries = Blocked(self.q, part.queries)
            found = self._part(part, queries, number)
            total = self._merged(total, queries, *(queries.back(x) for x in found))
        out, lse = total or self._nothing()
        lost = lse < MASKED_SCORE / 2
        if self.device.type != "cpu" or bool(lost.any()):  # a look is cheaper than a pass over out, where looking is free
            out.masked_fill_(lost[..., None], 0)
        return out.unflatten(0, (self.b, self.h)), lse.clamp_min(MASKED_SCORE).unflatten(0, (self.b, self.h))

    def _nothing(self) -> tuple[Tensor, Tensor]:
        out = torch.zeros(*self.q.shape[:2], self.width, dtype=self.acc, device=self.device)
        return out, torch.full(out.shape[:2], MASKED_SCORE, dtype=self.acc, device=self.device)

    def _part(self, part: TilePart, queries: Blocked, number: int) -> tuple[Tensor, Tensor]:
        """out and log-sum-exp of one part, in its own layout."""
        keys, values, gaps = self._keys(part)
        more = self._by_query(part)
        out = torch.empty(*queries.blocks.shape[:3], self.width, dtype=self.acc, device=self.device)
        lse = torch.empty(out.shape[:3], dtype=self.acc, device=self.device)
        if not part.whole:
            out, lse = out.zero_(), lse.fill_(MASKED_SCORE)
        for turn, run in enumerate(part.runs(self.most, self.device)):
            s, _, v, _ = self._scores(run, queries.blocks, keys, values, gaps)
            apart = self._add_term(s, part, run, more)
            here = _softmax_in_place(s)
            if self.dropout:
                s *= self._kept(s, number, turn)
            y = product(s.to(self.type), v, self.sums("y", *s.shape[:2], v.shape[-1]))
            run.put(out, y if apart is None else self._with_mass(y, s, apart))
            run.put(lse, here)
        return out, lse

    def _by_query(self, part: TilePart) -> Blocked | None:
        """What the term adds by query and distance, in the layout of a part."""
        return None if self.term is None or self.term.by_query is None else Blocked(self.term.by_query, part.queries)

    def _add_term(self, s: Tensor, part: TilePart, run: TileBatch, more: Blocked | None) -> Tensor | None:
        """Scores (B * T, r, x) get what positions add; returns how far apart the pairs stand, (T r x)."""
        if self.term is None:
            return None
        apart = self.term.apart(part, run)
        self.term.add(self._tiled(s), apart, None if more is None else run.take(more.blocks))
        return apart

    def _with_mass(self, y: Tensor, weights: Tensor, apart: Tensor) -> Tensor:
        if self.term is None or not self.term.term.mass:
            return y
        return torch.cat([y, self.term.sums(self._tiled(weights), apart).flatten(0, 1)], -1)

    def _tiled(self, x: Tensor) -> Tensor:
        return x.view(len(self.q), -1, *x.shape[1:])

    @staticmethod
    def _merged(total: tuple[Tensor, Tensor] | None, queries: Blocked, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The attention over all parts so far, from that over the earlier ones and over this one."""
        at = queries.tokens
        if total is None and at is None:
            return out, lse
        if total is None:
            whole = out.new_zeros(out.shape[0], queries.length, out.shape[2])
            total = whole, torch.full_like(whole[..., 0], MASKED_SCORE)
        old, old_lse = total if at is None else (total[0][:, at], total[1][:, at])
        both = torch.logaddexp(old_lse, lse)
        merged = (old * (old_lse - both).exp()[..., None]).add_(out * (lse - both).exp()[..., None])
        if at is None:
            return merged, both
        total[0][:, at], total[1][:, at] = merged, both
        return total

    def backward(self, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and of what the term adds by query."""
        d_out, out, lse = d_out.flatten(0, 1).to(self.acc), out.flatten(0, 1), lse.flatten(0, 1)
        pull = (d_out * out).sum(-1) - d_lse.flatten(0, 1)  # what every score of a row loses
        lse = torch.where(lse < MASKED_SCORE / 2, -MASKED_SCORE, lse)  # a row that saw nothing: all its weights come out 0
        rows, d_out = torch.stack([pull, lse], -1), d_out.to(self.type)
        grads: list[Tensor | None] = [None] * 4
        for number, part in enumerate(self.plan.parts):
            queries, up, row = (Blocked(x, part.queries) for x in (self.q, d_out, rows))
            keys, values, gaps = self._keys(part)
            found = self._part_back(part, (queries.blocks, up.blocks, row.blocks), (keys, values, gaps), number)
            grads = [
                x if z is None else _accumulate(x, y, z)
                for x, y, z in zip(grads, (queries, keys, values, queries), found, strict=True)
            ]
        made = (self.q, self.k, self.v, None if self.term is None else self.term.by_query)
        grads = [torch.zeros_like(x) if g is None and x is not None else g for g, x in zip(grads, made, strict=True)]
        if grads[0] is not None:
            grads[0].mul_(self.scale)
        every = zip(grads, [*self.types, self.acc], strict=True)
        return tuple(None if x is None else x.unflatten(0, (self.b, self.h)).to(t).contiguous() for x, t in every)

    def _part_back(
        self, part: TilePart, asked: tuple[Tensor, Tensor, Tensor], held: tuple[Blocked, Blocked, Tensor | None], number: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        queries, up, row = asked
        e, more = self.v.shape[-1], self._by_query(part)
        dm = None if more is None else torch.zeros_like(more.blocks)
        dq, dk, dv = (torch.zeros(x.shape, dtype=self.acc, device=self.device) for x in (queries, held[0].blocks, held[1].blocks))
        most = self.most if self.dropout else self.most // 2  # the dice of dropout are thrown per batch of tiles
        for turn, run in enumerate(part.runs(most, self.device)):
            weights, k, v, q = self._scores(run, queries, *held)
            apart = self._add_term(weights, part, run, more)
            here, own = _softmax_in_place(weights), run.take(row).flatten(0, 1)
            # The weights are now those of this tile alone. Its share of the row goes to the gradient, which is smaller.
            share = (here - own[..., 1]).exp()[..., None]
            u = (run.take(up).flatten(0, 1) * share).to(self.type)
            d = product(u[..., :e], v.mT, self.sums("d", *weights.shape))
            if apart is not None and self.term is not None and u.shape[-1] > e:
                d += self._tiled(u[..., e:]).gather(-1, self.term.index(apart, self._tiled(d))).flatten(0, 1)
            kept = self._kept(weights, number, turn) if self.dropout else None
            d = d if kept is None else d.mul_(kept)
            d.sub_(own[..., :1] * share).mul_(weights)
            weights = weights if kept is None else weights.mul_(kept)
            self._collect(dv, run, product(weights.to(self.type).mT, u[..., :e], self.sums("dv", *v.shape)))
            low = d.to(self.type)
            self._collect(dk, run, product(low.mT, q, self.sums("dk", *k.shape)))
            run.put(dq, product(low, k, self.sums("dq", *q.shape)))
            if dm is not None and apart is not None and self.term is not None:
                run.put(dm, self.term.sums(self._tiled(d), apart))
        return dq, dk, dv, dm

    def _keys(self, part: TilePart) -> tuple[Blocked, Blocked, Tensor | None]:
        gaps = None if self.gap is None else Blocked(self.gap, part.keys).blocks[..., 0]  # (b blocks c)
        return Blocked(self.k, part.keys), Blocked(self.v, part.keys), gaps

    def _scores(self, run: TileBatch, queries: Tensor, keys: Blocked, values: Blocked, gaps: Tensor | None):
        """Scores (B * T, r, p * c) of a batch of tiles, and the keys, values and queries they are made of."""
        B, (tiles, p) = len(self.q), run.cols.shape
        k, v = (self._gather(name, x.blocks, run) for name, x in (("k", keys), ("v", values)))
        q = torch.mul(run.take(queries), self.scale, out=self.scratch("q", B, tiles, *queries.shape[2:])).flatten(0, 1)
        s = product(q, k.mT, self.sums("s", len(q), q.shape[1], k.shape[1]))
        shaped = s.view(B, tiles, *s.shape[1:])
        for low, high, mask in run.hidden:
            if mask.dtype == torch.bool:
                shaped[..., low:high].masked_fill_(mask, MASKED_SCORE)
            else:
                shaped[..., low:high].add_(mask)
        if gaps is not None:
            gap = gaps.index_select(1, run.cols.flatten()).view(self.b, 1, tiles, 1, p * keys.layout.size)
            s.view(self.b, self.h, *shaped.shape[1:]).add_(gap)
        return s, k, v, q

    def _gather(self, name: str, blocks: Tensor, run: TileBatch) -> Tensor:
        """(B * T, p * c, x): the key blocks of every tile."""
        (B, _, c, x), (tiles, p) = blocks.shape, run.cols.shape
        found = self.scratch(name, B * tiles, p * c, x)
        torch.index_select(blocks, 1, run.cols.flatten(), out=found.view(B, tiles * p, c, x))
        return found

    def _collect(self, total: Tensor, run: TileBatch, found: Tensor) -> None:
        """total (B blocks c x) += found (B * T, p * c, x), at the blocks it came from."""
        tiles, p = run.cols.shape
        found = found.view(len(self.q), tiles, p, *total.shape[2:])
        if run.slides is None:
            total.index_add_(1, run.cols.flatten(), found.flatten(1, 2))
            return
        for x in range(run.slides, run.slides + p):
            total[:, x : x + tiles] += found[:, :, x - run.slides]

    def _kept(self, like: Tensor, number: int, turn: int) -> Tensor:
        """The dropout of a batch of tiles: the same in forward and backward."""
        return dropout_mask(like, self.dropout, self.seed + (number << 40) + turn)


def dropout_mask(like: Tensor, dropout: float, seed: int) -> Tensor:
    """Throw the dice of dropout: 0 or 1 / (1 - dropout) for every weight, the same for the same seed."""
    g = torch.Generator(like.device).manual_seed(seed % 2**63)
    kept = torch.rand(like.shape, generator=g, device=like.device) >= dropout
    return kept.to(like.dtype).div_(1 - dropout)


def _softmax_in_place(s: Tensor) -> Tensor:
    """Scores become weights, in place; returns their log-sum-exp."""
    top = s.amax(-1)
    torch.softmax(s, -1, out=s) if s.device.type == "cpu" else s.copy_(torch.softmax(s, -1))
    return top - s.amax(-1).log()  # the largest weight is exp(top - lse)


def _accumulate(total: Tensor | None, blocked: Blocked, grad: Tensor) -> Tensor:
    """A gradient in the layout of a part, added to that of the whole sequence."""
    found, at = blocked.back(grad), blocked.tokens
    if at is None:
        return found if total is None else total.add_(found)
    if total is None:
        total = found.new_zeros(found.shape[0], blocked.length, found.shape[2])
    return total.index_add_(1, at, found)
