"""Layers that can be run backwards: training memory that does not grow with depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.blocks.block import Block, mix_at
from regard.blocks.positioned_block import PlacedBlock
from regard.blocks.stack import Context, Stack
from regard.mixers.feature_math import upcast
from regard.mixers.places import PaddingMask, Places, mask_padding
from regard.mixers.state import State, check_states

TensorPair = tuple[Tensor, Tensor]


class ReversibleStack(Stack):
    """A stack whose activations are not kept: the backward pass recomputes the input of each block from its output.

    Two streams of width w: y1 = x1 + F(x2), y2 = x2 + G(y1), with F = mixer(norm(.)) and G = channel(norm(.)); so x2 = y2 - G(y1)
    and x1 = y1 - F(x2). Both streams start as the input, and the output is the norm of their mean: weights, shapes and the way to
    build it are those of a `Stack`, the function is another one. Costs one more forward pass; keeps the last two streams
    and, in training, the state of the random numbers in front of each part, so that dropout falls as it fell.
    Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451 (where the streams are concatenated at the end).

    The streams are float32 or better. A recomputed input differs in its last digits, so a mechanism that compares (buckets, the
    top few) may decide a near tie otherwise. Under torch.compile a training pass runs eagerly, and fullgraph=True refuses it.

    `blocks` and `final_norm` are those of `Stack`.

    >>> import torch
    >>> from regard.blocks import ReversibleStack
    >>> stack = ReversibleStack.of("Local(4)", width=16, heads=2, depth=3)
    >>> x = torch.randn(1, 10, 16, requires_grad=True)
    >>> stack(x).sum().backward()
    >>> tuple(x.grad.shape)
    (1, 10, 16)
    """

    def __init__(self, blocks: Sequence[Block], final_norm: nn.Module | None = None) -> None:
        super().__init__(blocks, final_norm)
        if not all(block.pre and block.rate == 1 and block.cross is None for block in blocks):
            raise ValueError("reversible blocks have norm='pre', an output for every token, and no cross attention")
        if any(isinstance(block, PlacedBlock) for block in blocks):
            raise ValueError("the inputs of reversible blocks are recomputed: add positions to the tokens, not in every block")

    def forward(
        self, x: Tensor, valid: PaddingMask = None, *, context: Context = None, context_valid: PaddingMask = None
    ) -> Tensor:
        if context is not None or context_valid is not None:
            raise ValueError("a reversible stack mixes its own tokens and cannot read a context: leave it out")
        x, places = self._tokens(x, valid)
        weights = [p for p in self.blocks.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and (x.requires_grad or weights):
            streams = self._reversibly(x, places, weights)
        else:
            streams = self.run(x, places)
        return self._mean(streams, x, places.valid)

    def extend(self, state: State, x: Tensor, valid: PaddingMask = None) -> tuple[Tensor, State]:
        """Return the outputs of n >= 0 more tokens (b n w) through all blocks, and the state after them."""
        check_states(state, x, len(self.blocks), "stack")
        for block, before in zip(self, state.memory, strict=True):
            block.check_state(before, x)
        x, places = self._tokens(x, valid, state)
        one = two = upcast(x)
        states = []
        for block, before in zip(self, state.memory, strict=True):
            tokens = block.mixer_norm(two.to(x.dtype))
            y, own = block.mixer.extend_at(before.memory[0], tokens, places)
            one = one + mask_padding(block.drop(y), places.valid)
            two = two + _channel(block, one, places, x.dtype)
            states.append(State((own, None), own.t, own.start))
        return self._mean((one, two), x, places.valid), State(tuple(states), states[0].t, states[0].start)

    def run(self, x: Tensor, valid: PaddingMask = None, before: Callable[[], None] = lambda: None) -> TensorPair:
        """Return both streams behind the last block, by plain operations; `before` is called in front of each part."""
        places = valid if isinstance(valid, Places) else Places.of(x, valid)
        one = upcast(x)
        two = upcast(x)
        for block in self:
            before()
            one = one + _mix(block, two, places, x.dtype)
            before()
            two = two + _channel(block, one, places, x.dtype)
        return one, two

    def _reversibly(self, x: Tensor, places: Places, weights: list[nn.Parameter]) -> TensorPair:
        """Compute the same so that the backward pass runs backwards: random numbers are restored, which no graph can hold."""
        if torch.compiler.is_dynamo_compiling():
            from regard.ops.uncompiled import uncompiled  # it loads the compiler

            return uncompiled(_Reversible.apply, self, x, places, *weights)
        return _Reversible.apply(self, x, places, *weights)

    def _mean(self, streams: TensorPair, x: Tensor, valid: Tensor | None) -> Tensor:
        mean = (streams[0] + streams[1]) / 2
        return self._finish(mean.to(x.dtype), valid)


def _mix(block: Block, x: Tensor, places: Places, dtype: torch.dtype) -> Tensor:
    y = mix_at(block.mixer, block.mixer_norm(x.to(dtype)), places)
    y = mask_padding(y, places.valid)
    return block.drop(y).to(x.dtype)


def _channel(block: Block, x: Tensor, places: Places, dtype: torch.dtype) -> Tensor:
    y = block.channel(block.channel_norm(x.to(dtype)))
    y = block.drop(y).to(x.dtype)
    return mask_padding(y, places.valid)


class _Reversible(torch.autograd.Function):
    """All blocks at once, so that nothing in between is kept."""

    @staticmethod
    def forward(ctx: Any, stack: ReversibleStack, x: Tensor, places: Places, *weights: nn.Parameter) -> TensorPair:
        ctx.stack, ctx.weights, ctx.frozen = stack, weights, _versions(stack)
        ctx.world = world = _World(x, places)
        random = any(module.training for module in stack.modules())
        one, two = stack.run(x, places, world.remember if random else lambda: None)
        if _versions(stack) != ctx.frozen:
            raise RuntimeError("a part of this stack changes its buffers in training, so its pass cannot be repeated: use Stack")
        ctx.save_for_backward(one, two)
        return one, two

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_one: Tensor, d_two: Tensor) -> tuple[Tensor | None, ...]:
        if _versions(ctx.stack) != ctx.frozen:
            raise RuntimeError("weights or buffers were changed between the forward and the backward pass of a reversible stack")
        one, two = ctx.saved_tensors
        grads: dict[Tensor, Tensor] = {}
        again = _Again(ctx.world)
        for block in reversed(list(ctx.stack)):
            y, d = again(_channel, block, one, d_two, grads)
            two = two - y
            d_one = d_one + d
            y, d = again(_mix, block, two, d_one, grads)
            one = one - y
            d_two = d_two + d
        d_x = (d_one + d_two).to(ctx.world.dtype) if ctx.needs_input_grad[1] else None
        return None, d_x, None, *(grads.get(w) for w in ctx.weights)


def _versions(stack: ReversibleStack) -> list[tuple[int, int]]:
    """Another list whenever a weight or buffer has changed."""
    return [(id(x), x._version) for x in (*stack.blocks.parameters(), *stack.blocks.buffers())]


class _World:
    """What the parts see beside their input, kept so that they can be run once more: padding, autocast, random numbers."""

    def __init__(self, x: Tensor, places: Places) -> None:
        self.places, self.dtype, self.device = places, x.dtype, x.device
        kind = self.kind = x.device.type if x.device.type != "meta" else "cpu"
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        self.dice: list[tuple[Tensor, Tensor | None]] = []  # in front of each part

    def remember(self) -> None:
        own = None if self.kind == "cpu" else torch.get_device_module(self.device).get_rng_state(self.device)
        self.dice.append((torch.get_rng_state(), own))


class _Again:
    """Runs the parts of a pass once more, the last one first."""

    def __init__(self, world: _World) -> None:
        self.world, self.dice = world, list(world.dice)

    def __call__(
        self, part: Callable[..., Tensor], block: Block, x: Tensor, up: Tensor, grads: dict[Tensor, Tensor]
    ) -> TensorPair:
        """part(block, x) and the gradient of x; those of the weights are added to `grads`."""
        world, (enabled, dtype, cached) = self.world, self.world.autocast
        x = x.detach().requires_grad_()
        weights = [w for w in block.parameters() if w.requires_grad]
        with (
            torch.random.fork_rng([] if world.kind == "cpu" else [world.device], device_type=world.kind),
            torch.autocast(world.kind, dtype, enabled, cached),
            torch.enable_grad(),
        ):
            if self.dice:
                self._throw(*self.dice.pop())
            y = part(block, x, world.places, world.dtype)
        found, *others = torch.autograd.grad(y, (x, *weights), up, allow_unused=True)
        for w, d in zip(weights, others, strict=True):
            if d is not None:
                grads[w] = grads[w] + d if w in grads else d
        if found is None:
            found = torch.zeros_like(x)
        return y.detach(), found

    def _throw(self, host: Tensor, device: Tensor | None) -> None:
        torch.set_rng_state(host)
        if device is not None:
            torch.get_device_module(self.world.device).set_rng_state(device, self.world.device)
