"""Softmax attention over the tiles of a plan: forward and backward in time and memory that follow the pairs.

Plain PyTorch on any device. A fused kernel belongs behind `tiled`, with the same arguments and the same results.
B = b * h rows of heads, r queries and c keys per block, p key blocks per tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.kernels.parts import Layout, Part, Run, Span
from regard.kernels.plan import Plan, plan
from regard.mixers.patterns import Pattern

UNSEEN = -1e30  # the score of a pair that does not exist: finite, so that no row makes a NaN
CACHE = 1 << 19  # score elements at a time on a CPU: two buffers stay in the L2 cache
ROOM = 1 << 26  # and on other devices


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    span: Span,
    *,
    scale: float,
    valid: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Softmax over the pairs of a pattern (of one head, bound to its length), with queries and keys where the span says.

    q (b h n d), k (b h m d), v (b h m e); valid (b m): keys that exist. Returns out (b h n e) and the log-sum-exp of the scores
    (b h n) in float32 or better; a query without any pair gets 0 and UNSEEN.
    """
    if q.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3], dtype=accumulator(q.dtype))
    seed = torch.randint(2**62, (), dtype=torch.long) if dropout else None
    if torch.compiler.is_compiling():  # one opaque operator: a plan is not for a tracer to look into
        return _operator(q, k, v, valid, seed, pattern.__repr__(), list(span), scale, dropout)
    return _Tiled.apply(q, k, v, valid, seed, plan(pattern, span), scale, dropout)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Scratch:
    """Buffers used again by every batch of tiles: fresh pages cost more than the arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.flat: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        flat = self.flat.get(name)
        if flat is None or len(flat) < size:
            flat = self.flat[name] = self.like.new_empty(size)
        return flat[:size].view(shape)


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Batched matrix product into a buffer of the accumulating type."""
    if a.dtype == out.dtype:
        return torch.bmm(a, b, out=out)
    return torch.bmm(a, b, out_dtype=out.dtype)  # half precision on a GPU: operands stay half, sums are float32


class _Blocked:
    """A sequence (B length x) seen through a layout, (B blocks size x), and the way back."""

    def __init__(self, x: Tensor, layout: Layout) -> None:
        self.layout, self.length, self.device = layout, x.shape[1], x.device
        if layout.index is not None:
            x = x.index_select(1, layout.moves(x.device)[0])
        elif layout.blocks * layout.size > x.shape[1]:
            x = torch.nn.functional.pad(x, (0, 0, 0, layout.blocks * layout.size - x.shape[1]))
        self.blocks = x.unflatten(1, (layout.blocks, layout.size))

    @property
    def tokens(self) -> Tensor | None:
        """Which tokens `back` speaks of; None: all of them, in order."""
        if self.layout.index is None or self.layout.everyone:
            return None
        moves, back = self.layout.moves(self.device)
        return moves[back]

    def back(self, blocks: Tensor) -> Tensor:
        """(B blocks size ...) -> (B tokens ...)."""
        flat = blocks.flatten(1, 2)
        if self.layout.index is None:
            return flat[:, : self.length]
        return flat.index_select(1, self.layout.moves(self.device)[1])


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        seed: Tensor | None,
        work: Plan,
        scale: float,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _Work(q, k, v, valid, seed, work, scale, dropout).forward()
        ctx.save_for_backward(q, k, v, valid, seed, out, lse)
        ctx.rest = (work, scale, dropout)
        return out.to(v.dtype), lse.clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, valid, seed, out, lse = ctx.saved_tensors
        grads = _Work(q, k, v, valid, seed, *ctx.rest).backward(out, lse, d_out, d_lse)
        return *grads, None, None, None, None, None


@torch.library.custom_op("regard::tiled", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    span: list[int],
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _Work(q, k, v, valid, seed, plan(Pattern.parse(pattern), Span(*span)), scale, dropout).forward()
    return out.to(v.dtype, copy=True), lse


@torch.library.custom_op("regard::tiled_backward", mutates_args=())
def _operator_back(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    pattern: str,
    span: list[int],
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    work = _Work(q, k, v, valid, seed, plan(Pattern.parse(pattern), Span(*span)), scale, dropout)
    return work.backward(out.to(work.acc), lse, d_out, d_lse)


@_operator.register_fake
def _(q, k, v, valid, seed, pattern, span, scale, dropout):  # noqa: ARG001
    return q.new_empty(*q.shape[:3], v.shape[-1], dtype=v.dtype), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


@_operator_back.register_fake
def _(d_out, d_lse, q, k, v, valid, seed, out, lse, pattern, span, scale, dropout):  # noqa: ARG001
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.rest = inputs[5:]


def _go_back(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple:
    grads = _operator_back(d_out, d_lse, *ctx.saved_tensors, *ctx.rest)
    return *grads, *[None] * 6


_operator.register_autograd(_go_back, setup_context=_keep)


class _Work:
    """One pass over a plan."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, seed: Tensor | None, work: Plan, scale: float, dropout: float
    ) -> None:
        self.b, self.h, self.plan, self.scale = q.shape[0], q.shape[1], work, scale
        self.dropout, self.seed, self.device = dropout, 0 if seed is None else int(seed), q.device
        self.types = [x.dtype for x in (q, k, v)]
        self.acc = accumulator(q.dtype)
        # Half precision is for tensor cores; a CPU is as fast, and closer to the truth, in float32.
        self.type = q.dtype if q.device.type == "cuda" else self.acc
        self.q, self.k, self.v = ((x.flatten(0, 1).to(self.type)) for x in (q * scale, k, v))
        self.gap = None if valid is None else torch.where(valid, 0.0, UNSEEN).to(self.acc)[..., None]  # (b m 1)
        self.scratch = _Scratch(self.q)
        self.sums = _Scratch(torch.empty(0, dtype=self.acc, device=q.device))
        self.most = max(1, (CACHE if q.device.type == "cpu" else ROOM) // max(len(self.q), 1))

    def forward(self) -> tuple[Tensor, Tensor]:
        B, n, e = len(self.q), self.q.shape[1], self.v.shape[-1]
        out = torch.zeros(B, n, e, dtype=self.acc, device=self.device)
        lse = torch.full((B, n), UNSEEN, dtype=self.acc, device=self.device)
        for number, part in enumerate(self.plan.parts):
            queries = _Blocked(self.q, part.queries)
            o = torch.zeros(B, part.queries.blocks, part.queries.size, e, dtype=self.acc, device=self.device)
            l = torch.full(o.shape[:3], UNSEEN, dtype=self.acc, device=self.device)  # noqa: E741
            self._part(part, queries, o, l, number)
            self._merge(queries, o, l, out, lse, first=number == 0)
        out.masked_fill_((lse < UNSEEN / 2)[..., None], 0)
        return out.unflatten(0, (self.b, self.h)), lse.clamp_min_(UNSEEN).unflatten(0, (self.b, self.h))

    def _part(self, part: Part, queries: _Blocked, o: Tensor, l: Tensor, number: int) -> None:  # noqa: E741
        keys, values, gaps = self._keys(part)
        for turn, run in enumerate(part.runs(self.most, self.device)):
            s, _, v, _ = self._scores(run, queries.blocks, keys, values, gaps)
            top = s.amax(-1)
            torch.softmax(s, -1, out=s) if s.device.type == "cpu" else s.copy_(torch.softmax(s, -1))
            here = top - s.amax(-1).log()  # the largest weight is exp(top - lse)
            if self.dropout:
                s *= self._kept(s, number, turn)
            y = _product(s.to(self.type), v, self.sums("y", *s.shape[:2], v.shape[-1]))
            shape = (len(self.q), len(run.rows), part.queries.size)
            o[:, run.rows], l[:, run.rows] = y.view(*shape, -1), here.view(shape)

    def _merge(self, queries: _Blocked, o: Tensor, l: Tensor, out: Tensor, lse: Tensor, first: bool) -> None:  # noqa: E741
        o, l, at = queries.back(o), queries.back(l), queries.tokens  # noqa: E741
        if first and at is None:
            out.copy_(o)
            lse.copy_(l)
            return
        old, old_lse = (out, lse) if at is None else (out[:, at], lse[:, at])
        total = torch.logaddexp(old_lse, l)
        both = (old * (old_lse - total).exp()[..., None]).add_(o * (l - total).exp()[..., None])
        if at is None:
            out.copy_(both)
            lse.copy_(total)
        else:
            out[:, at], lse[:, at] = both, total

    def backward(self, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d_out, out, lse = d_out.flatten(0, 1).to(self.acc), out.flatten(0, 1), lse.flatten(0, 1)
        pull = (d_out * out).sum(-1) - d_lse.flatten(0, 1)  # what every score of a row loses
        lse = torch.where(lse < UNSEEN / 2, -UNSEEN, lse)  # a row that saw nothing: all its weights come out 0
        rows = torch.cat([pull[..., None], lse[..., None]], -1)
        dq, dk, dv = (torch.zeros(x.shape, dtype=self.acc, device=self.device) for x in (self.q, self.k, self.v))
        for number, part in enumerate(self.plan.parts):
            queries, up, row = (_Blocked(x, part.queries) for x in (self.q, d_out.to(self.type), rows))
            self._part_back(part, queries, up.blocks, row.blocks, (dq, dk, dv), number)
        dq *= self.scale
        dq, dk, dv = (x.unflatten(0, (self.b, self.h)).to(t) for x, t in zip((dq, dk, dv), self.types, strict=True))
        return dq, dk, dv

    def _part_back(self, part: Part, queries: _Blocked, up: Tensor, row: Tensor, grads: tuple[Tensor, ...], number: int) -> None:
        keys, values, gaps = self._keys(part)
        dq, dk, dv = (
            torch.zeros(x.shape, dtype=self.acc, device=self.device) for x in (queries.blocks, keys.blocks, values.blocks)
        )
        for turn, run in enumerate(part.runs(self.most, self.device)):
            weights, k, v, q = self._scores(run, queries.blocks, keys, values, gaps)
            u, here = up[:, run.rows].flatten(0, 1), row[:, run.rows].flatten(0, 1)
            weights.sub_(here[..., 1:]).exp_()
            d = _product(u, v.mT, self.sums("d", *weights.shape))
            kept = self._kept(weights, number, turn) if self.dropout else None
            d = d if kept is None else d.mul_(kept)
            d.sub_(here[..., :1]).mul_(weights)
            weights = weights if kept is None else weights.mul_(kept)
            self._collect(dv, run, _product(weights.to(self.type).mT, u, self.sums("dv", *v.shape)))
            low = d.to(self.type)
            self._collect(dk, run, _product(low.mT, q, self.sums("dk", *k.shape)))
            y = _product(low, k, self.sums("dq", *q.shape))
            dq[:, run.rows] = y.view(len(self.q), len(run.rows), *y.shape[1:])
        for blocked, grad, total in zip((queries, keys, values), (dq, dk, dv), grads, strict=True):
            at = blocked.tokens
            total.add_(blocked.back(grad)) if at is None else total.index_add_(1, at, blocked.back(grad))

    def _keys(self, part: Part) -> tuple[_Blocked, _Blocked, Tensor | None]:
        gaps = None if self.gap is None else _Blocked(self.gap, part.keys).blocks[..., 0]  # (b blocks c)
        return _Blocked(self.k, part.keys), _Blocked(self.v, part.keys), gaps

    def _scores(self, run: Run, queries: Tensor, keys: _Blocked, values: _Blocked, gaps: Tensor | None):
        """Scores (B * T, r, p * c) of a batch of tiles, and the keys, values and queries they are made of."""
        B, (tiles, p) = len(self.q), run.cols.shape
        index = run.cols.flatten()
        k, v = (self._gather(name, x.blocks, index, tiles) for name, x in (("k", keys), ("v", values)))
        q = queries[:, run.rows].flatten(0, 1)
        s = _product(q, k.mT, self.sums("s", len(q), q.shape[1], k.shape[1]))
        shaped = s.view(B, tiles, *s.shape[1:])
        for low, high, mask in run.hidden:
            shaped[..., low:high].masked_fill_(mask, UNSEEN)
        if gaps is not None:
            gap = gaps.index_select(1, index).view(self.b, 1, tiles, 1, p * keys.layout.size)
            s.view(self.b, self.h, *shaped.shape[1:]).add_(gap)
        return s, k, v, q

    def _gather(self, name: str, blocks: Tensor, index: Tensor, tiles: int) -> Tensor:
        """(B * T, p * c, x): the key blocks of every tile."""
        B, _, c, x = blocks.shape
        found = self.scratch(name, B, len(index), c, x)
        torch.index_select(blocks, 1, index, out=found)
        return found.view(B * tiles, -1, x)

    def _collect(self, total: Tensor, run: Run, found: Tensor) -> None:
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
        g = torch.Generator(self.device).manual_seed((self.seed + (number << 40) + turn) % 2**63)
        kept = torch.rand(like.shape, generator=g, device=self.device) >= self.dropout
        return kept.to(self.acc).div_(1 - self.dropout)
