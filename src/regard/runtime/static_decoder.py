"""A model made ready to speak: the same scores token by token, with little left around the arithmetic.

`model.extend` is what is meant. `Ready(model).extend` says the same for one token, faster:

- q, k and v are one product, and on a CPU all weights are packed, and the likeliest word is found by a rough look (`sketch.py`);
- keys and values of all layers lie in one tensor, and beams are reordered from one such tensor into another, page by page, or not
  moved at all (`desk.py`);
- what is known of a source is kept once for all of its beams, which are simply several queries of one row;
- on a GPU a whole step is one CUDA graph (`graphed.py`).

Letters: b rows, k beams of each, r = b k, h heads, g key-value heads, d key dim, m source tokens, w width, v vocabulary.
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
from regard.runtime.static_step import GraphedStepReplay
from regard.runtime.packed_linear import linear_plus, pack_linears, pack_weights
from regard.runtime.screened_argmax import ScreenedHead, ScreenedScores
from regard.runtime.static_cache import StaticCache

MANY_ROWS = 16  # rows
MAX_CACHES = 4  # desks of different sizes that are kept for the next text


class StaticState(NamedTuple):
    """The state of a ready model. It goes forwards only: the room that it is written in is used again at every step."""

    before: State  # what the model itself knows after the prompt
    k: int = 1
    desk: StaticCache | None = None
    turn: int = 0
    rows: Tensor | None = None  # (r) which beams go on

    def fan(self, k: int) -> StaticState:
        if self.desk is not None:
            raise ValueError("a ready model fans out behind its prompt, before the first token that it says")
        return self._replace(k=self.k * k)

    def select(self, rows: Tensor, within: bool = False) -> StaticState:
        if not within:
            if self.desk is not None or self.k > 1:
                raise ValueError("beams of a ready model stay with their rows: select them with within=True, or use the model")
            return self._replace(before=self.before.select(rows))
        if self.desk is None or self.k == 1:
            return self  # all beams of a row are alike
        return self._replace(rows=rows if self.rows is None else self.rows[rows])


def few_query_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, fixed: bool) -> Tensor:
    """What a few queries (r h n d) see of k, v (r g m d).

    Fused kernels for float32 are made for many queries: for few, two products with a softmax between them are faster; on a CPU
    if there are many rows, and k and v lie in one piece, as they always do if `fixed`. The mask, (r 1 1 m) or (r 1 n m), is added
    to scores.
    """
    (r, h, n, d), g = q.shape, k.shape[1]
    many = fixed or (r >= MANY_ROWS and _in_rows(k) and _in_rows(v))
    if not many or q.dtype.itemsize < 4:
        return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=g != h)
    scores = torch.bmm(q.reshape(r * g, -1, d), k.flatten(0, 1).mT).view(r, h, n, -1)
    weights = (scores.mul_(scale) if mask is None else torch.add(mask, scores, alpha=scale)).softmax(-1)
    return torch.bmm(weights.view(r * g, h // g * n, -1), v.flatten(0, 1)).view(r, h, n, d)


def _in_rows(x: Tensor) -> bool:
    """Whether x (r g m d) is as good as r g matrices, each in one piece."""
    return x.stride(3) == 1 and x.stride(2) == x.shape[3] and x.stride(0) == x.shape[1] * x.stride(1)


class _Layer:
    """A block for one token of every beam."""

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
            self.ask, self.tell, self.cross_scale = pack_linears(cross.q), pack_linears(cross.out), cross.core.scale

    def __call__(self, x: Tensor, own: Tensor, heard: Any, desk: StaticCache, size: int | None) -> Tensor:
        """x (r w), own (r room 2 g d)."""
        r = len(x)
        q, kv = self.qkv(self.norm(x) if self.pre else x).split([self.h * self.d, 2 * self.g * self.d], 1)
        q, kv = q.view(r, self.h, 1, self.d), kv.view(r, 2, self.g, self.d)
        if self.positions is not None:
            where = Places(desk.at[:, None])
            q = self.positions.turn(q, where)
            kv = torch.stack([self.positions.turn(kv[:, 0, :, None], where)[:, :, 0], kv[:, 1]], 1)
        k, v = desk.write(own, kv, size)
        q = q.view(len(k), -1, self.h, self.d).transpose(1, 2)  # beams that share a room are queries of one row
        y = few_query_attention(q, k, v, desk.mask(size), self.scale, desk.fixed)
        x = self._behind(self.norm, linear_plus(self.out, y.transpose(1, 2).reshape(r, -1), x))
        if heard is not None:
            y = self._heard(self.cross_norm(x) if self.pre else x, heard, desk.fixed)
            x = self._behind(self.cross_norm, linear_plus(self.tell, y, x))
        return self._behind(self.channel_norm, linear_plus(self.channel, self.channel_norm(x) if self.pre else x, x))

    def _heard(self, x: Tensor, heard: tuple[Tensor, Tensor, Tensor | None], fixed: bool) -> Tensor:
        k, v, mask = heard
        q = self.ask(x).view(len(k), -1, self.h, k.shape[-1]).transpose(1, 2)  # beams are queries of one row
        y = few_query_attention(q, k, v, mask, self.cross_scale, fixed)
        return y.transpose(1, 2).reshape(len(x), -1)

    def _behind(self, norm: nn.Module, x: Tensor) -> Tensor:
        return x if self.pre else norm(x)


def why_not_static(model: nn.Module) -> str | None:
    """Why a model cannot be made ready, or None if it can."""
    if type(model) not in (LanguageModel, Translator):
        return f"it is a {type(model).__name__}, and not just a LanguageModel or a Translator"
    if model.training:
        return "it is in training: call model.eval() first"
    if type(model.embed) is not Tokens:
        return f"it is told {type(model.embed).__name__.lower()}, and not just tokens"
    shapes = set()
    for block in _body(model):
        if type(block) is not Block:
            return f"its layers are {type(block).__name__}, and not just Block"
        for mixer in (block.mixer, block.cross):
            if mixer is None:
                continue
            if type(mixer) is not Attention or type(mixer.core) is not Softmax or mixer.core.positions is not None:
                terms = getattr(getattr(mixer, "core", None), "positions", None)
                return f"{mixer.name}{'' if terms is None else f' with {terms.name} positions'} has a memory of another kind"
            shapes.add((mixer.dims.heads, mixer.dims.g, mixer.dims.d, mixer.dims.e))
            if mixer.shared_qk or (mixer.dims.cross and mixer.positions is not None):
                return "its keys are its queries, or positions act on how it reads"
    if len(shapes) > 1 or any(d != e for _, _, d, e in shapes):
        return "its heads are not of one shape in all layers, for keys and for values"
    return None


def _body(model: nn.Module) -> Any:
    return model.stack if isinstance(model, LanguageModel) else model.decoder


class StaticDecoder:
    """A language model or translator of softmax attention, as it is now, for `say`, `stream` and `beam`.

        fast = Ready(model)
        say(fast, fast.start(source, valid), prompt, constraints=constraints)

    Weights that change later are not noticed. `room` is for how many tokens there is room at first, prompt and answer; it grows.
    On a GPU a step takes as long as the room is large: where answers have a most, give it with the prompt's length on top.
    `graphs` says whether a step on a GPU is one CUDA graph: each number of rows, beams and source tokens needs its own.
    """

    def __init__(self, model: LanguageModel | Translator, *, room: int = 256, graphs: bool = True) -> None:
        if why := why_not_static(model):
            raise ValueError(f"this model cannot be made ready: {why}; decode with the model itself")
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
        self.desks: OrderedDict[tuple[int, ...], StaticCache] = OrderedDict()

    def start(self, source: Any, source_valid: Tensor | None = None) -> StaticState:
        """As the model's own: from a number of rows, or from a source and which of its tokens are real."""
        with torch.no_grad():
            return StaticState(self.model.start(source) if source_valid is None else self.model.start(source, source_valid))

    @torch.no_grad()
    def last(self, talk: StaticState, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, StaticState]:
        """What follows a prompt: read by the model itself."""
        if talk.desk is not None or talk.k > 1:
            raise ValueError("a prompt comes before all that is said")
        if isinstance(self.model, LanguageModel):
            scores, after = self.model.last(talk.before, tokens, valid)
        else:
            scores, after = self.model.extend(talk.before, tokens, valid)
            scores = last_real(scores, valid)
        return scores, StaticState(after)

    @torch.no_grad()
    def extend(self, talk: StaticState, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, StaticState]:
        if talk.desk is None and talk.k == 1 and (valid is not None or tokens.shape[1] != 1):
            scores, after = self.model.extend(talk.before, tokens, valid)
            return scores, StaticState(after)
        if valid is not None or tokens.shape[1] == 0:
            raise ValueError("a ready model goes on by whole tokens: padding and nothing at all are for its prompt")
        found = []
        for i in range(tokens.shape[1]):
            scores, talk = self._one(talk, tokens[:, i : i + 1])
            found.append(scores)
        return found[0][:, None] if len(found) == 1 else torch.stack(found, 1), talk

    @torch.no_grad()
    def sketch(self, talk: StaticState, tokens: Tensor) -> tuple[Tensor | ScreenedScores, StaticState]:
        """What follows one token of every row (r 1), for whoever wants the likeliest: roughly, or the scores (r v) themselves."""
        if self.rough is not None and talk.k == 1 and talk.rows is None:
            x, talk = self._one(talk, tokens, self.rough)
            return x, talk
        scores, talk = self.extend(talk, tokens)
        return scores[:, -1], talk

    def _one(self, talk: StaticState, tokens: Tensor, said: Callable[[Tensor], Any] | None = None) -> tuple[Any, StaticState]:
        """`said` makes something else than scores (r v) of vectors (r w): where there are no graphs."""
        desk = talk.desk or self._sat(talk)
        if talk.desk is not None and desk.turn != talk.turn:
            raise ValueError("this state has been gone on from, or its room has been given to another text: use the model itself")
        if len(tokens) != desk.b * desk.k:
            raise ValueError(f"{len(tokens)} tokens for {desk.b} rows with {desk.k} beams each")
        if self.limit is not None and desk.longest >= self.limit:
            raise ValueError(f"{desk.longest + 1} tokens, but this model was built for max_len={self.limit}: build it longer")
        if desk.size == desk.room:
            desk = self._larger(desk)
        if desk.graphs:
            scores = desk.graphs[desk.side].replay(tokens, talk.rows)
        else:
            if talk.rows is not None:
                desk.reorder(talk.rows)
            desk.open()
            scores = (said or self._scores)(self._step(desk, tokens, desk.size))
            desk.at += 1
        desk.went()
        return scores, talk._replace(desk=desk, turn=desk.turn, rows=None)

    def _step(self, desk: StaticCache, tokens: Tensor, size: int | None) -> Tensor:
        """Vectors (r w) behind tokens (r 1); with a size that the host knows, or with one that only the device knows."""
        x = self.embed.vectors(tokens)[:, 0]
        if desk.table is not None:
            x = x + desk.table[desk.at]
        x = x if self.embed.norm is None else self.embed.norm(x)
        for layer, own, heard in zip(self.layers, desk.sides[desk.side].unbind(), desk.heard, strict=True):
            x = layer(x, own, heard, desk, size)
        return x if self.norm is None else self.norm(x)

    def _scores(self, x: Tensor) -> Tensor:
        return self.head(x[:, None])[:, 0]

    def _sat(self, talk: StaticState) -> StaticCache:
        """A desk with all on it that is known."""
        if torch.is_autocast_enabled(self.like.device.type):
            raise ValueError("a ready model has one precision: convert it with .to(torch.bfloat16) instead of autocast")
        room = self.room
        while room <= talk.before.memory[0].memory[0].memory.size:
            room *= 2
        desk = self._desk(len(talk.before.t), talk.k, room, StaticCache.sources(talk.before, self.graphs))
        desk.load(talk.before)
        return desk

    def _larger(self, old: StaticCache) -> StaticCache:
        desk = self._desk(old.b, old.k, 2 * old.room, old.m)
        desk.take(old)
        return desk

    def _desk(self, b: int, k: int, room: int, m: int) -> StaticCache:
        key = (b, k, room, m)
        if key not in self.desks:
            with torch.inference_mode(False), torch.no_grad():  # a desk outlives the mode it is made in
                self.desks[key] = self._made(*key)
        self.desks.move_to_end(key)
        while len(self.desks) > MAX_CACHES:
            self.desks.popitem(last=False)
        return self.desks[key]

    def _made(self, b: int, k: int, room: int, m: int) -> StaticCache:
        layer = self.layers[0]
        desk = StaticCache(b, k, room, m, (len(self.layers), layer.g, layer.d), self.like, self.graphs)
        if self.embed.positions is not None:
            blank = self.like.new_zeros(1, room if self.limit is None else min(room, self.limit), self.embed.width)
            desk.table = self.embed.positions.add(blank, Places.of(blank))[0]
        if self.graphs:
            step = partial(self._step, desk, desk.tokens, None)
            desk.graphs = [GraphedStepReplay(lambda: self._scores(step()), desk, side) for side in range(len(desk.sides))]
        return desk
