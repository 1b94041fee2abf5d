"""The contract: an attention mechanism is a memory that tokens are written into and queries read from.

Letters, here and everywhere: b batch, h query heads, g key-value heads, n queries, m keys, d key dim, e value dim, w width.
Polarity, here and everywhere: `valid` is True where there is a real token.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.checks import check_tokens, missing_method
from regard.checks import check_valid as check_valid
from regard.mixers.dims import Can as Can
from regard.mixers.dims import Dims as Dims
from regard.mixers.dims import LengthNeeded as LengthNeeded
from regard.mixers.dims import need_claims as need_claims
from regard.mixers.dims import needed_length as needed_length
from regard.mixers.places import Places as Places
from regard.mixers.places import mask_padding as mask_padding
from regard.mixers.places import pool_tokens as pool_tokens
from regard.mixers.places import pooled_valid as pooled_valid
from regard.mixers.state import CrossState as CrossState
from regard.mixers.state import State as State
from regard.mixers.state import StateOwner, check_state
from regard.mixers.state import nbytes as nbytes
from regard.mixers.state import select as select
from regard.ops.backend import check_operations


def refer(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Give an owner the name of a module that is elsewhere in the same model, where its weights are listed and saved.

    A module listed under two names is left with other weights by torch.func.functional_call. Weights that were saved under
    this name too may still be loaded.
    """
    owner._modules.pop(name, None)
    owner.__dict__[name] = module
    owner.register_load_state_dict_pre_hook(partial(_listed_elsewhere, name))


def _listed_elsewhere(name: str, module: nn.Module, weights: dict[str, Tensor], prefix: str, *_: object) -> None:  # noqa: ARG001
    for key in [key for key in weights if key.startswith(f"{prefix}{name}.")]:
        del weights[key]


class PooledTokens(NamedTuple):
    """Sums of tokens with weights, from which keys and values are projected: a linear map of a sum is the sum of its maps."""

    for_k: Tensor  # (b r w)
    for_v: Tensor  # (b r w)
    mass_k: Tensor  # (b r 1), or (1 r 1): the sum of the weights, which multiplies the bias of the map
    mass_v: Tensor
    seen: Tensor  # (b 1 r), or (1 1 r): some token has a weight


class Core(nn.Module):
    """A key-value memory. `push` writes tokens, `read` answers queries, `scan` does both in causal order.

    q (b h n d), k (b g m d), v (b g m e), out (b h n e). Memories are NamedTuples of batch-first tensors.
    A core never sees widths or projections; a model never sees queries or keys. Grouped heads are the core's own business: g may
    be a divisor of h, memories keep g heads, and `per_query_head` repeats them for h queries where no product does that for free.

    `dims` are the sizes that it is built for.

    >>> import torch
    >>> from regard import Core, Dims, attend, core
    >>> window = core("Local(4)", Dims(width=16, heads=2))
    >>> isinstance(window, Core)
    True
    >>> q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    >>> tuple(attend(q, k, v, window).shape)
    (1, 2, 10, 8)
    """

    can: Can = Can.NOTHING
    streams: int = 1  # queries, keys and values per head and token: 2 where some tokens are projected in a way of their own
    gates: int = 0  # further numbers that come with each key, behind its d: how much to forget, how strongly to write
    shared_qk: bool = False  # it needs keys that are the queries
    output_norm: bool = False  # its layer normalises what each head answers (`HeadReadout`)
    output_gate: bool = False  # its layer multiplies that by a swish gate of the token
    rate: int = 1  # queries that share one answer: (b h n d) -> (b h ceil(n / rate) e)
    learns: bool = False  # in training it takes notes of the tokens it sees, so that padding must not be among them
    positional: bool = True  # `read` depends on where the queries are; False: their positions change nothing
    joint: bool = False  # what a query gets depends on which other queries come with it
    operations: tuple[
        str, ...
    ] = ()  # with several backends, of which `dims.backend` names one: "tile", "linear", "delta", "bucket", "pair"
    ahead: int | None = None  # tokens behind a query that it can see, where they are a bounded number: it streams that much later
    ignores: tuple[str, ...] = ()  # "q" or "k", where it never reads them: a layer does not project them

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.positions: Any = None  # `Positions` that add to the scores
        need_claims(self.name, self.can, Can.DROPOUT if dims.dropout else Can.NOTHING, "use dropout=0")
        check_operations(self.name, self.operations, dims.backend)

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
        raise NotImplementedError(
            missing_method(self, "empty(k, v)", "a memory without tokens, a NamedTuple of batch-first tensors")
        )

    def unwritten(self, k: Tensor, v: Tensor) -> Any:
        """The same for one `push` or `scan`, after which it is not needed any more: it may share its elements."""
        return self.empty(k, v)

    def push(self, memory: Any, k: Tensor, v: Tensor, places: Places) -> Any:
        """The memory with more tokens in it. Never changes what `memory` itself answers."""
        raise NotImplementedError(missing_method(self, "push(memory, k, v, places)", "the memory with those tokens in it"))

    def read(self, memory: Any, q: Tensor, places: Places) -> Tensor:
        """What the queries get from everything in the memory; zeros where there is nothing to see."""
        raise NotImplementedError(
            missing_method(self, "read(memory, q, places)", "the answers (b h n e) of the queries q (b h n d)")
        )

    def read_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places, query_places: Places) -> Tensor:
        """What queries get from these tokens alone, where the memory is not needed afterwards."""
        return self.read(self.push(self.unwritten(k, v), k, v, places), q, query_places)

    def pool(self, x: Tensor, places: Places) -> PooledTokens | None:  # noqa: ARG002 - most cores need every key
        """Sums of tokens x (b m w), where a memory is so few sums of keys and values that these are projected instead."""
        return None

    def attend_tokens(self, x: Tensor, places: Places, maps: tuple[nn.Linear, nn.Linear, nn.Linear]) -> Tensor | None:  # noqa: ARG002
        """Answers (b h n e) of tokens x (b n w) that are mapped to queries, keys and values, where a core has one operation for
        all of that; or None.
        """
        return None

    def push_pooled(self, memory: Any, k: Tensor, v: Tensor, pooled: PooledTokens) -> Any:
        """The memory with sums of keys (b g r d) and values (b g r e), which were projected from sums of tokens."""
        raise NotImplementedError(missing_method(self, "push_pooled(memory, k, v, pooled)", "the memory with those sums in it"))

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

    def scan_all(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        """What `scan` gives from an empty memory, where the memory is not needed afterwards."""
        return self.scan(self.unwritten(k, v), q, k, v, places)[0]


class Mixer(nn.Module):
    """Anything that mixes tokens, (b n w) -> (b n w): the whole interface between a model and attention.

    The one exception: with rate > 1 the output is ceil(n / rate) long, and `pool_tokens` gives the tokens it is added to.

    `dims` are the sizes that it is built for. `layer` builds one from a text; a subclass writes `forward_at`, `start_at` and
    `extend_at`.

    >>> import torch
    >>> from regard import layer
    >>> mixer = layer("conv", width=16, heads=2, causal=True)
    >>> x = torch.randn(1, 10, 16)
    >>> y, state = mixer.extend(mixer.start(1), x)
    >>> torch.allclose(y, mixer(x), atol=1e-5)
    True
    """

    can: Can
    dims: Dims
    rate: int = 1
    maps_first: bool = False  # linear maps are all that reads the tokens: under autocast they may come in half precision
    spec: str | None = None  # the text it was built from, if it was
    _described: str | None = None  # what it writes into its states

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def forward(self, x: Tensor, *, context: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Every token at once. `valid` (b m) belongs to the tokens that are read: x itself, or the context."""
        raise NotImplementedError(
            missing_method(self, "forward(x, *, context=None, valid=None)", "the outputs (b n w) of the tokens x (b n w)")
        )

    def weights(
        self,
        x: Tensor,  # noqa: ARG002
        context: Tensor | None = None,  # noqa: ARG002
        *,
        valid: Tensor | None = None,  # noqa: ARG002
        query_valid: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Attention weights (b h n m) of a call, of mixers that have them; here a sentence that this one has none."""
        raise ValueError(f"{self.name} has no attention weights: it does not answer queries by sums of values")

    def start(self, batch: int | None = None, *, context: Tensor | None = None, valid: Tensor | None = None) -> State:  # noqa: ARG002
        """What is known before the first token: nothing (give the batch size), or a context to read from."""
        need_claims(self.name, self.can, Can.STREAM)
        raise NotImplementedError(
            missing_method(self, "start(batch=None, *, context=None, valid=None)", "the State before the first token")
        )

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:  # noqa: ARG002
        """n >= 0 more tokens: a prompt, a chunk or one decoding step. Always this call."""
        need_claims(self.name, self.can, Can.STREAM)
        raise NotImplementedError(
            missing_method(self, "extend(state, x, valid=None)", "the outputs (b n w) of the tokens x, and the State behind them")
        )

    @property
    def latency(self) -> int | None:
        """Return how many tokens later `extend` gives an output: 0 where it is causal; None where it may wait for all of them."""
        return 0 if self.dims.causal else None

    def finish(self, state: State) -> Tensor:
        """Return the outputs (b p w) that are still to come at the end of a sequence: none, unless the layer looks ahead."""
        if self.latency is None:
            raise ValueError(f"{self.name} needs a whole sequence: it has no stream that could end")
        like = self.like()
        return torch.zeros(len(state.t), 0, self.dims.width, device=state.t.device, dtype=None if like is None else like.dtype)

    def forward_at(
        self, x: Tensor, places: Places, *, context: Tensor | None = None, context_places: Places | None = None
    ) -> Tensor:
        """Run `forward` on tokens that were checked and hold finite numbers at padding; outputs there are anything finite.

        Blocks call this. Here it is the public call; a mixer overrides it to do without the checks.
        """
        if context is None:
            return self(x, valid=places.valid)
        valid = None if context_places is None else context_places.valid
        return self(x, context=context, valid=valid, query_valid=places.valid)

    def start_at(self, t: Tensor, *, context: Tensor | None = None, context_places: Places | None = None) -> State:
        """Run `start` for len(t) sequences, or for a context that was checked; t (b) is zeros, shared by all layers."""
        valid = None if context_places is None else context_places.valid
        state = self.start(len(t)) if context is None else self.start(context=context, valid=valid)
        return state._replace(t=t)

    def extend_at(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        """Run `extend` on a state and tokens that were checked, as `forward_at` does."""
        return self.extend(state, x, places.valid)

    def later(self, state: State, memory: Any, places: Places) -> State:
        """Return the state after tokens at these places."""
        known = state.start is not None and places.valid is None
        start = state.start + places.shape[1] if known else None  # type: ignore[operator]
        return state._replace(memory=memory, t=places.after(state.t), start=start)

    def maker(self) -> StateOwner:
        """Return what the layer writes into its states, and expects to find in those it is given."""
        if self._described is None:
            dims = self.dims
            use = "causal " if self.dims.causal else "cross " if self.dims.cross else ""
            sizes = f"width {dims.width}, {dims.heads} heads of {dims.d} and {dims.e}, {dims.g} for keys and values"
            self._described = f"{use}{self.spec or self.name}, {sizes}"
        weight = self.like()
        dtype = torch.get_default_dtype() if weight is None else weight.dtype
        return StateOwner(self._described, dtype)

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
        if own is None:
            return next(self.parameters(), None)
        return own

    def check(self, x: Tensor, what: str = "x", width: int | None = None) -> None:
        """Refuse tokens of another shape, device or type than the layer's."""
        check_tokens(x, what, width or self.dims.width, self.like())

    def check_padding(self, valid: Tensor | None, x: Tensor) -> None:
        check_valid(valid, x.shape[0], x.shape[1], "the sequence that is read")
        if valid is not None:
            need_claims(self.name, self.can, Can.PADDING, "pack rows of equal length instead")
            if valid.device != x.device:
                raise ValueError(f"valid is on {valid.device} but the tokens are on {x.device}: move one of them with .to()")

    def check_length(self, places: Places) -> None:
        """Refuse more real tokens than the layer was built for."""
        limit, n = self.dims.max_len, places.shape[1]
        if limit is None or n == 0:
            return
        if places.start is not None and (places.valid is None or places.start + n <= limit):
            longest = places.start + n  # or fewer: to count padding the device would have to be read, without need
        else:
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"{n} places, but this layer was built for max_len={limit}, and a compiled one does not count which of them "
                    "are padding: cut the padding off, or build it longer"
                )
            longest = places.longest
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
        check_operations(self.name, (), dims.backend)

    def need_length(self) -> int:
        return needed_length(self.name, self.dims)

    def no_context(self, context: Tensor | None) -> None:
        if context is not None:
            raise ValueError(f"{self.name} mixes its own tokens and cannot read a context: leave it out")
