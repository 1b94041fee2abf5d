"""The contract: an attention mechanism is a memory that tokens are written into and queries are answered from.

Letters, here and everywhere: b batch, h query heads, g key-value heads, n queries, m keys, d key dim, e value dim, w width.
Polarity, here and everywhere: `valid` is True where there is a real token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.checks import check_flag, check_vectors, need
from regard.checks import check_valid as check_valid
from regard.mixers.state import CrossState as CrossState
from regard.mixers.state import State as State
from regard.mixers.state import StateOwner, check_state, position_bound
from regard.mixers.state import nbytes as nbytes
from regard.mixers.state import select as select
from regard.ops.backend import AUTO, check_backend
from regard.ops.once import once


class Can(Flag):
    """A claim is a promise that has a law testing it; a use that is not claimed raises."""

    CAUSAL = auto()  # no output depends on a later token
    CROSS = auto()  # queries may come from another sequence than keys and values
    PADDING = auto()  # a token with valid=False is as if absent
    STREAM = auto()  # start / extend in any cuts equals one forward pass
    DROPOUT = auto()  # it has attention weights that can be dropped in training
    ROTARY = auto()  # it sees q and k through q.k alone, so that turning both by their positions leaves their distance
    RELATIVE = auto()  # its scores take one more term, by how far apart two tokens are
    NOTHING = 0

    def __str__(self) -> str:
        return ", ".join(c.name.lower() for c in Can if c in self and c.name) or "nothing"


@dataclass(frozen=True)
class Dims:
    """What the outside world fixes about a mixer: its widths, its heads, and how it will be used."""

    width: int
    heads: int
    kv_heads: int | None = None  # fewer key-value heads than query heads: grouped (1: multi-query) attention
    key_dim: int | None = None  # d, per head; width // heads unless given
    value_dim: int | None = None  # e, per head; width // heads unless given
    context_width: int | None = None  # width of the sequence that cross attention reads
    causal: bool = False
    cross: bool = False
    max_len: int | None = None
    dropout: float = 0.0  # of attention weights, in training
    backend: str = AUTO  # of the operations: see `regard.ops.backend`

    def __post_init__(self) -> None:
        for name in ("width", "heads", "kv_heads", "key_dim", "value_dim", "context_width", "max_len"):
            value = getattr(self, name)
            if value is not None or name in ("width", "heads"):
                need(name, value)
        check_flag("causal", self.causal)
        check_flag("cross", self.cross)
        if (self.key_dim is None or self.value_dim is None) and self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not divisible by {self.heads} heads: "
                f"use width {self.width // self.heads * self.heads or self.heads}, or give key_dim and value_dim"
            )
        if self.heads % self.g:
            raise ValueError(f"{self.heads} heads cannot share {self.g} key-value heads evenly: use a divisor of {self.heads}")
        if self.causal and self.cross:
            raise ValueError("a mixer is either causal over its own tokens or reads a context: a decoder has one mixer of each")
        if self.context_width is not None and not self.cross:
            raise ValueError("context_width is for cross attention: set cross=True, or leave it out")
        if not isinstance(self.dropout, int | float) or isinstance(self.dropout, bool) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout!r}")
        check_backend(self.backend)

    @property
    def d(self) -> int:
        return self.key_dim or self.width // self.heads

    @property
    def e(self) -> int:
        return self.value_dim or self.width // self.heads

    @property
    def g(self) -> int:
        return self.kv_heads or self.heads


class Places(NamedTuple):
    """Where tokens stand. Positions count real tokens only, so padding may lie anywhere and rows may differ in length."""

    at: Tensor  # (b n) position of each token; of a padding token, that of the next real one
    valid: Tensor | None = None  # (b n); None: every token is real
    start: int | None = None  # known on the host: the real tokens of every row stand at start, start + 1, ...

    @staticmethod
    def of(x: Tensor, valid: Tensor | None = None, t: Tensor | None = None, start: int | None = 0) -> Places:
        """Places of tokens x (b n ...) that follow t (b) real ones; `start` is t where all rows agree."""
        b, n = x.shape[:2]
        if valid is None:
            first = start or 0
            at = once(("at", first, n, x.device), None, lambda: torch.arange(first, first + n, device=x.device)).expand(b, n)
        else:
            at = once("at", valid, lambda: _tokens_before(valid))
            at = at + start if start else at
        if start is None and t is not None:
            at = at + t[:, None]
        return Places(at, valid, start)

    def part(self, low: int, high: int) -> Places:
        """The tokens low .. high - 1; what is known on the host survives where it is still true."""
        start = self.start
        if start is not None and low:
            start = start + low if self.valid is None else None
        return Places(self.at[:, low:high], None if self.valid is None else self.valid[:, low:high], start)


def _tokens_before(valid: Tensor) -> Tensor:
    """How many real tokens stand before each, (b n)."""
    count = valid.long()
    return count.cumsum(1) - count


def need_claims(name: str, can: Can, asked: Can, instead: str = "") -> None:
    """Refuse what is not claimed, in a sentence."""
    if lacking := asked & ~can:
        raise ValueError(f"{name} cannot do {lacking}: it can do {can}" + (f"; {instead}" if instead else ""))


def token_count(places: Places) -> int:
    """Return the largest number of real tokens up to the last of these places, read from the device; or its host bound."""
    bound = position_bound()
    if bound is not None:
        return bound
    real = places.at + (1 if places.valid is None else places.valid.long())
    return int(real.max()) if real.numel() else 0


def mask_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """Set padded tokens of x (b n w) to zero, whatever they hold: their gradient is zero too."""
    return x if valid is None else x.masked_fill(~valid[..., None], 0)


def pooled_valid(valid: Tensor | None, rate: int) -> Tensor | None:
    """Which of ceil(n / rate) answers are real. Real tokens come to the front, so the real answers stand there."""
    if valid is None or rate == 1:
        return valid
    groups = torch.arange(-(-valid.shape[1] // rate), device=valid.device)
    return groups * rate < valid.sum(1, keepdim=True)


def pool_tokens(x: Tensor, valid: Tensor | None, rate: int) -> tuple[Tensor, Tensor | None]:
    """x (b n w) with every `rate` real tokens replaced by their mean, (b ceil(n / rate) w), and which of those are real.

    What a residual connection adds around a mixer whose answers are fewer than its tokens. Real tokens come to the front first.
    """
    if rate == 1:
        return x, valid
    b, n, w = x.shape
    groups = -(-n // rate)
    at = Places.of(x, valid).at // rate
    real = x.new_ones(b, n) if valid is None else valid.to(x.dtype)
    count = x.new_zeros(b, groups).scatter_add(1, at.clamp_max(max(groups - 1, 0)), real)
    index = at.clamp_max(max(groups - 1, 0))[..., None].expand(b, n, w)
    sums = x.new_zeros(b, groups, w).scatter_add(1, index, x if valid is None else x.masked_fill(~valid[..., None], 0))
    return sums / count.clamp_min(1)[..., None], pooled_valid(valid, rate)


def refer(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Give an owner the name of a module that stands elsewhere in the same model, where its weights are listed and saved.

    A module listed under two names is left with other weights by torch.func.functional_call. Weights that were saved under
    this name too may still be loaded.
    """
    owner._modules.pop(name, None)
    owner.__dict__[name] = module
    owner.register_load_state_dict_pre_hook(partial(_listed_elsewhere, name))


def _listed_elsewhere(name: str, module: nn.Module, weights: dict[str, Tensor], prefix: str, *_: object) -> None:  # noqa: ARG001
    for key in [key for key in weights if key.startswith(f"{prefix}{name}.")]:
        del weights[key]


class Core(nn.Module):
    """A key-value memory. `push` writes tokens, `read` answers queries, `scan` does both in causal order.

    q (b h n d), k (b g m d), v (b g m e), out (b h n e). Memories are NamedTuples of batch-first tensors.
    A core never sees widths or projections; a model never sees queries or keys. Grouped heads are the core's own business: g may
    be a divisor of h, memories keep g heads, and `per_query_head` repeats them for h queries where no product does that for free.
    """

    can: Can = Can.NOTHING
    streams: int = 1  # queries, keys and values per head and token: 2 where some tokens are projected in a way of their own
    gates: int = 0  # further numbers that come with each key, behind its d: how much to forget, how strongly to write
    shared_qk: bool = False  # it needs keys that are the queries
    rate: int = 1  # queries that share one answer: (b h n d) -> (b h ceil(n / rate) e)
    learns: bool = False  # in training it takes notes of the tokens it sees, so that padding must not be among them
    positional: bool = True  # `read` depends on where the queries are; False: their positions change nothing
    joint: bool = False  # what a query gets depends on which other queries come with it
    ignores: tuple[str, ...] = ()  # "q" or "k", where it never looks at them: a layer does not project them

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.positions: Any = None  # `Positions` that add to the scores
        need_claims(self.name, self.can, Can.DROPOUT if dims.dropout else Can.NOTHING, "use dropout=0")

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def honour(self, positions: Any) -> None:
        """From now on scores take what these positions add to them; what only turns queries and keys needs nothing more."""
        need_claims(
            self.name, self.can, positions.needs, f"so {positions.name} positions are not for it: add positions to the tokens"
        )
        if Can.RELATIVE in positions.needs:
            self.positions, self.positional = positions, True

    @property
    def drop(self) -> float:
        """The share of its weights that is dropped now."""
        return self.dims.dropout if self.training else 0.0

    @property
    def sizes(self) -> tuple[int, int]:
        """The last dimension of the keys and of the values it is given."""
        return self.dims.d * self.streams + self.gates, self.dims.e * self.streams

    def empty(self, k: Tensor, v: Tensor) -> Any:
        """A memory that holds nothing, shaped after keys and values of any length."""
        raise NotImplementedError

    def push(self, memory: Any, k: Tensor, v: Tensor, places: Places) -> Any:
        """The memory with more tokens in it. Never changes what `memory` itself answers."""
        raise NotImplementedError

    def read(self, memory: Any, q: Tensor, places: Places) -> Tensor:
        """What the queries get from everything in the memory; zeros where there is nothing to see."""
        raise NotImplementedError

    def forget(self, memory: Any, t: Tensor) -> Any:  # noqa: ARG002 - t is for the cores that forget
        """The memory without what no query at position t (b) or later can see. Only ever saves room."""
        return memory

    def watch(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        """See the queries and keys of a whole pass, before it: for cores that compare themselves with something."""

    def scan(self, memory: Any, q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Any]:
        """What causal means, token by token. Override it to be faster, never to mean something else."""
        out = [q.new_zeros(*q.shape[:2], 0, v.shape[-1] // self.streams)]
        for i in range(q.shape[2]):
            one = slice(i, i + 1)
            place = places.part(i, i + 1)
            memory = self.push(memory, k[:, :, one], v[:, :, one], place)
            out.append(self.read(memory, q[:, :, one], place))
        return torch.cat(out, 2), memory


class Mixer(nn.Module):
    """Anything that mixes tokens, (b n w) -> (b n w): all that a model knows about attention.

    The one exception: with rate > 1 the output is ceil(n / rate) long, and `pool_tokens` gives the tokens it stands beside.
    """

    can: Can
    dims: Dims
    rate: int = 1
    spec: str | None = None  # the text it was built from, if it was
    _described: str | None = None  # what it writes into its states

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def forward(self, x: Tensor, *, context: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Every token at once. `valid` (b m) speaks of the tokens that are read: x itself, or the context."""
        raise NotImplementedError

    def start(self, batch: int | None = None, *, context: Tensor | None = None, valid: Tensor | None = None) -> State:  # noqa: ARG002
        """What is known before the first token: nothing (give the batch size), or a context to read from."""
        need_claims(self.name, self.can, Can.STREAM)
        raise NotImplementedError

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:  # noqa: ARG002
        """n >= 0 more tokens: a prompt, a chunk or one decoding step. Always this call."""
        need_claims(self.name, self.can, Can.STREAM)
        raise NotImplementedError

    def later(self, state: State, memory: Any, places: Places) -> State:
        """The state after tokens at these places."""
        n = places.at.shape[1]
        if places.valid is None:
            t = once(("later", n), state.t, lambda: state.t + n)
            return state._replace(memory=memory, t=t, start=None if state.start is None else state.start + n)
        return state._replace(memory=memory, t=state.t + places.valid.sum(1), start=None)

    def maker(self) -> StateOwner:
        """Return what the layer writes into its states, and expects to find in those it is given."""
        if self._described is None:
            dims, use = self.dims, "causal " if self.dims.causal else "cross " if self.dims.cross else ""
            sizes = f"width {dims.width}, {dims.heads} heads of {dims.d} and {dims.e}, {dims.g} for keys and values"
            self._described = f"{use}{self.spec or self.name}, {sizes}"
        weight = self.like()
        return StateOwner(self._described, torch.get_default_dtype() if weight is None else weight.dtype)

    def check_state(self, state: State, x: Tensor) -> None:
        """Refuse a state of another batch, device, layer or type of weights than that of the tokens x (b n w)."""
        check_state(state, x)
        own = self.maker()
        if state.maker == own:
            return
        if state.maker is None or state.maker.layer != own.layer:
            other = "of several layers" if state.maker is None else f"of a layer ({state.maker.layer})"
            raise ValueError(f"the state is that {other}, but this layer is {own.layer}: use the state that its own start gave")
        raise TypeError(f"the state was made with weights in {state.maker.dtype}, but they are {own.dtype} now: start anew")

    def like(self) -> Tensor | None:
        """One of its weights, if it has any: tokens have its device and type."""
        own = next(iter(self._parameters.values()), None)  # without the walk through all modules, where it has one of its own
        return next(self.parameters(), None) if own is None else own

    def check(self, x: Tensor, what: str = "x", width: int | None = None) -> None:
        """Refuse tokens of another shape, device or type than the layer's."""
        check_vectors(x, what, width or self.dims.width)
        weight = self.like()
        if weight is None:
            return
        if x.device != weight.device:
            raise ValueError(f"{what} is on {x.device} but the layer is on {weight.device}: move one of them with .to()")
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type if x.device.type != "meta" else "cpu"):
            raise TypeError(f"{what} is {x.dtype} but the layer is {weight.dtype}: convert one of them, or use torch.autocast")

    def check_padding(self, valid: Tensor | None, x: Tensor) -> None:
        check_valid(valid, x.shape[0], x.shape[1], "the sequence that is read")
        if valid is not None:
            need_claims(self.name, self.can, Can.PADDING, "pack rows of equal length instead")
            if valid.device != x.device:
                raise ValueError(f"valid is on {valid.device} but the tokens are on {x.device}: move one of them with .to()")

    def check_length(self, places: Places) -> None:
        limit, n = self.dims.max_len, places.at.shape[1]
        if limit is None or n == 0:
            return
        if places.start is not None and (places.valid is None or places.start + n <= limit):
            longest = places.start + n  # or fewer: with padding only a look at the device would tell, and it need not
        else:
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"{n} places, but this layer was built for max_len={limit}, and a compiled one does not count which of them "
                    "are padding: cut the padding off, or build it longer"
                )
            longest = token_count(places)
        if longest > limit:
            raise ValueError(f"{longest} tokens, but this layer was built for max_len={limit}: build it longer, or cut the input")


class Free(Mixer):
    """A mixer without queries, keys and heads."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        asked = {Can.CAUSAL: dims.causal, Can.CROSS: dims.cross, Can.DROPOUT: dims.dropout}
        for claim, wanted in asked.items():
            need_claims(self.name, self.can, claim if wanted else Can.NOTHING)
        for what in ("kv_heads", "key_dim", "value_dim"):
            if getattr(dims, what) is not None:
                raise ValueError(f"{self.name} has no queries and keys: leave out {what}")

    def need_length(self) -> int:
        return needed_length(self.name, self.dims)

    def no_context(self, context: Tensor | None) -> None:
        if context is not None:
            raise ValueError(f"{self.name} mixes its own tokens and cannot read a context: leave it out")


class LengthNeeded(ValueError):
    """A mechanism with weights for every position was asked for without saying how many positions there are."""


def needed_length(name: str, dims: Dims) -> int:
    """The longest sequence, for a mechanism with weights for each position."""
    if dims.max_len is None:
        raise LengthNeeded(f"{name} has weights for every position: say how many with max_len=...")
    return dims.max_len
