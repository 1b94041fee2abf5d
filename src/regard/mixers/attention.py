"""The mixer of the q-k-v family: project, split into heads, ask a core, project back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from regard.mixers.base import Can, Core, Dims, Mixer, Places, Reading, State, check_valid, fewer, only
from regard.mixers.where import Positions


def precise(x: Tensor) -> AbstractContextManager[object]:
    """Cores choose their own precision (sums in float32 or better); autocast would undo that."""
    kind = x.device.type if x.device.type != "meta" else "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class Unmade(nn.Module):
    """Stands where a map would be that nobody looks at: zeros of the right shape, one number in memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], self.size)


class Attention(Mixer):
    """q, k, v = linear maps of the tokens, out = a linear map of what the core answers.

    Every core gets the same projections, so that a comparison of cores compares cores, except those it says it never looks at.
    `shared_qk` uses one map for queries and keys, as Reformer does. `positions` are those that act inside attention.
    """

    def __init__(
        self, dims: Dims, core: Core, *, shared_qk: bool = False, bias: bool = True, positions: Positions | None = None
    ) -> None:
        super().__init__(dims)
        shared_qk = shared_qk or core.shared_qk
        self.core, self.shared_qk, self.rate = core, shared_qk, core.rate
        asked = (Can.CAUSAL if dims.causal else Can.NOTHING) | (Can.CROSS if dims.cross else Can.NOTHING)
        only(core.name, core.can, asked)
        self.can = core.can
        if shared_qk and (dims.cross or dims.g != dims.heads or core.gates):
            raise ValueError("shared_qk makes keys of the queries: no cross, no kv_heads, no gates")
        self.positions: Positions | None = None  # that turn queries and keys
        if positions is not None:
            self._honour(positions)
        reads = dims.context_width or dims.width
        many = core.streams
        asks, keys = dims.heads * dims.d * many, dims.g * (dims.d * many + core.gates)
        self.q = Unmade(asks) if "q" in core.ignores else nn.Linear(dims.width, asks, bias=bias)
        self.k = Unmade(keys) if "k" in core.ignores else self.q if shared_qk else nn.Linear(reads, keys, bias=bias)
        self.v = nn.Linear(reads, dims.g * dims.e * many, bias=bias)
        self.out = nn.Linear(dims.heads * dims.e, dims.width, bias=bias)

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
        """`valid` speaks of the tokens that are read; where those are a context, `query_valid` (b n) speaks of x."""
        self.check(x)
        if query_valid is not None and context is None:
            raise ValueError("without a context queries and keys are the same tokens: give valid alone")
        if self.dims.causal:
            if context is not None:
                raise ValueError("a causal mixer reads its own tokens: build it with cross=True to read a context")
            return self._scan(self._nothing(len(x)), x, valid)[0]
        if self.dims.cross != (context is not None):
            raise ValueError("build it with cross=True and pass a context, or neither")
        self.check_padding(query_valid, x)
        state = self._remember(x if context is None else context, valid)
        return self._read(state, x, valid if context is None else query_valid)[0]

    def start(self, batch: int | None = None, *, context: Tensor | None = None, valid: Tensor | None = None) -> State:
        only(self.core.name, self.can, Can.STREAM)
        if not (self.dims.causal or self.dims.cross):
            raise ValueError("only causal or cross attention can stream: build it with causal=True or cross=True")
        if self.dims.cross:
            if context is None or batch is not None:
                raise ValueError("cross attention starts from what it reads: start(context=..., valid=...)")
            return self._remember(context, valid)
        if batch is None or context is not None:
            raise ValueError("causal attention starts from nothing: start(batch), with the number of sequences")
        return self._nothing(batch)

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        self.check(x)
        if not self.dims.causal:
            self.check_padding(valid, x)
            return self._read(state, x, valid)
        y, state = self._scan(state, x, valid)
        return y, state._replace(memory=self.core.forget(state.memory, state.t))

    def _scan(self, state: State, x: Tensor, valid: Tensor | None) -> tuple[Tensor, State]:
        self.check_padding(valid, x)
        places = Places.of(x, valid, state.t, state.start)
        self.check_length(places)
        q, k, v = self.heads(x, places)
        with precise(x):
            y, memory = self.core.scan(state.memory, q, k, v, places)
        return self._finish(y, x, valid), self.later(state, memory, places)

    def heads(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """x (b n w) -> q (b h n d), k (b g n d), v (b g n e)."""
        q = self._turned(self.q(x), self.dims.heads, places)
        k = q if self.shared_qk else self._turned(self.k(x), self.dims.g, places)
        return q, k, self._split(self.v(x), self.dims.g)

    def _honour(self, positions: Positions) -> None:
        if positions.needs == Can.NOTHING:
            raise ValueError(f"{positions.name} positions are added to tokens, before the first layer: positions.add(x, places)")
        self.core.honour(positions)
        if Can.ROTARY in positions.needs:
            self.positions = positions

    def _turned(self, x: Tensor, heads: int, places: Places) -> Tensor:
        """Queries or keys by heads, turned by their positions if they are to be; gates behind a key are not turned."""
        x = self._split(x, heads)
        if self.positions is None:
            return x
        d, streams = self.dims.d, self.core.streams
        parts = x.split([d] * streams + [x.shape[-1] - d * streams], -1)
        with precise(x):
            return torch.cat([*(self.positions.turn(part, places) for part in parts[:-1]), parts[-1]], -1)

    @staticmethod
    def _split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def _nothing(self, batch: int) -> State:
        like = self.v.weight
        k, v = (like.new_zeros(batch, self.dims.g, 0, size) for size in self.core.sizes)
        return State(self.core.empty(k, v), torch.zeros(batch, dtype=torch.long, device=like.device), 0)

    def _remember(self, context: Tensor, valid: Tensor | None) -> State:
        """A memory of the whole context, and no query answered yet."""
        self.check(context, "context" if self.dims.cross else "x", self.dims.context_width)
        self.check_padding(valid, context)
        places = Places.of(context, valid)
        self.check_length(places)
        k, v = self._turned(self.k(context), self.dims.g, places), self._split(self.v(context), self.dims.g)
        with precise(k):
            memory = self.core.push(self.core.empty(k, v), k, v, places)
        return Reading(memory, torch.zeros(len(context), dtype=torch.long, device=context.device), 0)

    def _read(self, state: State, x: Tensor, valid: Tensor | None) -> tuple[Tensor, State]:
        places = Places.of(x, valid, state.t, state.start)
        q = self._turned(self.q(x), self.dims.heads, places)
        with precise(q):
            y = self.core.read(state.memory, q, places)
        return self._finish(y, x, valid), self.later(state, state.memory, places)

    def _finish(self, y: Tensor, x: Tensor, valid: Tensor | None) -> Tensor:
        y = self.out(y.to(x.dtype).transpose(1, 2).flatten(2))
        valid = fewer(valid, self.rate)
        return y if valid is None else y.masked_fill(~valid[..., None], 0)  # padding is not there: it says nothing


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core: Core,
    *,
    causal: bool = False,
    valid: Tensor | None = None,
    query_valid: Tensor | None = None,
) -> Tensor:
    """A core for people who hold q (b h n d), k (b g m d), v (b g m e) already: SDPA's shapes, returns (b h n e).

    `valid` (b m) speaks of the keys, `query_valid` (b n) of the queries: give both in padded self-attention, where positions
    count real tokens on both sides. In the causal form queries and keys are the same tokens, and `valid` says it all.
    The output is zero where a query is padding.
    """
    _check_heads(q, k, v, core.gates)
    b, m = k.shape[0], k.shape[2]
    only(core.name, core.can, Can.CAUSAL if causal else Can.NOTHING)
    check_valid(valid, b, m, "keys")
    if valid is not None:
        only(core.name, core.can, Can.PADDING)
    if causal and q.shape[2] != m:
        raise ValueError(f"causal attention needs as many queries as keys, not {q.shape[2]} and {m}")
    if causal and query_valid is not None:
        raise ValueError("in causal attention queries and keys are the same tokens: give valid alone")
    real = valid if causal else query_valid
    check_valid(real, b, q.shape[2], "queries")
    places = Places.of(k[:, 0], valid)
    with precise(q):
        memory = core.empty(k, v)
        if causal:
            out = core.scan(memory, q, k, v, places)[0]
        else:
            out = core.read(core.push(memory, k, v, places), q, Places.of(q[:, 0], query_valid))
    real = fewer(real, core.rate)
    return out if real is None else out.masked_fill(~real[:, None, :, None], 0)


def _check_heads(q: Tensor, k: Tensor, v: Tensor, gates: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but (batch, heads, length, dim) is needed")
        if x.device != q.device or x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} on {q.device} but {name} is {x.dtype} on {x.device}: they must agree")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(f"q, k, v disagree in batch, heads or length: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if gates and q.shape[3] + gates != k.shape[3]:
        raise ValueError(
            f"k has dim {k.shape[3]}, but q has {q.shape[3]} and {gates} gates stand behind each key: give it their sum"
        )
    if q.shape[3] != k.shape[3] - gates or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} need the same dim and heads that divide evenly")
