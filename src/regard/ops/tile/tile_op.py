"""Softmax attention over the pairs of a pattern: forward and backward in time and memory that follow the pairs.

`tile_attention` chooses a backend (`regard.ops.backend`) and wraps it for autograd and torch.compile. A fused kernel is one more
backend: see `TileBackend`. Function transforms, second derivatives and export use `regard.ops.composite` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache import bounded_cache, signature_cache
from regard.ops.backend import _BACKENDS, AUTO, choose_backend, register_backend
from regard.ops.composite import tile_attention_composite
from regard.ops.dense import few_queries_attention
from regard.ops.dropout_hash import draw_seed
from regard.ops.score_bias import ScoreBias
from regard.ops.tile.call import (
    Gradients,
    HeadPlans,
    PlanHeads,
    PreparedPass,
    TileBackend,
    TileCall,
    accumulator,
)
from regard.ops.tile.reference import ReferenceTiles
from regard.ops.tile.tile_sizes import packed_strides, strides_like
from regard.ops.tile.torch import TorchTiles
from regard.ops.tile.triton import TritonTiles
from regard.patterns import Causal, Pattern, Random
from regard.patterns.plan import plan
from regard.patterns.tiles import MASKED_SCORE, Span
from regard.transforms import differentiable_grads, needs_plain_ops, untraced

__all__ = ["MASKED_SCORE", "HeadPatterns", "accumulator", "tile_attention"]

FLAT_TENSORS = 7  # the first fields of `flatten_call`; those up to DIFFERENTIABLE have gradients
DIFFERENTIABLE = 4
NO_TENSORS = (None,) * 4  # those of `flatten_call` behind q, k and v

register_backend("tile", TritonTiles())
register_backend("tile", TorchTiles())
register_backend("tile", ReferenceTiles())


class HeadPatterns(NamedTuple):
    """The pattern of every query head, computed once. torch.compile takes the text."""

    each: tuple[Pattern, ...]
    text: str
    grain: int  # lengths of as many pieces of this size have the same pairs; 0: all lengths

    @property
    def bends(self) -> bool:
        """Return whether the pairs change with the length."""
        return self.grain > 0

    @property
    def draws(self) -> bool:
        """Return whether some pairs are drawn, which a tracer cannot do."""
        return "Random(" in self.text

    @staticmethod
    def of(pattern: Pattern, heads: int) -> HeadPatterns:
        each = tuple(pattern.for_head(h, heads) for h in range(heads))
        return HeadPatterns(each, str(pattern), pattern.length_grain)


def tile_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: HeadPatterns,
    span: Span,
    *,
    scale: float,
    causal: bool = False,
    valid: Tensor | None = None,
    bias: ScoreBias | None = None,
    dropout: float = 0.0,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(scale * q.k) over the pairs of a pattern, of the past alone if causal, at the positions of the span.

    q (b h n d), k (b g m d), v (b g m e) with g a divisor of h; valid (b m): keys that exist. Returns out (b h n e) and the
    log-sum-exp of the scores (b h n) in float32 or better; a query without any pair gets 0 and MASKED_SCORE. A bias may add
    columns behind those of out. Dropout depends on a seed, the head and the two positions: see `regard.ops.dropout_hash`.
    """
    if q.numel() == 0:
        more = 0 if bias is None else bias.more
        out = q.new_zeros(*q.shape[:3], v.shape[-1] + more)
        return out, q.new_zeros(q.shape[:3], dtype=accumulator(q.dtype))
    seed = draw_seed(q.device) if dropout else None
    call = TileCall(q, k, v, valid, bias, seed, scale, dropout)
    if needs_plain_ops():
        return _tile_composite(call, patterns, span, causal)
    if torch.compiler.is_compiling():  # one opaque operator: a plan depends on the length, which a tracer does not have
        return _operator(*flatten_call(call), patterns.text, list(span), causal, backend)
    if len(patterns.each) != q.shape[1]:
        raise ValueError(f"{patterns.text} was made for {len(patterns.each)} heads, and q has {q.shape[1]}")
    run = _tile_pass(pass_key(call, patterns.text, span, causal, backend), call, patterns)
    by_query = None if bias is None else bias.by_query
    if _needs_grad(q, k, v, by_query):
        return _TileFunction.apply(q, k, v, by_query, call, run)
    out, lse = run.forward(call)
    return out.to(v.dtype), lse


class PlannedPass:
    """The pass of a backend that prepares nothing but the plan."""

    def __init__(self, backend: TileBackend, plans: HeadPlans) -> None:
        self.backend, self.plans = backend, plans
        self.size = sum(own.plan.size for own in plans)

    def forward(self, call: TileCall) -> tuple[Tensor, Tensor]:
        return self.backend.forward(call, self.plans)

    def backward(self, call: TileCall, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Gradients:
        return self.backend.backward(call, self.plans, out, lse, d_out, d_lse)


def _needs_grad(q: Tensor, k: Tensor, v: Tensor, by_query: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return q.requires_grad or k.requires_grad or v.requires_grad or (by_query is not None and by_query.requires_grad)


def pass_key(call: TileCall, text: str, span: Span, causal: bool, backend: str) -> tuple[Hashable, ...]:
    """Return all that a pass depends on, except the values of tensors: pattern, shapes, strides, types, devices and options."""
    q, k, v, valid, bias, _, scale, dropout = call
    shapes = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype)
    devices = (q.is_cuda, q.get_device(), k.get_device(), v.get_device())
    biased = None if bias is None else (bias.slopes is None, bias.clip, bias.by_query is None, bias.mass)
    precision = torch.get_float32_matmul_precision() if q.dtype == torch.float32 else None
    every = tuple(_BACKENDS["tile"].values())
    return text, span, causal, backend, every, shapes, devices, valid is None, biased, scale, dropout, precision


@signature_cache
def _tile_pass(key: tuple[Any, ...], call: TileCall, patterns: HeadPatterns | None) -> PreparedPass:
    """Plan a call and prepare the pass of the backend that computes it; `patterns`: those of the text in the key, if made."""
    text, span, causal, backend, *_ = key
    if patterns is None:
        plans = heads_by_plan_of_text(text, call.q.shape[1], span, causal)
    else:
        plans = heads_by_plan(patterns.each, span, causal)
    chosen = choose_backend("tile", backend, call, plans)
    prepare = getattr(chosen, "prepare", None)
    return PlannedPass(chosen, plans) if prepare is None else prepare(call, plans)


def _tile_composite(call: TileCall, patterns: HeadPatterns, span: Span, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the same in operations that a transform or an exporter can follow."""
    if any(isinstance(x, torch.SymInt) for x in span):
        return _any_length(call, patterns, span, causal)
    with untraced():
        plans = heads_by_plan(patterns.each, span, causal)
    return tile_attention_composite(plans, call)


def _any_length(call: TileCall, patterns: HeadPatterns, span: Span, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the same in an exported program of any length, which no plan can be made for: all pairs, and a mask."""
    atoms = (atom for p in patterns.each for alternative in p.alternatives() for atom in alternative)
    if any(isinstance(atom, Random) for atom in atoms):
        raise NotImplementedError(f"{patterns.text} is drawn for one length: export it with a fixed one, without a Dim for it")
    device, each = call.q.device, patterns.each
    i = torch.arange(span.n, device=device)[:, None] + span.t
    j = torch.arange(span.m, device=device) + span.u
    seen = torch.stack([p(0, i, j) for p in each]) if len(set(each)) > 1 else each[0](0, i, j)
    if causal:
        seen = seen & (i >= j)
    if call.valid is not None:
        seen = seen & call.valid[:, None, None]
    return few_queries_attention(
        call.q, call.k, call.v, seen, scale=call.scale, dropout=call.dropout, term=call.bias, apart=i - j
    )


@bounded_cache(lambda made: sum(own.plan.size for own in made))
def heads_by_plan(each: tuple[Pattern, ...], span: Span, causal: bool) -> HeadPlans:
    """Plan the pattern of every head; heads with equal patterns share one."""
    heads: dict[Pattern, list[int]] = {}
    for h, pattern in enumerate(each):
        heads.setdefault(pattern.bound(span.n, span.m), []).append(h)
    found = []
    for p, own in heads.items():
        seen = p & Causal() if causal else p
        found.append(PlanHeads(plan(seen, span), tuple(own)))
    return tuple(found)


@bounded_cache(lambda made: sum(own.plan.size for own in made))
def heads_by_plan_of_text(text: str, heads: int, span: Span, causal: bool) -> HeadPlans:
    patterns = HeadPatterns.of(Pattern.parse(text), heads)
    return heads_by_plan(patterns.each, span, causal)


def flatten_call(call: TileCall) -> tuple[Any, ...]:
    """Return the fields as autograd and operators take them: q, k, v, by_query, slopes, valid, seed, then numbers."""
    bias = call.bias or ScoreBias()
    tensors = (call.q, call.k, call.v, bias.by_query, bias.slopes, call.valid, call.seed)
    return *tensors, bias.clip, bias.mass, call.scale, call.dropout


def unflatten_call(
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
) -> TileCall:
    """Undo `flatten_call`."""
    none = by_query is None and slopes is None and not mass
    bias = None if none else ScoreBias(slopes, clip, by_query, mass)
    return TileCall(q, k, v, valid, bias, seed, scale, dropout)


def _differentiable_backward(call: TileCall, plans: HeadPlans, grads: tuple[Tensor, Tensor]) -> list[Tensor | None]:
    """Compute the gradients as functions of everything they depend on: for create_graph=True."""
    flat = flatten_call(call)

    def f(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        call = unflatten_call(*inputs, *flat[DIFFERENTIABLE:])  # type: ignore[arg-type]
        return tile_attention_composite(plans, call)

    return differentiable_grads(f, flat[:DIFFERENTIABLE], grads)


class _TileFunction(torch.autograd.Function):
    """A pass for autograd. Arguments: the tensors that have gradients, the call and the pass."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        call, run = args[DIFFERENTIABLE:]
        out, lse = run.forward(call)
        q, k, v, valid, bias, seed, scale, dropout = call
        plain = valid is None and bias is None and seed is None
        more = () if plain else flatten_call(call)[3:FLAT_TENSORS]
        ctx.save_for_backward(q, k, v, out, lse, *more)
        ctx.run = run
        ctx.options = (0, False, scale, dropout) if bias is None else (bias.clip, bias.mass, scale, dropout)
        ctx.set_materialize_grads(False)
        return out if out.dtype == v.dtype else out.to(v.dtype), lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *more = ctx.saved_tensors
        call = unflatten_call(q, k, v, *(more or NO_TENSORS), *ctx.options)
        run = ctx.run
        if d_out is None:
            d_out = torch.zeros_like(out, dtype=v.dtype)
        if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated once more
            if d_lse is None:
                d_lse = torch.zeros_like(lse)
            return *_differentiable_backward(call, run.plans, (d_out, d_lse)), None, None
        return *run.backward(call, out, lse, d_out, d_lse), None, None


@torch.library.custom_op("regard::tile_attention", mutates_args=())
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
    backend: str,
) -> tuple[Tensor, Tensor]:
    call = unflatten_call(q, k, v, by_query, slopes, valid, seed, clip, mass, scale, dropout)
    out, lse = _tile_pass(pass_key(call, pattern, Span(*span), causal, backend), call, None).forward(call)
    return _laid_out(out.to(v.dtype), q), lse


@torch.library.custom_op("regard::tile_attention_backward", mutates_args=())
def _operator_backward(
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
    backend: str,
) -> list[Tensor]:
    call = unflatten_call(q, k, v, by_query, slopes, valid, seed, clip, mass, scale, dropout)
    run = _tile_pass(pass_key(call, pattern, Span(*span), causal, backend), call, None)
    found = run.backward(call, out, lse, d_out, d_lse)
    return [_laid_out(x, like) for x, like in zip(found, (q, k, v, by_query), strict=True) if x is not None and like is not None]


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Return x (b h n width), copied unless it has the layout that a compiler was promised: that of another tensor."""
    strides = strides_like(x.shape, packed_strides(like))
    return x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def fake_tile_attention(q, k, v, by_query, slopes, valid, seed, clip, mass, *rest):  # noqa: ARG001
    classes = 2 * clip + 1 if mass else 0
    out = q.new_empty(*q.shape[:3], v.shape[-1] + classes, dtype=v.dtype)
    lse = q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))
    return out, lse


def fake_tile_attention_backward(d_out, d_lse, q, k, v, by_query, *rest):  # noqa: ARG001
    return [x.new_empty(x.shape) for x in (q, k, v, by_query) if x is not None]


@_operator.register_fake
def _(q, *others):
    out, lse = fake_tile_attention(q, *others)
    return _laid_out(out, q), lse


@_operator_backward.register_fake
def _(d_out, d_lse, q, k, v, by_query, *rest):
    found = fake_tile_attention_backward(d_out, d_lse, q, k, v, by_query, *rest)
    return [_laid_out(x, like) for x, like in zip(found, [y for y in (q, k, v, by_query) if y is not None], strict=True)]


def keep_tensors(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:FLAT_TENSORS], *output)
    ctx.rest = inputs[FLAT_TENSORS:]


def operator_grads(backward: Callable[..., list[Tensor]]) -> Callable[..., tuple]:
    """Return the gradients, for autograd, of an operator that takes `flatten_call` and more arguments.

    `backward` is the operator that computes them: one for each differentiable tensor that is not None.
    """

    def grads(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple:
        found = iter(backward(d_out, d_lse, *ctx.saved_tensors, *ctx.rest))
        own = [None if x is None else next(found) for x in ctx.saved_tensors[:DIFFERENTIABLE]]
        others = FLAT_TENSORS - DIFFERENTIABLE + len(ctx.rest)
        return *own, *[None] * others

    return grads


_operator.register_autograd(operator_grads(_operator_backward), setup_context=keep_tensors)
