"""The attention function of converted models: a layer computes by its own mechanism, layers that were kept by softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from regard.hf.converted_core import ConvertedCore
from regard.mixers.attend import attend
from regard.mixers.attention import in_autocast, no_autocast
from regard.mixers.base import Core, Dims, Places
from regard.spec import Spec, core

IMPLEMENTATION = "regard"  # the name of the attention function, as in model.set_attn_implementation
MECHANISM = "mechanism"  # the submodule of an attention layer that computes in place of its softmax
PLAIN_MASKS = (causal_mask_function, bidirectional_mask_function)


class PassTokens:
    """Hold what one pass of a model tells all of its layers about the tokens: where keys begin, and which are real.

    Layers get this object in the place of a mask; places are made once for all of them.
    """

    def __init__(self, first: int, size: int, valid: Tensor | None, function: Any) -> None:
        self.first = first  # index of the first key that layers are given
        self.size = size  # keys
        self.valid = valid  # (b m), True: a real key; None: all are
        self.plain = function is None or function in PLAIN_MASKS
        self.function = function
        self._places: Places | None = None

    def places(self, k: Tensor) -> Places:
        """Return the places of keys k (b g m d)."""
        if self._places is None or torch.compiler.is_compiling():
            made = Places.of(k[:, 0], self.valid)
            if torch.compiler.is_compiling():
                return made
            self._places = made
        return self._places

    def check_window(self, window: int | None, n: int) -> None:
        """Refuse masks other than the causal one, the bidirectional one, or a sliding window: by what the last query sees."""
        if self.plain or torch.compiler.is_compiling():
            return
        last = torch.tensor(self.first + self.size - 1)
        keys = torch.arange(self.first, self.first + self.size)
        expected = torch.ones_like(keys, dtype=torch.bool) if window is None else last - keys < window
        try:
            seen = self.function(0, 0, last, keys)
        except (RuntimeError, IndexError, TypeError):
            seen = None
        if seen is None or not torch.equal(torch.as_tensor(seen).cpu().expand_as(keys), expected):
            raise ValueError(
                f"a mask over {n} queries is neither causal, bidirectional nor a sliding window: converted layers take no packed "
                "sequences and no masks of their own"
            )


def pass_tokens(
    *,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> PassTokens:
    """Make the tokens of a pass, in the place of a mask (b 1 n m)."""
    if isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):
        raise ValueError("converted layers have no static cache: use past_key_values=regard.hf.memory(model), or none")
    valid = None
    if attention_mask is not None:
        valid = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        if not torch.compiler.is_compiling() and bool(valid.all()):
            valid = None
    return PassTokens(kv_offset, kv_length, valid, mask_function)


def converted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with query (b h n d) to key (b g m d) and value (b g m e): returns (b n h e), and no weights."""
    for name in ("position_bias", "softcap"):
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} changes its scores by {name}, which converted models do not compute")
    tokens = attention_mask
    if tokens is None:
        tokens = PassTokens(0, key.shape[2], None, None)
    if not isinstance(tokens, PassTokens):
        raise TypeError("a converted model takes attention_mask (b n), True or 1 at real tokens, and makes no use of 4-D masks")
    window = options.get("sliding_window")
    tokens.check_window(window, query.shape[2])
    own = getattr(module, MECHANISM, None)
    if in_autocast(query):  # as SDPA does: rotary positions make float32 of half of them
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (_like_key(x.to(dtype), key) for x in (query, key, value))
    softmax = _softmax_core(module, query, key, value, scaling, dropout, window)
    if own is None:
        out = attend_heads(softmax, query, key, value, tokens)
    elif _observer.observe is not None:
        out = _observer.observe(module, softmax, query, key, value, tokens)
    else:
        out = attend_heads(own, query, key, value, tokens)
    return out.transpose(1, 2).contiguous(), None


def attend_heads(by: Core, q: Tensor, k: Tensor, v: Tensor, tokens: PassTokens) -> Tensor:
    """Attend by a core with q (b h n d) to k (b g m d), v (b g m e): a whole pass, or a step behind a cache or a memory."""
    memory = getattr(k, "regard_memory", None)
    if memory is not None:
        return memory.scan(by, q, k, v, tokens)
    causal, n, m = by.dims.causal, q.shape[2], k.shape[2]
    if tokens.first and isinstance(by, ConvertedCore):
        raise ValueError(
            f"the cache has dropped the first {tokens.first} tokens, which {by.name} would have in its memory: "
            "use past_key_values=regard.hf.memory(model)"
        )
    if n != m:
        return attend(q, k, v, by, causal=causal, valid=tokens.valid, offset=m - n)
    places = tokens.places(k)
    valid = places.valid
    if valid is not None:
        q, k, v = (x.masked_fill(~valid[:, None, :, None], 0) for x in (q, k, v))
    with no_autocast(q):
        by.watch(q, k, valid)
        out = by.scan_all(q, k, v, places) if causal else by.read_all(q, k, v, places, places)
    return out if valid is None else out.masked_fill(~valid[:, None, :, None], 0)


def _like_key(x: Tensor, key: Tensor) -> Tensor:
    """Give a converted tensor the memory that the keys of a cache carry."""
    memory = getattr(key, "regard_memory", None)
    if memory is not None and memory is not getattr(x, "regard_memory", None):
        x = x.view_as(x)
        x.regard_memory = memory  # type: ignore[attr-defined]
    return x


def _softmax_core(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Core:
    causal = bool(getattr(module, "is_causal", True))
    return _kept_core(q.shape[1], k.shape[1], q.shape[3], v.shape[3], causal, scaling, float(dropout), window)


@lru_cache(maxsize=64)
def _kept_core(
    heads: int, g: int, d: int, e: int, causal: bool, scaling: float | None, dropout: float, window: int | None
) -> Core:
    """Return the attention that a model had before: softmax over all tokens, or in a sliding window."""
    dims = Dims(heads * d, heads, g, d, e, causal=causal, dropout=dropout)
    if window is None:
        return core(Spec("softmax", scale=scaling), dims).train(dropout > 0)
    return core(Spec("sparse", pattern=f"Local({window})", scale=scaling), dims).train(dropout > 0)


Observe = Callable[[nn.Module, Core, Tensor, Tensor, Tensor, PassTokens], Tensor]


class _Observer:
    """What converted layers do in the place of their mechanism."""

    observe: Observe | None = None


_observer = _Observer()


@contextmanager
def observed(observe: Observe) -> Iterator[None]:
    """Let every converted layer return observe(module, softmax core, q, k, v, tokens) in here."""
    outer, _observer.observe = _observer.observe, observe
    try:
        yield
    finally:
        _observer.observe = outer


AttentionInterface.register(IMPLEMENTATION, converted_attention)
AttentionMaskInterface.register(IMPLEMENTATION, pass_tokens)
