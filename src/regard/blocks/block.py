"""One layer of a model: a mixer over the sequence, a mixer over the channels, and a residual connection around each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.blocks.feedforward import check_fraction
from regard.checks import check_same_batch
from regard.mixers.attention import has_hooks
from regard.mixers.base import Mixer
from regard.mixers.places import PaddingMask, Places, mask_padding, pool_at
from regard.mixers.state import State, check_states
from regard.ops.add_norm import add_norm
from regard.ops.dropout import Dropout

NormClass = Callable[[int], nn.Module]


def mix_at(mixer: Mixer, x: Tensor, places: Places, **context: Any) -> Tensor:
    """Call a mixer on checked tokens (b n w); by its public call where something is hooked to it or wrapped around it."""
    if not isinstance(mixer, Mixer) or has_hooks(mixer):
        return Mixer.forward_at(mixer, x, places, **context)
    return mixer.forward_at(x, places, **context)


def check_context(reads: bool, context: Tensor | None, context_valid: PaddingMask) -> None:
    """Refuse a context where none is read, and padding of a context that is not there."""
    missing = context is None and context_valid is not None
    if reads != (context is not None) or missing:
        raise ValueError("build it with cross=... and pass a context, or neither")


def _maps_first(module: nn.Module) -> bool:
    """Return whether linear maps are all that reads the tokens of a module, and nothing is hooked to it."""
    return getattr(module, "maps_first", False) and not has_hooks(module)


class BlockStep(NamedTuple):
    """One part of a block: y = module(before(x)), then after(x, y)."""

    before: Callable[[Tensor], Tensor]
    module: nn.Module
    after: Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """x + mixer(norm(x)), then x + cross(norm(x), context) in a decoder, then x + channel(norm(x)).

    norm="pre" is that; norm="post" is the paper's norm(x + mixer(x)). `norm_class` makes a norm of a width: nn.LayerNorm or
    nn.RMSNorm. `dropout` drops from what each part adds. `channel` is any module that works on every token by itself.
    It streams like a mixer, and its state is a value like a mixer's. `valid` (b n) belongs to x, `context_valid` (b m) to the
    context; outputs at padding are zero. With a mixer of rate > 1 outputs are fewer, and `pooled_valid(valid, rate)` are real.
    A stack passes `Places` instead: then tokens were checked and are finite, and outputs at padding are anything finite.

    `mixer` mixes tokens, `cross` reads the context, if there is one.

    >>> import torch
    >>> from regard import layer
    >>> from regard.blocks import Block, FeedForward
    >>> block = Block(layer("linear", width=16, heads=2), FeedForward(16, 32))
    >>> tuple(block(torch.randn(1, 10, 16)).shape)
    (1, 10, 16)
    """

    def __init__(
        self,
        mixer: Mixer,
        channel: nn.Module,
        *,
        cross: Mixer | None = None,
        norm: str = "pre",
        norm_class: NormClass = nn.LayerNorm,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', not {norm!r}")
        if mixer.dims.cross:
            raise ValueError("the mixer of a block mixes its own tokens: give the one that reads a context as cross=")
        self.width, self.rate, self.pre = mixer.dims.width, mixer.rate, norm == "pre"
        if cross is not None and (not cross.dims.cross or cross.rate > 1 or cross.dims.width != self.width):
            raise ValueError(f"cross= needs a mixer of width {self.width}, built with cross=True, with an answer for every token")
        self.mixer_norm, self.mixer = norm_class(self.width), mixer
        self.cross_norm = None if cross is None else norm_class(self.width)
        self.cross = cross
        self.channel_norm, self.channel = norm_class(self.width), channel
        self.drop = Dropout(check_fraction("dropout", dropout))

    def forward(
        self,
        x: Tensor,
        valid: PaddingMask = None,
        *,
        context: Tensor | None = None,
        context_valid: PaddingMask = None,
    ) -> Tensor:
        check_context(self.cross is not None, context, context_valid)
        tokens, places = self._checked(x, valid)
        read: dict[str, Any] = {}
        if self.cross is not None and context is not None:
            context, seen = self._checked_context(context, context_valid)
            check_same_batch(x, context)
            read = {"context": context, "context_places": seen}
        padding = None if isinstance(valid, Places) else places.pooled(self.rate).valid
        if self.pre:
            tokens, y = self.through(tokens, None, places, **read)
            return mask_padding(tokens + y, padding)
        y = mix_at(self.mixer, tokens, places)
        tokens, places = pool_at(tokens, places, self.rate)
        tokens = self._after(self.mixer_norm, tokens, y)
        if self.cross is not None:
            y = mix_at(self.cross, tokens, places, **read)
            tokens = self._after(self.cross_norm, tokens, y)
        return self._channel(tokens, padding)

    def through(self, x: Tensor, added: Tensor | None, places: Places, **read: Any) -> tuple[Tensor, Tensor]:
        """Run a block with norms in front on x + added (b n w): returns tokens, and what is to be added to them.

        So a sum is computed together with the norm behind it, which may be that of the next block. Tokens were checked.
        """
        x, y = add_norm(x, added, self.mixer_norm, _maps_first(self.mixer))
        y = self._dropped(mix_at(self.mixer, y, places))
        x, places = pool_at(x, places, self.rate)
        if self.cross is not None:
            assert self.cross_norm is not None
            x, y = add_norm(x, y, self.cross_norm, _maps_first(self.cross))
            y = self._dropped(mix_at(self.cross, y, places, **read))
        return self._channel_through(x, y)

    def _channel_through(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Run the last part on x + added: returns tokens, and what is to be added to them."""
        x, y = add_norm(x, added, self.channel_norm, _maps_first(self.channel))
        return x, self._dropped(self.channel(y))

    def steps(self) -> Iterator[BlockStep]:
        """Give the parts of a block that reads no context, in their order."""
        if self.cross is not None:
            raise ValueError("this block reads a context: it is more than its steps over its own tokens")
        for norm, module in ((self.mixer_norm, self.mixer), (self.channel_norm, self.channel)):
            yield BlockStep(partial(self._before, norm), module, partial(self._after, norm))

    def finished(self, x: Tensor) -> Tensor:
        """Return what comes behind the last part of tokens x (b n w): themselves."""
        return x

    def start(self, batch: int | None = None, *, context: Tensor | None = None, context_valid: Tensor | None = None) -> State:
        """Return the state before the first token: of so many sequences, or of those that will read the context."""
        check_context(self.cross is not None, context, context_valid)
        if context is not None and batch not in (None, len(context)):
            raise ValueError(f"the context has {len(context)} sequences, not {batch}: leave out the batch")
        sequences = batch if context is None else len(context)
        own = self.mixer.start(sequences)
        cross = None if self.cross is None else self.cross.start(context=context, valid=context_valid)
        return State((own, cross), own.t, own.start)

    def start_at(self, t: Tensor, *, context: Tensor | None = None, context_places: Places | None = None) -> State:
        """Return the state of len(t) sequences, with a context that was checked; t (b) is zeros, shared by all blocks."""
        own, cross = self.mixer.start_at(t), None
        if self.cross is not None:
            cross = self.cross.start_at(t, context=context, context_places=context_places)
        return State((own, cross), own.t, own.start)

    def extend(self, state: State, x: Tensor, valid: PaddingMask = None) -> tuple[Tensor, State]:
        """Return the outputs of n >= 0 more tokens (b n w), and the state after them."""
        if isinstance(valid, Places):
            return self._extended(state, x, valid)
        self.check_state(state, x)
        self._check(x, valid)
        places = Places.of(x, valid, state.t, state.start)
        y, state = self._extended(state, mask_padding(x, valid), places)
        return mask_padding(y, valid), state

    def check_state(self, state: State, x: Tensor) -> None:
        """Refuse a state of another batch, device or module than that of the tokens x (b n w)."""
        check_states(state, x, 2, "block")
        own, cross = state.memory
        self.mixer.check_state(own, x)
        if self.cross is not None:
            self.cross.check_state(cross, x)

    def _extended(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        own, cross = state.memory
        y, own = self.mixer.extend_at(own, self._before(self.mixer_norm, x), places)
        x = self._after(self.mixer_norm, x, y)
        if self.cross is not None:
            y, cross = self.cross.extend_at(cross, self._before(self.cross_norm, x), places)
            x = self._after(self.cross_norm, x, y)
        return self._channel(x, None), State((own, cross), own.t, own.start)

    def _checked(self, x: Tensor, valid: PaddingMask) -> tuple[Tensor, Places]:
        """Return tokens (b n w) with finite numbers at padding, and their places."""
        if isinstance(valid, Places):
            return x, valid
        self._check(x, valid)
        return mask_padding(x, valid), Places.of(x, valid)

    def _checked_context(self, context: Tensor, valid: PaddingMask) -> tuple[Tensor, Places]:
        if isinstance(valid, Places):
            return context, valid
        assert self.cross is not None
        self.cross.check(context, "context", self.cross.dims.context_width)
        self.cross.check_padding(valid, context)
        return mask_padding(context, valid), Places.of(context, valid)

    def _check(self, x: Tensor, valid: Tensor | None) -> None:
        """Refuse tokens and a mask that a mixer would refuse."""
        self.mixer.check(x)
        self.mixer.check_padding(valid, x)
        if self.cross is not None:
            self.cross.check_padding(valid, x)

    def _channel(self, x: Tensor, valid: Tensor | None) -> Tensor:
        y = self.channel(self._before(self.channel_norm, x))
        x = self._after(self.channel_norm, x, y)
        return mask_padding(x, valid)

    def _before(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        if self.pre and norm is not None:
            return norm(x)
        return x

    def _after(self, norm: nn.Module | None, x: Tensor, y: Tensor) -> Tensor:
        x = x + self._dropped(y)
        if self.pre or norm is None:
            return x
        return norm(x)

    def _dropped(self, y: Tensor) -> Tensor:
        if not self.training:
            return y
        drop = self.drop
        if type(drop) is Dropout and drop.p == 0 and not has_hooks(drop):  # the call alone would take microseconds
            return y
        return drop(y)
