"""The mixer of the q-k-v family: project, split into heads, apply a core, project back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.checks import check_batch, check_same_batch, check_tokens
from regard.mixers.base import Core, Mixer, refer
from regard.mixers.delayed_queries import Waiting, extend_waiting, finish_waiting
from regard.mixers.dims import Can, Dims, need_claims
from regard.mixers.head_readout import HeadReadout
from regard.mixers.places import Places, mask_padding, pooled_valid
from regard.mixers.position_interface import Positions
from regard.mixers.state import CrossState, State
from regard.ops.joined_linear import joined_linear, product_dtype, takes_joined
from regard.ops.triton_support import FURTHEST


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Cores choose their own precision (sums in float32 or better); autocast would undo that."""
    kind = _autocast_kind(x)
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    if torch.compiler.is_compiling():  # which traces no other way
        return torch.autocast(kind, enabled=False)
    return _AutocastOff(kind)


class _AutocastOff:
    """Switch autocast off inside, where it is on: torch.autocast without its checks, which take more time than a launch."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.kind, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.kind, True)


def in_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of x."""
    return torch.is_autocast_enabled(_autocast_kind(x))


def _autocast_kind(x: Tensor) -> str:
    """Return the name of the device of x for autocast, which does not know "meta"."""
    if x.is_cuda:
        return "cuda"
    kind = x.device.type
    return kind if kind != "meta" else "cpu"


class UnmadeProjection(nn.Module):
    """Replace a projection that no score depends on: zeros of the right shape, one number in memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], self.size)


def fused_linear(x: Tensor, *maps: nn.Module, head: int | None = None) -> Sequence[Tensor]:
    """What each of the maps makes of the tokens x (b n w); in training by one product of all weights, if tokens are many.

    x is read once, and its gradient is one product as well, instead of a sum of several: that outweighs a copy of the weights.
    head: a product of all weights is split by heads of this size, (b n heads head) for each map, because a gradient that comes
    in the order of heads is then copied once: into its place among the others.
    """
    fused = getattr(maps[0], "fused", None)
    if fused is not None and all(getattr(one, "fused", None) is fused for one in maps):
        return fused(x)
    tokens = x.shape[0] * x.shape[1]
    worth = torch.is_grad_enabled() and tokens >= x.shape[2]
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    sizes: list[int] = []
    for one in maps if worth else ():
        if type(one) is nn.Linear and not has_hooks(one):
            weights.append(one.weight)
            biases.append(one.bias)
            sizes.append(one.out_features)
    given = [bias for bias in biases if bias is not None]
    missing = len(sizes) < len(maps)
    if missing or len(given) not in (0, len(maps)):
        return [one(x) for one in maps]
    if len(maps) > 1 and x.shape[1] * sum(sizes) >= FURTHEST:  # kernels would not reach all of a sequence
        half = (len(maps) + 1) // 2
        return [*fused_linear(x, *maps[:half], head=head), *fused_linear(x, *maps[half:], head=head)]
    if head is not None and _joins(x, weights):
        return joined_linear(x, weights, given, head)
    bias = torch.cat(given) if given else None
    weight = torch.cat(weights)
    y = linear(x, weight, bias)
    if head is None:
        return y.split(sizes, -1)
    counts = [size // head for size in sizes]
    return y.unflatten(-1, (-1, head)).split(counts, -2)


def _joins(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether maps of tokens x are an operation of their own."""
    return x.is_cuda and takes_joined(x, weights)


def _project_sums(one: nn.Module, x: Tensor, mass: Tensor) -> Tensor:
    """Return the sums of what an affine map makes of tokens, from sums x (b r w) of them with weights of this mass (b r 1)."""
    weight, bias = one.weight, one.bias
    y = linear(x.to(weight.dtype), weight)  # type: ignore[arg-type]
    return y if bias is None else y + mass.to(y.dtype) * bias.to(y.dtype)  # type: ignore[operator]


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return projections (b n heads * d), or (b n heads d), as (b heads n d)."""
    if x.dim() == 3:
        x = x.unflatten(-1, (heads, -1))
    return x.transpose(1, 2)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module must be called as a whole: it has hooks, or its call is compiled."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks) or module._compiled_call_impl is not None


class Attention(Mixer):
    """q, k, v = linear maps of the tokens, out = a linear map of what the core answers.

    Every core gets the same projections, so that a comparison of cores compares cores, except those in `core.ignores`.
    `shared_qk` uses one map for queries and keys, as Reformer does. `positions` are those that act inside attention. `bias` is
    that of all maps; `out_bias`, if given, that of the last one.

    `dims` are the sizes of the layer and of its `core`.

    >>> import torch
    >>> from regard import Attention, Dims, core
    >>> dims = Dims(width=16, heads=2)
    >>> mixer = Attention(dims, core("Local(4)", dims))
    >>> tuple(mixer(torch.randn(1, 10, 16)).shape)
    (1, 10, 16)
    """

    def __init__(
        self,
        dims: Dims,
        core: Core,
        *,
        shared_qk: bool = False,
        bias: bool = True,
        out_bias: bool | None = None,
        positions: Positions | None = None,
    ) -> None:
        super().__init__(dims)
        shared_qk = shared_qk or core.shared_qk
        self.core, self.shared_qk, self.rate = core, shared_qk, core.rate
        asked = (Can.CAUSAL if dims.causal else Can.NOTHING) | (Can.CROSS if dims.cross else Can.NOTHING)
        need_claims(core.name, core.can, asked)
        self.can = core.can
        if shared_qk and (dims.cross or dims.g != dims.heads or core.gates):
            raise ValueError("shared_qk makes keys of the queries: no cross, no kv_heads, no gates")
        self.positions: Positions | None = None  # that turn queries and keys
        if positions is not None:
            self._honour(positions)
        reads = dims.context_width or dims.width
        many = core.streams
        asks = dims.heads * dims.d * many
        self._sizes = core.sizes  # of a key and of a value
        keys, values = (dims.g * size for size in self._sizes)
        self.q = UnmadeProjection(asks) if "q" in core.ignores else nn.Linear(dims.width, asks, bias=bias)
        if shared_qk and "k" not in core.ignores:
            refer(self, "k", self.q)
        else:
            self.k = UnmadeProjection(keys) if "k" in core.ignores else nn.Linear(reads, keys, bias=bias)
        self.v = nn.Linear(reads, values, bias=bias)
        self.out = nn.Linear(dims.heads * dims.e, dims.width, bias=bias if out_bias is None else out_bias)
        self.readout = HeadReadout.of(core, bias)
        self._watched = type(core).watch is not Core.watch
        self._pools = type(core).pool is not Core.pool
        self.maps_first = not self._pools
        alike = dims.d == dims.e and not core.gates
        self._head_size = dims.d * many if alike else None  # of queries, keys and values

    @property
    def name(self) -> str:
        return self.core.name

    def like(self) -> Tensor:
        return self.v.weight

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        valid: Tensor | None = None,
        query_valid: Tensor | None = None,
    ) -> Tensor:
        """Mix all tokens x (b n w). `valid` belongs to the tokens that are read: x itself, or the context (b m w).

        With a context, `query_valid` (b n) belongs to x. Outputs at padding are zero.
        """
        self._check_call(x, context, valid, query_valid)
        real = valid if context is None else query_valid
        if real is not None:
            x = mask_padding(x, real)
        places = Places.of(x, real)
        if context is None:
            y = self.forward_at(x, places)
        else:
            context = mask_padding(context, valid)
            y = self.forward_at(x, places, context=context, context_places=Places.of(context, valid))
        if real is None:
            return y
        return mask_padding(y, pooled_valid(real, self.rate))

    def forward_at(
        self, x: Tensor, places: Places, *, context: Tensor | None = None, context_places: Places | None = None
    ) -> Tensor:
        if context is not None and context_places is not None:
            return self._ask(self._remember(context, context_places), x, places)
        core = self.core
        if self.dims.max_len is not None:
            self.check_length(places)
        answers = self._attended(x, places)
        if answers is not None:
            return self._project(answers, x)
        pooled = None if self.dims.causal else self._pooled(x, places)
        if pooled is not None:
            return self._ask(pooled, x, places)
        q, k, v = self.heads(x, places)
        with no_autocast(x):
            if self._watched:
                core.watch(q, k, places.valid)
            y = core.scan_all(q, k, v, places) if self.dims.causal else core.read_all(q, k, v, places, places)
        return self._project(y, x)

    @property
    def latency(self) -> int | None:
        if self.dims.causal:
            return 0
        streams = Can.STREAM in self.can and not self.dims.cross
        return self.core.ahead if streams else None

    @property
    def _waits(self) -> bool:
        """Whether its stream looks ahead: it is neither causal nor reads a context, and its queries see a bounded future."""
        return not self.dims.causal and self.latency is not None

    def finish(self, state: State) -> Tensor:
        return finish_waiting(self, state) if self._waits else super().finish(state)

    def start(self, batch: int | None = None, *, context: Tensor | None = None, valid: Tensor | None = None) -> State:
        if self._waits and batch is not None and context is None and valid is None:
            check_batch(batch)
            memory = self._empty(batch)
            q = self.v.weight.new_zeros(batch, self.dims.heads, 0, self.dims.d * self.core.streams)
            return State(Waiting(memory, q), self._zero(batch), 0, self.maker())
        self._check_streams()
        if self.dims.cross:
            if context is None or batch is not None:
                raise ValueError("cross attention starts from what it reads: start(context=..., valid=...)")
            self.check(context, "context", self.dims.context_width)
            self.check_padding(valid, context)
            t = self._zero(len(context))
            context = mask_padding(context, valid)
            return self.start_at(t, context=context, context_places=Places.of(context, valid))
        if batch is None or context is not None or valid is not None:
            raise ValueError("causal attention starts from nothing: start(batch), with the number of sequences")
        check_batch(batch)
        return self.start_at(self._zero(batch))

    def start_at(self, t: Tensor, *, context: Tensor | None = None, context_places: Places | None = None) -> State:
        self._check_streams()
        if context is not None and context_places is not None:
            return CrossState(self._remember(context, context_places), t, 0, self.maker())
        memory = self._empty(len(t))
        return State(memory, t, 0, self.maker())

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Return the outputs of n more tokens x (b n w), and the state after them.

        A layer that is not causal and looks a bounded number of tokens ahead, as Truncated(back, ahead) does, answers `latency`
        tokens later: after t tokens, t - latency outputs are there; `finish(state)` gives the last ones. Rows have no padding.
        """
        self.check(x)
        self.check_state(state, x)
        self.check_padding(valid, x)
        if self._waits:
            if valid is not None:
                raise ValueError("a stream that looks ahead has rows of one length, without padding: leave out valid")
            assert self.latency is not None
            return extend_waiting(self, state, x, self.latency)
        x = mask_padding(x, valid)
        y, state = self.extend_at(state, x, Places.of(x, valid, state.t, state.start))
        return mask_padding(y, valid), state

    def extend_at(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        if not self.dims.causal:
            if getattr(self.positions or self.core.positions, "longest", None) is not None:
                self.check_length(places)
            return self._ask(state.memory, x, places), self.later(state, state.memory, places)
        self.check_length(places)
        y, state = self.extend_heads(state, self.heads(x, places), places)
        return self._project(y, x), state

    def extend_heads(self, state: State, heads: tuple[Tensor, Tensor, Tensor], places: Places) -> tuple[Tensor, State]:
        """Return answers (b h n e) to more queries, keys and values, and the state after them."""
        with no_autocast(heads[0]):
            y, memory = self.core.scan(state.memory, *heads, places)
        state = self.later(state, memory, places)
        return y, state._replace(memory=self.core.forget(memory, state.t))

    def weights(
        self, x: Tensor, context: Tensor | None = None, *, valid: Tensor | None = None, query_valid: Tensor | None = None
    ) -> Tensor:
        """Return the attention weights A (b h n m) of the same call of the layer, without dropout; 0 at padding of either side.

        The output is the projection of A v, behind a norm and gate of its heads where it has them, if the answers of the core
        are such sums; other cores are refused. Where several queries share an answer, rows are ceil(n / rate). Makes the whole
        matrix, a few keys at a time; gradients flow.

            layer("Local(64)", width=256, heads=4).weights(torch.randn(2, 100, 256))  # (2, 4, 100, 100)
        """
        from regard.mixers.attention_weights import core_weights

        self._check_call(x, context, valid, query_valid)
        real = valid if context is None else query_valid
        tokens = mask_padding(x, real)
        places = Places.of(tokens, real)
        if context is None:
            self.check_length(places)
            q, k, _ = self.heads(tokens, places)
        else:
            context = mask_padding(context, valid)
            seen = Places.of(context, valid)
            self.check_length(seen)
            q = self._turned(self.q(tokens), self.dims.heads, places)
            k = self._turned(self.k(context), self.dims.g, seen)
        return core_weights(self.core, q, k, valid=valid, query_valid=real)

    def _check_call(self, x: Tensor, context: Tensor | None, valid: Tensor | None, query_valid: Tensor | None) -> None:
        """Refuse tokens, a context and padding masks that do not fit together or do not fit the layer."""
        check_tokens(x, "x", self.dims.width, self.v.weight)
        if query_valid is not None and context is None:
            raise ValueError("without a context queries and keys are the same tokens: give valid alone")
        if self.dims.causal and context is not None:
            raise ValueError("a causal mixer reads its own tokens: build it with cross=True to read a context")
        if self.dims.cross != (context is not None):
            raise ValueError("build it with cross=True and pass a context, or neither")
        if context is None:
            if valid is not None:
                self.check_padding(valid, x)
            return
        self.check(context, "context", self.dims.context_width)
        self.check_padding(query_valid, x)
        check_same_batch(x, context)
        self.check_padding(valid, context)

    def answer_waiting(self, memory: Any, q: Tensor, first: int) -> Tensor:
        """Return outputs (b p w) of queries (b h p d) at positions from `first` on, which have all of their keys in a memory."""
        x = q.new_zeros(len(q), q.shape[2], self.dims.width)
        if q.shape[2] == 0:
            return x
        with no_autocast(q):
            y = self.core.read(memory, q, Places.of(x, start=first))
        return self._project(y, x)

    def _check_streams(self) -> None:
        need_claims(self.core.name, self.can, Can.STREAM)
        if not (self.dims.causal or self.dims.cross):
            wait = "; in a stack, look_ahead(stack) streams what looks ahead" if self._waits else ""
            raise ValueError(f"only causal or cross attention can stream: build it with causal=True or cross=True{wait}")

    def heads(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (b n w) to q (b h n d), k (b g n d), v (b g n e)."""
        maps = (self.q, self.v) if self.shared_qk else (self.q, self.k, self.v)
        return self.split_heads(fused_linear(x, *maps, head=self._head_size), places)

    def split_heads(self, parts: Sequence[Tensor], places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Return projections (b n ...), for queries, for keys unless they are the queries, and for values, by heads."""
        q, *k, v = parts
        v = _by_head(v, self.dims.g)
        q = self._turned(q, self.dims.heads, places)
        return q, self._turned(k[0], self.dims.g, places) if k else q, v

    def _honour(self, positions: Positions) -> None:
        if positions.needs == Can.NOTHING:
            raise ValueError(f"{positions.name} positions are added to tokens, before the first layer: positions.add(x, places)")
        self.core.honour(positions)
        if Can.ROTARY in positions.needs:
            self.positions = positions

    def _turned(self, x: Tensor, heads: int, places: Places) -> Tensor:
        """Queries or keys by heads, turned by their positions if they are to be; gates behind a key are not turned."""
        x = _by_head(x, heads)
        if self.positions is None:
            return x
        d, streams = self.dims.d, self.core.streams
        gates = x.shape[-1] - d * streams
        parts = x.split([d] * streams + [gates], -1)
        with no_autocast(x):
            turned = [self.positions.turn(part, places) for part in parts[:-1]]
            return torch.cat([*turned, parts[-1]], -1)

    def _empty(self, batch: int) -> Any:
        zeros, (d, e) = self.v.weight.new_zeros, self._sizes
        return self.core.empty(zeros(batch, self.dims.g, 0, d), zeros(batch, self.dims.g, 0, e))

    def _zero(self, batch: int) -> Tensor:
        """Return the number of tokens before the first, (b)."""
        return torch.zeros(batch, dtype=torch.long, device=self.v.weight.device)

    def _remember(self, context: Tensor, places: Places) -> Any:
        """Return a memory of the whole context (b m w)."""
        self.check_length(places)
        pooled = self._pooled(context, places)
        if pooled is not None:
            return pooled
        k, v = fused_linear(context, self.k, self.v, head=self._head_size)
        k = self._turned(k, self.dims.g, places)
        v = _by_head(v, self.dims.g)
        with no_autocast(k):
            return self.core.push(self.core.empty(k, v), k, v, places)

    def _attended(self, x: Tensor, places: Places) -> Tensor | None:
        """Return answers (b h n e) of tokens x (b n w) by one operation of the core that projects them too; or None."""
        maps = (self.q, self.k, self.v)
        if not self._pools or self.dims.causal or self.positions is not None:
            return None
        if any(type(one) is not nn.Linear or has_hooks(one) for one in maps):
            return None
        if not in_autocast(x) and any(one.weight.dtype != x.dtype for one in maps):
            return None
        tokens = x.to(product_dtype(x))
        with no_autocast(x):
            return self.core.attend_tokens(tokens, places, maps)  # type: ignore[arg-type]

    def _pooled(self, x: Tensor, places: Places) -> Any:
        """Return a memory of tokens x (b m w) that was made of a few sums of them, where the core can do with those; or None."""
        maps = (self.k, self.v)
        if not self._pools or any(type(one) is not nn.Linear or has_hooks(one) for one in maps):
            return None
        tokens = x.to(product_dtype(x))
        with no_autocast(x):
            pooled = self.core.pool(tokens, places)
        if pooled is None:
            return None
        k = _project_sums(self.k, pooled.for_k, pooled.mass_k)
        v = _project_sums(self.v, pooled.for_v, pooled.mass_v)
        k, v = (_by_head(y, self.dims.g) for y in (k, v))
        with no_autocast(k):
            return self.core.push_pooled(self.core.empty(k, v), k, v, pooled)

    def _ask(self, memory: Any, x: Tensor, places: Places) -> Tensor:
        """Return what tokens x (b n w) read from a memory, (b n w)."""
        q = self._turned(self.q(x), self.dims.heads, places)
        with no_autocast(q):
            y = self.core.read(memory, q, places)
        return self._project(y, x)

    def _project(self, y: Tensor, x: Tensor) -> Tensor:
        """Return outputs (b n w) of the heads (b h n e), in the type of x."""
        y = y.transpose(1, 2)
        y = y.to(x.dtype).flatten(2) if self.readout is None else self.readout(y, x)
        out = self.out
        if type(out) is not nn.Linear or has_hooks(out) or not _joins(y, (out.weight,)):
            return out(y)
        biases = () if out.bias is None else (out.bias,)
        return joined_linear(y, (out.weight,), biases, out.out_features)[0].squeeze(2)
