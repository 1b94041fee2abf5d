"""The attention function of a Spec, as transformers calls it: from queries, keys and values of any model to their outputs."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from regard.hf.model_mask import MaskRule, ModelMask
from regard.hf.spec_core import has_pattern, spec_core
from regard.mixers.attention import no_autocast
from regard.mixers.base import Can, Core, Places, need_claims
from regard.mixers.feature_math import per_query_head
from regard.mixers.kv_cache import CachedCore, KVCache
from regard.mixers.softmax import Softmax
from regard.mixers.sparse import Sparse
from regard.ops.backend import SlowBackend
from regard.patterns import Everything

MEMORY = "regard_memory"  # attribute of keys that come from a cache of `regard.hf.memory`
_REFUSED = {"cache": "has a paged cache"}


class LayerTable(Protocol):
    """Give the text of the mechanism of an attention module."""

    def of(self, module: nn.Module) -> str: ...


class ScoreTerms(NamedTuple):
    """What a model does to its scores, beside scaling them: with any of it they are computed for all pairs."""

    bias: Tensor | None = None  # added, broadcasts to (b h n m)
    cap: float | None = None  # x becomes cap tanh(x / cap)
    sinks: Tensor | None = None  # (h): scores of a further key of each head, whose value is 0

    @property
    def used(self) -> bool:
        return any(term is not None for term in self)


class QueryKeyValue(NamedTuple):
    """Queries (b h n d), keys (b g m d) and values (b g m e) of a call."""

    q: Tensor
    k: Tensor
    v: Tensor


def spec_attention(
    specs: LayerTable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend by the Spec of a module: query (b h n d), key (b g m d), value (b g m e) -> (b n h e), and no weights.

    Cross attention is always softmax. What a model does to its scores (`position_bias`, `softcap`, learned sinks `s_aux`), a mask
    of n x m numbers and mask functions of the user's own are computed in full, for softmax and patterns alone.
    """
    _check_options(module, options)
    terms = ScoreTerms(position_bias, softcap, s_aux)
    heads, mask = _same_type(query, key, value), attention_mask
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    rule = mask.rule(sliding_window, causal) if isinstance(mask, ModelMask) else None
    if mask is None:
        rule = MaskRule(causal)
    if rule is not None:
        causal = rule.causal
    cross = _is_cross(module, heads, causal)
    spec = "softmax" if cross else specs.of(module)
    memory = None if cross else getattr(key, MEMORY, None)
    if rule is not None and rule.within is not None and memory is None and _covers(rule, mask, key):
        rule = MaskRule(rule.causal)
    sizes = (*query.shape[1:2], *key.shape[1:2], query.shape[3], value.shape[3], causal, dropout, _longest(module))
    core = spec_core(spec, sizes, None if rule is None else rule.within)
    if scaling is not None and Can.ROTARY in core.can and scaling != query.shape[3] ** -0.5:
        heads = heads._replace(q=heads.q * (scaling * query.shape[3] ** 0.5))
    with no_autocast(query):
        if rule is None or terms.used:
            if memory is not None:
                raise ValueError(f"{type(module).__name__} has a mask or scores of its own, so its layers keep all keys")
            out = _attend_dense(spec, core, heads, mask, terms, causal)
        elif cross:
            out = core.read_all(*heads, *_cross_places(heads, mask))
        else:
            out = attend_by_core(core, heads, mask, causal, memory)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    for option, what in _REFUSED.items():
        if options.get(option) is not None:
            raise ValueError(f"{type(module).__name__} {what} ({option}), which no Spec of regard does: use 'eager' or 'sdpa'")
    if options.get("output_attentions"):
        raise ValueError("attention by a Spec returns no weights: leave out output_attentions, or use 'eager'")


def _same_type(q: Tensor, k: Tensor, v: Tensor) -> QueryKeyValue:
    """Return all three in the type of the values: under autocast rotary positions leave queries and keys in float32."""
    return QueryKeyValue(q.to(v.dtype), k.to(v.dtype), v)


def _is_cross(module: nn.Module, heads: QueryKeyValue, causal: bool) -> bool:
    """Return whether queries and keys are tokens of two sequences."""
    if causal:
        return False
    named = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    second = getattr(module, "is_decoder", False) and not getattr(module, "is_causal", False)
    if named or second:
        return True
    return heads.q.shape[2] != heads.k.shape[2] and not getattr(module, "is_causal", False)


def _longest(module: nn.Module) -> int | None:
    return getattr(getattr(module, "config", None), "max_position_embeddings", None)


def _covers(rule: MaskRule, mask: ModelMask | Tensor | None, k: Tensor) -> bool:
    """Return whether a model's window shows all keys, because they are no more than it."""
    aligned = isinstance(mask, ModelMask) and mask.sizes.kv_offset == 0
    return not torch.compiler.is_compiling() and aligned and k.shape[2] <= rule.size


def _key_places(heads: QueryKeyValue, mask: ModelMask | Tensor | None) -> Places:
    return mask.places(heads.k) if isinstance(mask, ModelMask) else Places.of(heads.k[:, 0])


def _cross_places(heads: QueryKeyValue, mask: ModelMask | Tensor | None) -> tuple[Places, Places]:
    """Return the places of the keys, and those of the queries, all of which count as real."""
    return _key_places(heads, mask), Places.of(heads.q[:, 0])


def attend_by_core(core: Core, heads: QueryKeyValue, mask: ModelMask | Tensor | None, causal: bool, memory: Any) -> Tensor:
    """Attend with n queries, which are the last of m tokens, or the next ones of a memory."""
    places = _key_places(heads, mask)
    n, m = heads.q.shape[2], heads.k.shape[2]
    newest = places if n == m else places.part(m - n, m)
    if places.valid is not None:
        need_claims(core.name, core.can, Can.PADDING)
        heads = QueryKeyValue(*(_unpadded(x, own) for x, own in zip(heads, (newest, places, places), strict=True)))
    q, k, v = heads
    if memory is not None:
        return memory.extend(core, q, k, v, places)
    if not causal:
        return core.read_all(q, k, v, places, newest)
    if n == m:
        return core.scan_all(q, k, v, places)
    need_claims(core.name, core.can, Can.STREAM, "so generate with use_cache=False")
    if isinstance(core, CachedCore) and type(core).scan is CachedCore.scan:
        return core.answer(KVCache.whole_of(k, v, places), q, newest, causal=True)
    first = m - n
    past = core.push(core.unwritten(k, v), k[:, :, :first], v[:, :, :first], places.part(0, first))
    return core.scan(past, q, k[:, :, first:], v[:, :, first:], newest)[0]


def _unpadded(x: Tensor, places: Places) -> Tensor:
    """Return x (b h n d) with zeros at padding, whatever it holds."""
    assert places.valid is not None
    return x.masked_fill(~places.valid[:, None, :, None], 0)


def _attend_dense(
    spec: str, core: Core, heads: QueryKeyValue, mask: ModelMask | Tensor | None, terms: ScoreTerms, causal: bool
) -> Tensor:
    """Attend by scores of all pairs, which a model changes or of which it shows those of a mask of its own."""
    if not has_pattern(core) or core.reach.bends:
        raise ValueError(
            f"the model changes its scores, or has a mask that is not known, which {spec} has no place for: use softmax or a "
            "pattern that does not depend on the length; under torch.compile pass an attention_mask"
        )
    q, k, v = heads
    seen, added = _shown_pairs(heads, mask, causal)
    if any(own != Everything() for own in core.reach.each):
        seen = seen & _pattern_pairs(core, heads, mask)
    empty = ~seen.any(-1, keepdim=True)
    scores = torch.zeros((), dtype=q.dtype, device=q.device)
    for term in (terms.bias, added):
        if term is not None:
            scores = scores + term.to(q.dtype)
    scores = torch.where(seen | empty, scores, -torch.inf)
    if terms.cap is not None or terms.sinks is not None:
        out = _attend_changed(core, heads, scores, terms)
    else:
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=scores, dropout_p=core.drop, scale=core.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.masked_fill(empty, 0)


def _attend_changed(core: Softmax | Sparse, heads: QueryKeyValue, added: Tensor, terms: ScoreTerms) -> Tensor:
    """Attend by scores that are capped, then added to, and share their softmax with sinks; no fused kernel of torch does."""
    q, k, v = heads
    k, v = (per_query_head(x, q) for x in (k, v))
    scores = q @ k.mT * core.scale
    if terms.cap is not None:
        scores = terms.cap * torch.tanh(scores / terms.cap)
    scores = scores + added
    if terms.sinks is not None:
        scores = torch.cat([scores, terms.sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., : k.shape[2]].to(q.dtype)
    return dropout(weights, core.drop) @ v


def _shown_pairs(heads: QueryKeyValue, mask: ModelMask | Tensor | None, causal: bool) -> tuple[Tensor, Tensor | None]:
    """Return the pairs that a model shows, which broadcast to (b h n m), and what its mask adds to their scores."""
    n, m, device = heads.q.shape[2], heads.k.shape[2], heads.q.device
    if isinstance(mask, ModelMask):
        if mask.rule(None, causal) is None and not torch.compiler.is_compiling():
            warnings.warn(
                "a mask function that is not of transformers alone is computed for all pairs", SlowBackend, stacklevel=2
            )
        return mask.shown(), None
    every = torch.ones(1, 1, n, m, dtype=torch.bool, device=device)
    if mask is None:
        return every.tril(m - n) if causal else every, None
    if mask.dtype == torch.bool:
        return mask, None
    return every, mask


def _pattern_pairs(core: Softmax | Sparse, heads: QueryKeyValue, mask: ModelMask | Tensor | None) -> Tensor:
    """Return the pairs of the patterns of a core, (b 1 n m) or (b h n m)."""
    places = _key_places(heads, mask)
    i, j = places.at[:, None, -heads.q.shape[2] :, None], places.at[:, None, None]
    one, *others = core.reach.each
    seen = one(0, i, j)
    if any(own != one for own in others):
        seen = torch.cat([seen, *(own(0, i, j) for own in others)], 1)
    return seen
