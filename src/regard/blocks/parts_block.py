"""A block made of a list of parts, each with a residual weight of its own: any order of mixers and channel layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from regard.blocks.block import Block, BlockStep, NormClass, check_context, mix_at
from regard.blocks.feedforward import check_fraction
from regard.mixers.base import Mixer
from regard.mixers.places import PaddingMask, Places, mask_padding
from regard.mixers.state import State, check_states
from regard.ops.dropout import Dropout


class BlockPart(NamedTuple):
    """A mixer over the sequence, or a module that works on every token by itself, and how much of it is added.

    `module` is the part, `weight` the factor of what it adds.

    >>> from regard.blocks import BlockPart, FeedForward
    >>> BlockPart(FeedForward(16, 32), 0.5).weight
    0.5
    """

    module: nn.Module
    weight: float = 1.0


class PartsBlock(Block):
    """x + weight part(norm(x)), part by part, and a norm behind the last one if `last_norm`.

    `PartsBlock([BlockPart(ffn, 0.5), BlockPart(attention), BlockPart(convolution), BlockPart(ffn, 0.5)])` is the Conformer's, but
    for its last norm.
    At least one part is a mixer; all mixers answer every token and read no context. It streams like a `Block`.

    `parts` are its parts in order, `norm_class` and `dropout` are those of `Block`.

    >>> import torch
    >>> from regard import layer
    >>> from regard.blocks import BlockPart, FeedForward, PartsBlock
    >>> half = [BlockPart(FeedForward(16, 32), 0.5) for _ in range(2)]
    >>> block = PartsBlock([half[0], BlockPart(layer("softmax", width=16, heads=2)), half[1]], last_norm=True)
    >>> tuple(block(torch.randn(1, 10, 16)).shape)
    (1, 10, 16)
    """

    def __init__(
        self, parts: Sequence[BlockPart], *, norm_class: NormClass = nn.LayerNorm, last_norm: bool = False, dropout: float = 0.0
    ) -> None:
        nn.Module.__init__(self)  # a Block by what it does, with other modules
        mixers = [part.module for part in parts if isinstance(part.module, Mixer)]
        if not mixers:
            raise ValueError("a block mixes its tokens: at least one of its parts must be a mixer")
        widths = {mixer.dims.width for mixer in mixers}
        if len(widths) > 1 or any(mixer.dims.cross or mixer.rate > 1 for mixer in mixers):
            raise ValueError("the mixers of a block have one width, read no context and answer every token")
        if len({mixer.dims.causal for mixer in mixers}) > 1:
            raise ValueError("the mixers of a block are all causal, or none of them is")
        self.width, self.rate, self.pre, self.cross = mixers[0].dims.width, 1, True, None
        self.parts = nn.ModuleList(part.module for part in parts)
        self.weights = tuple(float(part.weight) for part in parts)
        self.norms = nn.ModuleList(norm_class(self.width) for _ in parts)
        self.last_norm = norm_class(self.width) if last_norm else None
        self.drop = Dropout(check_fraction("dropout", dropout))

    @property
    def mixers(self) -> list[Mixer]:
        """The parts that mix tokens, in their order."""
        return [part for part in self.parts if isinstance(part, Mixer)]

    @property
    def mixer(self) -> Mixer:  # type: ignore[override]
        """The first part that mixes tokens: a stack checks tokens by it."""
        return self.mixers[0]

    def forward(
        self, x: Tensor, valid: PaddingMask = None, *, context: Tensor | None = None, context_valid: PaddingMask = None
    ) -> Tensor:
        check_context(False, context, context_valid)
        tokens, places = self._checked(x, valid)
        for before, part, after in self.steps():
            y = before(tokens)
            y = mix_at(part, y, places) if isinstance(part, Mixer) else part(y)
            tokens = after(tokens, y)
        tokens = self.finished(tokens)
        return mask_padding(tokens, None if isinstance(valid, Places) else places.valid)

    def steps(self) -> Iterator[BlockStep]:
        for norm, part, weight in zip(self.norms, self.parts, self.weights, strict=True):
            yield BlockStep(norm, part, partial(self._added, weight))

    def _added(self, weight: float, x: Tensor, y: Tensor) -> Tensor:
        """Add what a part gives, some of it dropped in training."""
        if self.training:
            y = self.drop(y)
        return x + y if weight == 1 else x + weight * y

    def finished(self, x: Tensor) -> Tensor:
        """Apply the norm behind the last part, if there is one."""
        return x if self.last_norm is None else self.last_norm(x)

    def start(self, batch: int | None = None, *, context: Tensor | None = None, context_valid: Tensor | None = None) -> State:
        check_context(False, context, context_valid)
        states = tuple(mixer.start(batch) for mixer in self.mixers)
        return State(states, states[0].t, states[0].start)

    def start_at(self, t: Tensor, *, context: Tensor | None = None, context_places: Places | None = None) -> State:  # noqa: ARG002
        states = tuple(mixer.start_at(t) for mixer in self.mixers)
        return State(states, states[0].t, states[0].start)

    def check_state(self, state: State, x: Tensor) -> None:
        check_states(state, x, len(self.mixers), "block")
        for mixer, own in zip(self.mixers, state.memory, strict=True):
            mixer.check_state(own, x)

    def _extended(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        states = iter(state.memory)
        later = []
        for before, part, after in self.steps():
            y = before(x)
            if isinstance(part, Mixer):
                y, own = part.extend_at(next(states), y, places)
                later.append(own)
            else:
                y = part(y)
            x = after(x, y)
        return self.finished(x), State(tuple(later), later[0].t, later[0].start)

    def _check(self, x: Tensor, valid: Tensor | None) -> None:
        self.mixer.check(x)
        for mixer in self.mixers:
            mixer.check_padding(valid, x)
