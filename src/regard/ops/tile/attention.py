"""Softmax attention over the pairs of a pattern: forward and backward in time and memory that follow the pairs.

A fused kernel belongs here, behind `tile_attention`, with the same arguments and the same results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropped

from regard.cache import bounded_cache
from regard.ops.composite import tile_attention_composite
from regard.ops.dense import few_queries_attention
from regard.ops.score_bias import ScoreBias
from regard.ops.tile.buffers import accumulator
from regard.ops.tile.torch import CPU_SCORES, DEVICE_SCORES, TileCall, TilePass, dropout_mask
from regard.patterns import Causal, Pattern, Random
from regard.patterns.plan import Plan, plan
from regard.patterns.tiles import MASKED_SCORE, Span
from regard.transforms import differentiable_grads, needs_plain_ops, untraced

__all__ = ["MASKED_SCORE", "HeadPatterns", "accumulator", "tile_attention"]

CPU_QUERY_ELEMENTS = 1 << 21  # elements of the queries computed together on a CPU


class HeadPatterns(NamedTuple):
    """A pattern as each of the heads sees it, worked out once. The text is for torch.compile, which takes no other values."""

    each: tuple[Pattern, ...]
    text: str
    bends: bool  # with the length

    @staticmethod
    def of(pattern: Pattern, heads: int) -> HeadPatterns:
        each = tuple(pattern.for_head(h, heads) for h in range(heads))
        return HeadPatterns(each, str(pattern), pattern.depends_on_length)


def tile_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: HeadPatterns,
    span: Span,
    *,
    scale: float,
    causal: bool = False,
    valid: Tensor | None = None,
    dropout: float = 0.0,
    term: ScoreBias | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax over the pairs of a pattern, of the past alone if causal, with queries and keys where the span says.

    q (b h n d), k (b h m d), v (b h m e); valid (b m): keys that exist. Returns out (b h n e) and the log-sum-exp of the scores
    (b h n) in float32 or better; a query without any pair gets 0 and UNSEEN. A term may add columns behind those of out.
    """
    term = term or ScoreBias()
    if q.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1] + term.more), q.new_zeros(q.shape[:3], dtype=accumulator(q.dtype))
    asked = TileCall(q, k, v, term.by_query, term.slopes, valid, None, term.clip, term.mass, scale, dropout)
    if needs_plain_ops():
        return _tile_composite(asked, reach, span, causal)
    if dropout:
        asked = asked._replace(seed=torch.randint(2**62, (), dtype=torch.long))
    if torch.compiler.is_compiling():  # one opaque operator: a plan is not for a tracer to look into
        return _operator(*asked, reach.text, list(span), causal)
    return _Tiled.apply(*asked, heads_by_plan(reach.each, span, causal))


def _tile_composite(asked: TileCall, reach: HeadPatterns, span: Span, causal: bool) -> tuple[Tensor, Tensor]:
    """The same where a transform or an exporter has to follow."""
    if any(isinstance(x, torch.SymInt) for x in span):
        return _any_length(asked, reach, span, causal)
    with untraced():
        work = heads_by_plan(reach.each, span, causal)
    rate = asked.dropout
    return tile_attention_composite(work, asked, (lambda weights, *_: dropped(weights, rate)) if rate else None)


def _any_length(asked: TileCall, reach: HeadPatterns, span: Span, causal: bool) -> tuple[Tensor, Tensor]:
    """The same in an exported program whose length is not fixed, which no plan can be made for: all pairs, and a mask."""
    if any(isinstance(atom, Random) for p in reach.each for atoms in p.alternatives() for atom in atoms):
        raise NotImplementedError(f"{reach.text} is drawn for one length: export it with a fixed one, without a Dim for it")
    device = asked.q.device
    i = torch.arange(span.n, device=device)[:, None] + span.t
    j = torch.arange(span.m, device=device) + span.u
    seen = torch.stack([p(0, i, j) for p in reach.each]) if len(set(reach.each)) > 1 else reach.each[0](0, i, j)
    seen = seen & (i >= j) if causal else seen
    seen = seen if asked.valid is None else seen & asked.valid[:, None, None]
    return few_queries_attention(
        asked.q, asked.k, asked.v, seen, scale=asked.scale, dropout=asked.dropout, term=asked.term, apart=i - j
    )


class PlanHeads(NamedTuple):
    """Heads that compute the same plan."""

    work: Plan
    heads: list[int]


@bounded_cache(lambda made: sum(share.work.size for share in made))
def heads_by_plan(each: tuple[Pattern, ...], span: Span, causal: bool) -> tuple[PlanHeads, ...]:
    heads: dict[Pattern, list[int]] = {}
    for h, pattern in enumerate(each):
        heads.setdefault(pattern.bound(span.n, span.m), []).append(h)
    return tuple(PlanHeads(plan(p & Causal() if causal else p, span), own) for p, own in heads.items())


@bounded_cache(lambda made: sum(share.work.size for share in made))
def _heads_by_plan(text: str, heads: int, span: Span, causal: bool) -> tuple[PlanHeads, ...]:
    return heads_by_plan(HeadPatterns.of(Pattern.parse(text), heads).each, span, causal)


def _forward(work: tuple[PlanHeads, ...], asked: TileCall) -> tuple[Tensor, Tensor]:
    pieces = _head_pieces(work, asked.q)
    if len(pieces) == 1:
        return TilePass(pieces[0][0], asked).forward()
    acc = accumulator(asked.q.dtype)
    out, lse = (torch.empty(*asked.q.shape[:3], *x, dtype=acc, device=asked.q.device) for x in ((asked.width,), ()))
    for number, (p, own) in enumerate(pieces):
        out[:, own], lse[:, own] = TilePass(p, _call_of_heads(asked, own, number)).forward()
    return out, lse


def _backward(work: tuple[PlanHeads, ...], asked: TileCall, up: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, by_query; up: out, log-sum-exp, and the gradients of both."""
    pieces = _head_pieces(work, asked.q)
    if len(pieces) == 1:
        return TilePass(pieces[0][0], asked).backward(*up)
    grads = tuple(None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in asked[:4])
    for number, (p, own) in enumerate(pieces):
        found = TilePass(p, _call_of_heads(asked, own, number)).backward(*(x[:, own] for x in up))
        for total, part in zip(grads, found, strict=True):
            if total is not None and part is not None:
                total[:, own] = part
    return grads


def _backward_again(work: tuple[PlanHeads, ...], asked: TileCall, up: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The same gradients, as functions of everything they are made of."""
    pieces = _head_pieces(work, asked.q)

    def drop(weights: Tensor, piece: int, part: int, turn: int) -> Tensor:
        seed = _other(asked.seed, piece)
        assert seed is not None
        return weights * dropout_mask(weights.flatten(0, 1), asked.dropout, int(seed) + (part << 40) + turn).view_as(weights)

    def f(q: Tensor, k: Tensor, v: Tensor, by_query: Tensor | None) -> tuple[Tensor, Tensor]:
        room = CPU_SCORES if q.device.type == "cpu" else DEVICE_SCORES
        return tile_attention_composite(pieces, TileCall(q, k, v, by_query, *asked[4:]), drop if asked.dropout else None, room)

    return differentiable_grads(f, asked[:4], up)


def _call_of_heads(asked: TileCall, own: list[int] | slice, number: int) -> TileCall:
    """The question of some heads."""
    q, k, v, by_query = (None if x is None else x[:, own] for x in asked[:4])
    slopes = None if asked.slopes is None else asked.slopes[own]
    return TileCall(q, k, v, by_query, slopes, asked.valid, _other(asked.seed, number), *asked[7:])  # type: ignore[arg-type]


def _other(seed: Tensor | None, number: int) -> Tensor | None:
    """Dice of its own for every piece: heads must not drop the same pairs."""
    return None if seed is None else (seed + number * 1_000_000_000_039) % 2**62


def _head_pieces(work: tuple[PlanHeads, ...], q: Tensor) -> list[tuple[Plan, list[int] | slice]]:
    """Heads that are computed together. On a CPU not too many: the C library gives back every tensor of more than 32 MB to the
    kernel, and getting its pages anew costs more than the arithmetic does."""
    b, _, n, d = q.shape
    if q.device.type != "cpu":
        return [(p, _neighbours(heads)) for p, heads in work]
    most = max(1, CPU_QUERY_ELEMENTS // (b * n * d))
    return [(p, _neighbours(heads[x : x + most])) for p, heads in work for x in range(0, len(heads), most)]


def _neighbours(heads: list[int]) -> list[int] | slice:
    """Heads side by side as a slice, which takes a view and no copy."""
    if heads == list(range(heads[0], heads[-1] + 1)):
        return slice(heads[0], heads[-1] + 1)
    return heads


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        asked, work = TileCall(*args[:-1]), args[-1]
        out, lse = _forward(work, asked)
        ctx.save_for_backward(*asked[:7], out, lse)
        ctx.rest = asked[7:], work
        return out.to(asked.v.dtype), lse.clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        rest, work = ctx.rest
        if torch.is_grad_enabled():  # create_graph=True: the gradients are to be differentiated once more
            return *_backward_again(work, TileCall(*tensors, *rest), (d_out, d_lse)), *[None] * 8
        return *_backward(work, TileCall(*tensors, *rest), (out, lse, d_out, d_lse)), *[None] * 8


@torch.library.custom_op("regard::tiled", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_query: Tensor | None,
    slopes: Tensor | None,
    valid: Tensor | None,
    seed: Tensor | None,
    clip: int,
    mass: bool,
    scale: float,
    dropout: float,
    pattern: str,
    span: list[int],
    causal: bool,
) -> tuple[Tensor, Tensor]:
    asked = TileCall(q, k, v, by_query, slopes, valid, seed, clip, mass, scale, dropout)
    out, lse = _forward(_heads_by_plan(pattern, q.shape[1], Span(*span), causal), asked)
    return out.to(v.dtype, copy=True), lse.clone()


@torch.library.custom_op("regard::tiled_backward", mutates_args=())
def _operator_back(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_query: Tensor | None,
    slopes: Tensor | None,
    valid: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    clip: int,
    mass: bool,
    scale: float,
    dropout: float,
    pattern: str,
    span: list[int],
    causal: bool,
) -> list[Tensor]:
    asked = TileCall(q, k, v, by_query, slopes, valid, seed, clip, mass, scale, dropout)
    work = _heads_by_plan(pattern, q.shape[1], Span(*span), causal)
    found = _backward(work, asked, (out.to(lse.dtype), lse, d_out, d_lse))
    return [x.contiguous() for x in found if x is not None]


@_operator.register_fake
def fake_tiled(q, k, v, by_query, slopes, valid, seed, clip, mass, *rest):  # noqa: ARG001
    width = v.shape[-1] + (2 * clip + 1 if mass else 0)
    return q.new_empty(*q.shape[:3], width, dtype=v.dtype), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


@_operator_back.register_fake
def fake_tiled_backward(d_out, d_lse, q, k, v, by_query, *rest):  # noqa: ARG001
    return [x.new_empty(x.shape) for x in (q, k, v, by_query) if x is not None]


def keep_tensors(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.rest = inputs[7:]


def _tile_backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple:
    found = iter(_operator_back(d_out, d_lse, *ctx.saved_tensors, *ctx.rest))
    return *(None if x is None else next(found) for x in ctx.saved_tensors[:4]), *[None] * 10


_operator.register_autograd(_tile_backward, setup_context=keep_tensors)
