"""Streams of stacks that look ahead: each part answers some tokens later, and its residual connection waits for it.

Letters: b batch, n tokens, p tokens that wait, w width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.blocks.block import BlockStep
from regard.blocks.positioned_block import PlacedBlock
from regard.blocks.stack import Stack
from regard.mixers.base import Mixer
from regard.mixers.state import State, check_states


class WaitingTokens(NamedTuple):
    """A mixer between two calls, and the tokens whose outputs are still to come."""

    mixer: State
    x: Tensor  # (b p w)


class LookAhead:
    """Stream a stack that is not causal but sees a bounded number of tokens ahead: outputs come `latency` tokens later.

    The look-aheads of all layers add up. `extend` gives exactly what the whole pass gives; `finish` gives the last outputs. A
    state is a value, and rows have one length, without padding.

        stream = LookAhead(conformer("Truncated(32, 4)", width=64, heads=4, depth=2, kernel=5, positions="rotary"))
        state = stream.start(1)
        y, state = stream.extend(state, x)  # (1, n, 64) -> the outputs that are complete
        rest = stream.finish(state)
    """

    def __init__(self, stack: Stack) -> None:
        if stack.reads or stack.rate > 1 or any(isinstance(block, PlacedBlock) for block in stack):
            raise ValueError(
                "a stream that looks ahead reads no context, answers every token and has positions inside its mixers"
            )
        self.stack = stack
        for mixer in self._mixers():
            if mixer.latency is None:
                raise ValueError(
                    f"{mixer.name} sees any number of tokens ahead, so that no answer is final before the end: "
                    "use Truncated(back, ahead), another bounded pattern, or a causal mechanism"
                )
        self.latency = sum(mixer.latency or 0 for mixer in self._mixers())

    def start(self, batch: int) -> State:
        """Return the state before the first token of so many sequences."""
        states = [mixer.start(batch) for mixer in self._mixers()]
        t = states[0].t
        nothing = self._nothing(batch)
        return State(tuple(State(WaitingTokens(own, nothing), t, 0) for own in states), t, 0)

    def extend(self, state: State, x: Tensor) -> tuple[Tensor, State]:
        """Return the outputs that n more tokens (b n w) complete, and the state after them."""
        check_states(state, x, len(state.memory), "stream")
        n, waiting, later = x.shape[1], iter(state.memory), []
        for block in self.stack:
            for step in block.steps():
                if not isinstance(step.module, Mixer):
                    x = step.after(x, step.module(step.before(x)))
                    continue
                x, own = self._mixed(step, next(waiting).memory, x)
                later.append(own)
            x = block.finished(x)
        t, start = state.t + n, (state.start or 0) + n
        return self._normed(x), State(tuple(State(own, t, start) for own in later), t, start)

    def _mixed(self, step: BlockStep, before: WaitingTokens, x: Tensor) -> tuple[Tensor, WaitingTokens]:
        """Return the tokens behind a mixer that are complete now, and those that wait."""
        assert isinstance(step.module, Mixer)
        y, state = step.module.extend(before.mixer, step.before(x))
        tokens = torch.cat([before.x, x], 1)
        done = y.shape[1]
        return step.after(tokens[:, :done], y), WaitingTokens(state, tokens[:, done:].clone())

    def finish(self, state: State) -> Tensor:
        """Return the outputs (b p w) that are still to come at the end of the sequences."""
        waiting = iter(state.memory)
        x = self._nothing(len(state.t))
        for block in self.stack:
            for step in block.steps():
                if not isinstance(step.module, Mixer):
                    x = step.after(x, step.module(step.before(x)))
                    continue
                done, left = self._mixed(step, next(waiting).memory, x)
                last = step.after(left.x, step.module.finish(left.mixer))
                x = torch.cat([done, last], 1)
            x = block.finished(x)
        return self._normed(x)

    def _mixers(self) -> Iterator[Mixer]:
        for block in self.stack:
            yield from (step.module for step in block.steps() if isinstance(step.module, Mixer))

    def _nothing(self, batch: int) -> Tensor:
        """Return no tokens, (b 0 w)."""
        width = next(iter(self.stack)).width
        return next(self.stack.parameters()).new_zeros(batch, 0, width)

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.stack.final_norm is None else self.stack.final_norm(x)
