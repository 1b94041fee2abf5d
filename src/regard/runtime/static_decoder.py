"""Softmax models as a `StaticDecoder`: the same scores token by token, with little overhead around the arithmetic.

`GraphedDecoder` decodes every model that streams. This decoder is kept because for plain softmax attention it is faster:

- keys and values of all layers are one tensor, written by one kernel a layer; beams are reordered by a copy into a second one on
  a GPU, and on a CPU not moved at all: they share the rooms of their row (`static_cache.py`);
- the cache of a context is stored once for all of its beams, which are several queries of one row;
- q, k and v are one product, residual sums are part of products, and on a CPU the likeliest token is found by a screening in
  bfloat16 (`screened_argmax.py`);
- on a GPU a whole step is one CUDA graph (`static_step.py`).

Letters: b rows, k beams of each, r = b k, h heads, g key-value heads, d key dim, m context tokens, w width, v vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regard.blocks.block import Block
from regard.mixers.attention import Attention
from regard.mixers.base import Places, State
from regard.mixers.softmax import Softmax
from regard.models.causal_lm import LanguageModel, last_real
from regard.models.embedding import Tokens
from regard.models.translator import Translator
from regard.positions import Learned
from regard.runtime.packed_linear import linear_plus, pack_linears, pack_weights
from regard.runtime.screened_argmax import ScreenedHead, ScreenedScores
from regard.runtime.static_cache import StaticCache
from regard.runtime.static_step import GraphedStepReplay

MANY_ROWS = 16  # rows
MAX_CACHES = 4  # caches of different sizes that are kept for the next sequence


class StaticState(NamedTuple):
    """The state of a static decoder. It goes forwards only: every step overwrites the cache."""

    before: State  # the model's own state after the prompt
    k: int = 1
    cache: StaticCache | None = None
    turn: int = 0
    rows: Tensor | None = None  # (r) the beams to go on with

    def fan(self, k: int) -> StaticState:
        if self.cache is not None:
            raise ValueError("a static decoder fans out behind its prompt, before the first new token")
        return self._replace(k=self.k * k)

    def select(self, rows: Tensor, within: bool = False) -> StaticState:
        if not within:
            if self.cache is not None or self.k > 1:
                raise ValueError("beams of a static decoder stay with their rows: select them with within=True, or use the model")
            return self._replace(before=self.before.select(rows))
        if self.cache is None or self.k == 1:
            return self  # all beams of a row are alike
        return self._replace(rows=rows if self.rows is None else self.rows[rows])


def few_query_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, fixed: bool) -> Tensor:
    """Attend with a few queries (r h n d) to k, v (r g m d). The mask, (r 1 1 m) or (r 1 n m), is added to scores.

    Fused kernels for float32 are made for many queries: for few, two products with a softmax between them are faster; on a CPU
    if there are many rows, and k and v are contiguous, as they always are if `fixed`.
    """
    (r, h, n, d), g = q.shape, k.shape[1]
    many = fixed or (r >= MANY_ROWS and _in_rows(k) and _in_rows(v))
    if not many or q.dtype.itemsize < 4:
        return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=g != h)
    scores = torch.bmm(q.reshape(r * g, -1, d), k.flatten(0, 1).mT).view(r, h, n, -1)
    weights = (scores.mul_(scale) if mask is None else torch.add(mask, scores, alpha=scale)).softmax(-1)
    return torch.bmm(weights.view(r * g, h // g * n, -1), v.flatten(0, 1)).view(r, h, n, d)


def _in_rows(x: Tensor) -> bool:
    """Tell whether x (r g m d) can be viewed as r g contiguous matrices."""
    return x.stride(3) == 1 and x.stride(2) == x.shape[3] and x.stride(0) == x.shape[1] * x.stride(1)


class _Layer:
    """Apply a block to one token of every beam."""

    def __init__(self, block: Any) -> None:
        own, cross = block.mixer, block.cross
        self.pre, self.h, self.g, self.d = block.pre, own.dims.heads, own.dims.g, own.dims.d
        self.positions, self.scale = own.positions, own.core.scale
        maps = (own.q, own.k, own.v)
        self.qkv = pack_weights(
            torch.cat([x.weight for x in maps]), None if own.v.bias is None else torch.cat([x.bias for x in maps])
        )
        self.out, self.channel = pack_linears(own.out), pack_linears(block.channel)
        self.norm, self.cross_norm, self.channel_norm = block.mixer_norm, block.cross_norm, block.channel_norm
        if cross is not None:
            self.cross_q, self.cross_out, self.cross_scale = pack_linears(cross.q), pack_linears(cross.out), cross.core.scale

    def __call__(self, x: Tensor, own: Tensor, context: Any, cache: StaticCache, size: int | None) -> Tensor:
        """x (r w), own (r room 2 g d)."""
        r = len(x)
        q, kv = self.qkv(self.norm(x) if self.pre else x).split([self.h * self.d, 2 * self.g * self.d], 1)
        q, kv = q.view(r, self.h, 1, self.d), kv.view(r, 2, self.g, self.d)
        if self.positions is not None:
            where = Places(cache.at[:, None])
            q = self.positions.turn(q, where)
            kv = torch.stack([self.positions.turn(kv[:, 0, :, None], where)[:, :, 0], kv[:, 1]], 1)
        k, v = cache.write(own, kv, size)
        q = q.view(len(k), -1, self.h, self.d).transpose(1, 2)  # beams that share a room are queries of one row
        y = few_query_attention(q, k, v, cache.mask(size), self.scale, cache.fixed)
        x = self._behind(self.norm, linear_plus(self.out, y.transpose(1, 2).reshape(r, -1), x))
        if context is not None:
            y = self._cross(self.cross_norm(x) if self.pre else x, context, cache.fixed)
            x = self._behind(self.cross_norm, linear_plus(self.cross_out, y, x))
        return self._behind(self.channel_norm, linear_plus(self.channel, self.channel_norm(x) if self.pre else x, x))

    def _cross(self, x: Tensor, context: tuple[Tensor, Tensor, Tensor | None], fixed: bool) -> Tensor:
        k, v, mask = context
        q = self.cross_q(x).view(len(k), -1, self.h, k.shape[-1]).transpose(1, 2)  # beams are queries of one row
        y = few_query_attention(q, k, v, mask, self.cross_scale, fixed)
        return y.transpose(1, 2).reshape(len(x), -1)

    def _behind(self, norm: nn.Module, x: Tensor) -> Tensor:
        return x if self.pre else norm(x)


def why_not_static(model: nn.Module) -> str | None:
    """Explain why a model cannot be a `StaticDecoder`; None if it can.

    `model` is any module.

    >>> from regard.config import Config
    >>> from regard.decoding import why_not_static
    >>> from regard.models import language_model
    >>> small = Config(width=16, heads=2, depth=1, ffn=32)
    >>> why_not_static(language_model(small, vocab=20).eval()) is None
    True
    >>> why_not_static(language_model(small.replace({"mixer": "linear"}), vocab=20).eval())
    'linear keeps no plain KV cache'
    """
    if type(model) not in (LanguageModel, Translator):
        return f"it is a {type(model).__name__}, and not just a LanguageModel or a Translator"
    if model.training:
        return "it is in training: call model.eval() first"
    if type(model.embed) is not Tokens:
        return f"its inputs are {type(model.embed).__name__.lower()}, and not just tokens"
    shapes = set()
    for block in _body(model):
        if type(block) is not Block:
            return f"its layers are {type(block).__name__}, and not just Block"
        for mixer in (block.mixer, block.cross):
            if mixer is None:
                continue
            if type(mixer) is not Attention or type(mixer.core) is not Softmax or mixer.core.positions is not None:
                terms = getattr(getattr(mixer, "core", None), "positions", None)
                return f"{mixer.name}{'' if terms is None else f' with {terms.name} positions'} keeps no plain KV cache"
            shapes.add((mixer.dims.heads, mixer.dims.g, mixer.dims.d, mixer.dims.e))
            if mixer.shared_qk or (mixer.dims.cross and mixer.positions is not None):
                return "its keys are its queries, or positions act in its cross attention"
    if len(shapes) > 1 or any(d != e for _, _, d, e in shapes):
        return "its heads are not of one shape in all layers, for keys and for values"
    return None


def _body(model: nn.Module) -> Any:
    return model.stack if isinstance(model, LanguageModel) else model.decoder


class StaticDecoder:
    """A language model or translator of softmax attention, as it is now, for `generate`, `generate_stream` and `beam`.

        fast = StaticDecoder(model)
        generate(fast, fast.start(source, valid), prompt, constraints=constraints)

    `fast_decoder(model)` chooses it where it applies; `why_not_static(model)` explains where it does not.
    Weights that change later are not noticed. `room` is the number of tokens that there is room for at first, prompt and answer;
    it grows. On a GPU a step takes as long as the room is large: where max_new_tokens is given, add the prompt's length to it.
    `graphs`: a step on a GPU is one CUDA graph, for each number of rows, beams and context tokens.

    `model` is a LanguageModel or a Translator.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import language_model
    >>> model = language_model(Config(width=16, heads=2, depth=1, ffn=32), vocab=20).eval()
    >>> from regard.decoding import Constraints, StaticDecoder, generate
    >>> fast, prompt, limits = StaticDecoder(model, room=16), torch.randint(1, 20, (2, 3)), Constraints(eos=0, max_new_tokens=4)
    >>> slow = generate(model, model.start(2), prompt, constraints=limits)
    >>> generate(fast, fast.start(2), prompt, constraints=limits) == slow
    True
    """

    def __init__(self, model: LanguageModel | Translator, *, room: int = 256, graphs: bool = True) -> None:
        if why := why_not_static(model):
            raise ValueError(f"this model cannot be a StaticDecoder: {why}; use fast_decoder(model)")
        self.model: Any = pack_linears(model)
        body = _body(model)
        with torch.no_grad():
            self.layers = [_Layer(block) for block in body]
        self.embed, self.head, self.norm = self.model.embed, self.model.head, body.final_norm
        self.rough = ScreenedHead.of(self.head)
        self.like = next(model.parameters()).detach()
        self.graphs, self.room = graphs and self.like.is_cuda, max(room, 1)
        limits = [block.mixer.dims.max_len for block in body]
        if isinstance(self.embed.positions, Learned):
            limits.append(self.embed.positions.dims.max_len)
        self.limit = min((x for x in limits if x is not None), default=None)
        self.caches: OrderedDict[tuple[int, ...], StaticCache] = OrderedDict()

    def start(self, source: Any, source_valid: Tensor | None = None) -> StaticState:
        """Start as the model itself does: from a number of rows, or from a source and its padding mask."""
        with torch.no_grad():
            return StaticState(self.model.start(source) if source_valid is None else self.model.start(source, source_valid))

    @torch.no_grad()
    def last(self, state: StaticState, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, StaticState]:
        """Prefill by the model itself: scores (b v) of what follows the prompt (b n), and the state after it."""
        if state.cache is not None or state.k > 1:
            raise ValueError("a prompt comes before the first new token")
        if isinstance(self.model, LanguageModel):
            scores, after = self.model.last(state.before, tokens, valid)
        else:
            scores, after = self.model.extend(state.before, tokens, valid)
            scores = last_real(scores, valid)
        return scores, StaticState(after)

    @torch.no_grad()
    def extend(self, state: StaticState, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, StaticState]:
        if state.cache is None and state.k == 1 and (valid is not None or tokens.shape[1] != 1):
            scores, after = self.model.extend(state.before, tokens, valid)
            return scores, StaticState(after)
        if valid is not None or tokens.shape[1] == 0:
            raise ValueError("a static decoder is extended by real tokens: padding is for its prompt")
        found = []
        for i in range(tokens.shape[1]):
            scores, state = self._one(state, tokens[:, i : i + 1])
            found.append(scores)
        return found[0][:, None] if len(found) == 1 else torch.stack(found, 1), state

    @torch.no_grad()
    def sketch(self, state: StaticState, tokens: Tensor) -> tuple[Tensor | ScreenedScores, StaticState]:
        """Screen what follows one token of every row (r 1), where the likeliest is enough; or return the scores (r v)."""
        if self.rough is not None and state.k == 1 and state.rows is None:
            x, state = self._one(state, tokens, self.rough)
            return x, state
        scores, state = self.extend(state, tokens)
        return scores[:, -1], state

    def _one(self, state: StaticState, tokens: Tensor, head: Callable[[Tensor], Any] | None = None) -> tuple[Any, StaticState]:
        """Extend by one token. `head` makes something else than scores (r v) of vectors (r w): where there are no graphs."""
        cache = state.cache or self._loaded(state)
        if state.cache is not None and cache.turn != state.turn:
            raise ValueError("this state was extended before, or its cache holds another sequence now: use the model itself")
        if len(tokens) != cache.b * cache.k:
            raise ValueError(f"{len(tokens)} tokens for {cache.b} rows with {cache.k} beams each")
        if self.limit is not None and cache.longest >= self.limit:
            raise ValueError(f"{cache.longest + 1} tokens, but this model was built for max_len={self.limit}: build it longer")
        if cache.size == cache.room:
            cache = self._larger(cache)
        if cache.graphs:
            scores = cache.graphs[cache.side].replay(tokens, state.rows)
        else:
            if state.rows is not None:
                cache.reorder(state.rows)
            cache.unmask_newest()
            scores = (head or self._scores)(self._step(cache, tokens, cache.size))
            cache.at += 1
        cache.advance()
        return scores, state._replace(cache=cache, turn=cache.turn, rows=None)

    def _step(self, cache: StaticCache, tokens: Tensor, size: int | None) -> Tensor:
        """Compute vectors (r w) from tokens (r 1); size=None: the size of the cache is on the device alone."""
        x = self.embed.vectors(tokens)[:, 0]
        if cache.table is not None:
            x = x + cache.table[cache.at]
        x = x if self.embed.norm is None else self.embed.norm(x)
        for layer, own, context in zip(self.layers, cache.sides[cache.side].unbind(), cache.context, strict=True):
            x = layer(x, own, context, cache, size)
        return x if self.norm is None else self.norm(x)

    def _scores(self, x: Tensor) -> Tensor:
        return self.head(x[:, None])[:, 0]

    def _loaded(self, state: StaticState) -> StaticCache:
        """Return a cache that holds the model's state."""
        if torch.is_autocast_enabled(self.like.device.type):
            raise ValueError("a static decoder has one precision: convert it with .to(torch.bfloat16) instead of autocast")
        room = self.room
        while room <= state.before.memory[0].memory[0].memory.size:
            room *= 2
        cache = self._cache(len(state.before.t), state.k, room, StaticCache.context_tokens(state.before, self.graphs))
        cache.load(state.before)
        return cache

    def _larger(self, old: StaticCache) -> StaticCache:
        cache = self._cache(old.b, old.k, 2 * old.room, old.m)
        cache.take(old)
        return cache

    def _cache(self, b: int, k: int, room: int, m: int) -> StaticCache:
        key = (b, k, room, m)
        if key not in self.caches:
            with torch.inference_mode(False), torch.no_grad():  # a cache outlives the mode it is made in
                self.caches[key] = self._made(*key)
        self.caches.move_to_end(key)
        while len(self.caches) > MAX_CACHES:
            self.caches.popitem(last=False)
        return self.caches[key]

    def _made(self, b: int, k: int, room: int, m: int) -> StaticCache:
        layer = self.layers[0]
        cache = StaticCache(b, k, room, m, (len(self.layers), layer.g, layer.d), self.like, self.graphs)
        if self.embed.positions is not None:
            blank = self.like.new_zeros(1, room if self.limit is None else min(room, self.limit), self.embed.width)
            cache.table = self.embed.positions.add(blank, Places.of(blank))[0]
        if self.graphs:
            step = partial(self._step, cache, cache.tokens, None)
            cache.graphs = [GraphedStepReplay(lambda: self._scores(step()), cache, side) for side in range(len(cache.sides))]
        return cache
