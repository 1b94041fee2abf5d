"""Softmax attention over the pairs of a pattern: forward and backward in time and memory that follow the pairs.

A fused kernel belongs here, behind `tiled`, with the same arguments and the same results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropped

from regard.cache import remembered
from regard.ops.composite import composed
from regard.ops.dense import small
from regard.ops.score_bias import Term
from regard.ops.tile.buffers import accumulator
from regard.ops.tile.torch import CACHE, ROOM, Asked, Pass, kept_pairs
from regard.patterns import Causal, Pattern, Random
from regard.patterns.plan import Plan, plan
from regard.patterns.tiles import UNSEEN, Span
from regard.transforms import plainly, regraded, untraced

__all__ = ["UNSEEN", "Reach", "accumulator", "tiled"]

PIECE = 1 << 21  # elements of the queries computed together on a CPU


class Reach(NamedTuple):
    """A pattern as each of the heads sees it, worked out once. The text is for torch.compile, which takes no other values."""

    each: tuple[Pattern, ...]
    text: str
    bends: bool  # with the length

    @staticmethod
    def of(pattern: Pattern, heads: int) -> Reach:
        each = tuple(pattern.for_head(h, heads) for h in range(heads))
        return Reach(each, str(pattern), pattern.bends_with_length)


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: Reach,
    span: Span,
    *,
    scale: float,
    causal: bool = False,
    valid: Tensor | None = None,
    dropout: float = 0.0,
    term: Term | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax over the pairs of a pattern, of the past alone if causal, with queries and keys where the span says.

    q (b h n d), k (b h m d), v (b h m e); valid (b m): keys that exist. Returns out (b h n e) and the log-sum-exp of the scores
    (b h n) in float32 or better; a query without any pair gets 0 and UNSEEN. A term may add columns behind those of out.
    """
    term = term or Term()
    if q.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1] + term.more), q.new_zeros(q.shape[:3], dtype=accumulator(q.dtype))
    asked = Asked(q, k, v, term.by_query, term.slopes, valid, None, term.clip, term.mass, scale, dropout)
    if plainly():
        return _plain(asked, reach, span, causal)
    if dropout:
        asked = asked._replace(seed=torch.randint(2**62, (), dtype=torch.long))
    if torch.compiler.is_compiling():  # one opaque operator: a plan is not for a tracer to look into
        return _operator(*asked, reach.text, list(span), causal)
    return _Tiled.apply(*asked, shares(reach.each, span, causal))


def _plain(asked: Asked, reach: Reach, span: Span, causal: bool) -> tuple[Tensor, Tensor]:
    """The same where a transform or an exporter has to follow."""
    if any(isinstance(x, torch.SymInt) for x in span):
        return _any_length(asked, reach, span, causal)
    with untraced():
        work = shares(reach.each, span, causal)
    rate = asked.dropout
    return composed(work, asked, (lambda weights, *_: dropped(weights, rate)) if rate else None)


def _any_length(asked: Asked, reach: Reach, span: Span, causal: bool) -> tuple[Tensor, Tensor]:
    """The same in an exported program whose length is not fixed, which no plan can be made for: all pairs, and a mask."""
    if any(isinstance(atom, Random) for p in reach.each for atoms in p.alternatives() for atom in atoms):
        raise NotImplementedError(f"{reach.text} is drawn for one length: export it with a fixed one, without a Dim for it")
    device = asked.q.device
    i = torch.arange(span.n, device=device)[:, None] + span.t
    j = torch.arange(span.m, device=device) + span.u
    seen = torch.stack([p(0, i, j) for p in reach.each]) if len(set(reach.each)) > 1 else reach.each[0](0, i, j)
    seen = seen & (i >= j) if causal else seen
    seen = seen if asked.valid is None else seen & asked.valid[:, None, None]
    return small(asked.q, asked.k, asked.v, seen, scale=asked.scale, dropout=asked.dropout, term=asked.term, apart=i - j)


class Share(NamedTuple):
    """Heads that compute the same plan."""

    work: Plan
    heads: list[int]


@remembered(lambda made: sum(share.work.size for share in made))
def shares(each: tuple[Pattern, ...], span: Span, causal: bool) -> tuple[Share, ...]:
    heads: dict[Pattern, list[int]] = {}
    for h, pattern in enumerate(each):
        heads.setdefault(pattern.bound(span.n, span.m), []).append(h)
    return tuple(Share(plan(p & Causal() if causal else p, span), own) for p, own in heads.items())


@remembered(lambda made: sum(share.work.size for share in made))
def _shares_of(text: str, heads: int, span: Span, causal: bool) -> tuple[Share, ...]:
    return shares(Reach.of(Pattern.parse(text), heads).each, span, causal)


def _forward(work: tuple[Share, ...], asked: Asked) -> tuple[Tensor, Tensor]:
    pieces = _pieces(work, asked.q)
    if len(pieces) == 1:
        return Pass(pieces[0][0], asked).forward()
    acc = accumulator(asked.q.dtype)
    out, lse = (torch.empty(*asked.q.shape[:3], *x, dtype=acc, device=asked.q.device) for x in ((asked.width,), ()))
    for number, (p, own) in enumerate(pieces):
        out[:, own], lse[:, own] = Pass(p, _of_heads(asked, own, number)).forward()
    return out, lse


def _backward(work: tuple[Share, ...], asked: Asked, up: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, by_query; up: out, log-sum-exp, and the gradients of both."""
    pieces = _pieces(work, asked.q)
    if len(pieces) == 1:
        return Pass(pieces[0][0], asked).backward(*up)
    grads = tuple(None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in asked[:4])
    for number, (p, own) in enumerate(pieces):
        found = Pass(p, _of_heads(asked, own, number)).backward(*(x[:, own] for x in up))
        for total, part in zip(grads, found, strict=True):
            if total is not None and part is not None:
                total[:, own] = part
    return grads


def _backward_again(work: tuple[Share, ...], asked: Asked, up: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The same gradients, as functions of everything they are made of."""
    pieces = _pieces(work, asked.q)

    def drop(weights: Tensor, piece: int, part: int, turn: int) -> Tensor:
        seed = _other(asked.seed, piece)
        assert seed is not None
        return weights * kept_pairs(weights.flatten(0, 1), asked.dropout, int(seed) + (part << 40) + turn).view_as(weights)

    def f(q: Tensor, k: Tensor, v: Tensor, by_query: Tensor | None) -> tuple[Tensor, Tensor]:
        room = CACHE if q.device.type == "cpu" else ROOM
        return composed(pieces, Asked(q, k, v, by_query, *asked[4:]), drop if asked.dropout else None, room)

    return regraded(f, asked[:4], up)


def _of_heads(asked: Asked, own: list[int] | slice, number: int) -> Asked:
    """The question of some heads."""
    q, k, v, by_query = (None if x is None else x[:, own] for x in asked[:4])
    slopes = None if asked.slopes is None else asked.slopes[own]
    return Asked(q, k, v, by_query, slopes, asked.valid, _other(asked.seed, number), *asked[7:])  # type: ignore[arg-type]


def _other(seed: Tensor | None, number: int) -> Tensor | None:
    """Dice of its own for every piece: heads must not drop the same pairs."""
    return None if seed is None else (seed + number * 1_000_000_000_039) % 2**62


def _pieces(work: tuple[Share, ...], q: Tensor) -> list[tuple[Plan, list[int] | slice]]:
    """Heads that are computed together. On a CPU not too many: the C library gives back every tensor of more than 32 MB to the
    kernel, and getting its pages anew costs more than the arithmetic does."""
    b, _, n, d = q.shape
    if q.device.type != "cpu":
        return [(p, _neighbours(heads)) for p, heads in work]
    most = max(1, PIECE // (b * n * d))
    return [(p, _neighbours(heads[x : x + most])) for p, heads in work for x in range(0, len(heads), most)]


def _neighbours(heads: list[int]) -> list[int] | slice:
    """Heads side by side as a slice, which takes a view and no copy."""
    if heads == list(range(heads[0], heads[-1] + 1)):
        return slice(heads[0], heads[-1] + 1)
    return heads


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        asked, work = Asked(*args[:-1]), args[-1]
        out, lse = _forward(work, asked)
        ctx.save_for_backward(*asked[:7], out, lse)
        ctx.rest = asked[7:], work
        return out.to(asked.v.dtype), lse.clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        rest, work = ctx.rest
        if torch.is_grad_enabled():  # create_graph=True: the gradients are to be differentiated once more
            return *_backward_again(work, Asked(*tensors, *rest), (d_out, d_lse)), *[None] * 8
        return *_backward(work, Asked(*tensors, *rest), (out, lse, d_out, d_lse)), *[None] * 8


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
    asked = Asked(q, k, v, by_query, slopes, valid, seed, clip, mass, scale, dropout)
    out, lse = _forward(_shares_of(pattern, q.shape[1], Span(*span), causal), asked)
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
    asked = Asked(q, k, v, by_query, slopes, valid, seed, clip, mass, scale, dropout)
    work = _shares_of(pattern, q.shape[1], Span(*span), causal)
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


def _go_back(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple:
    found = iter(_operator_back(d_out, d_lse, *ctx.saved_tensors, *ctx.rest))
    return *(None if x is None else next(found) for x in ctx.saved_tensors[:4]), *[None] * 10


_operator.register_autograd(_go_back, setup_context=keep_tensors)
