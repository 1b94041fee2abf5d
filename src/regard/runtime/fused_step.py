"""A copy of a model for steps of one token: few launches, because norms, activations and sums are parts of products.

Blocks of norm, mixer, norm, channels become `StepBlock`s: q, k and v are one product with the norm in front of it, the output of
the mixer is added to the tokens by its own product, and so are the channels. A language model also embeds by one launch, and its
last norm is part of the product of its head. Parts that no kernel takes stay as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.blocks.block import Block
from regard.blocks.feedforward import FeedForward
from regard.blocks.stack import Stack
from regard.mixers.attention import Attention, has_hooks
from regard.mixers.base import Mixer
from regard.mixers.places import Places, position_bound
from regard.mixers.state import State
from regard.models.causal_lm import LanguageModel
from regard.models.embedding import Tokens
from regard.models.heads import NextToken
from regard.ops.row_linear import RowMap, RowNorm, add_product, embed_rows, row_product, rows_refuse
from regard.positions import Learned, Sinusoidal
from regard.runtime.packed_linear import FusedPart, inference_copy


class FusedRows(NamedTuple):
    """A part of a block between its norm and its sum: x + last(... first(norm(x)))."""

    norm: RowNorm
    first: RowMap
    last: RowMap

    @staticmethod
    def of(norm: nn.Module | None, first: nn.Module, last: nn.Module, activation: str = "none") -> FusedRows | None:
        """Return the part of these modules; None: no kernel takes it."""
        found, one, other = RowNorm.of(norm), _row_map(first, activation), _row_map(last)
        if found is None or one is None or other is None:
            return None
        refused = rows_refuse(one.weight, one.bias, *found[:2]) or rows_refuse(other.weight, other.bias, one.weight)
        return None if refused else FusedRows(found, one, other)


def _row_map(module: nn.Module, activation: str = "none") -> RowMap | None:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or has_hooks(module):
        return None
    return RowMap(weight, bias, activation)


def fused_channel(norm: nn.Module | None, channel: nn.Module) -> FusedRows | None:
    """Return x + channel(norm(x)) as fused rows; None: it is no plain feed-forward layer."""
    if type(channel) is not FeedForward or channel.gated or has_hooks(channel):
        return None
    return FusedRows.of(norm, channel.up, channel.down, channel.activation)


def fused_mixer(norm: nn.Module | None, mixer: nn.Module) -> FusedRows | None:
    """Return the products around the core of a mixer; None: it is no causal attention with one product for q, k and v."""
    if type(mixer) is not Attention or not mixer.dims.causal or mixer.readout is not None or has_hooks(mixer):
        return None
    first: Any = mixer.q
    maps: tuple[Any, ...] = (first, mixer.v) if mixer.shared_qk else (first, mixer.k, mixer.v)
    if not all(type(one) is FusedPart and one.fused is first.fused for one in maps):
        return None
    return FusedRows.of(norm, first.fused.map, mixer.out)


class StepBlock(nn.Module):
    """A `Block` for steps of one token, with the same states."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block, self.mixer = block, block.mixer
        self.own = fused_mixer(block.mixer_norm, block.mixer)
        self.channels = fused_channel(block.channel_norm, block.channel)

    def check_state(self, state: State, x: Tensor) -> None:
        self.block.check_state(state, x)

    def extend(self, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        """Return the outputs of one more token (b 1 w), and the state after it."""
        block, (own, cross) = self.block, state.memory
        if self.own is None:
            y, own = block.mixer.extend_at(own, block.mixer_norm(x), places)
            x = x + y
        else:
            x, own = self._mixed(self.own, own, x, places)
        if block.cross is not None and block.cross_norm is not None:
            y, cross = block.cross.extend_at(cross, block.cross_norm(x), places)
            x = x + y
        after = State((own, cross), own.t, own.start)
        if self.channels is None:
            return x + block.channel(block.channel_norm(x)), after
        y, base = row_product(x[:, 0], *self.channels)
        return add_product(base, y, self.channels.last)[:, None], after

    def _mixed(self, part: FusedRows, state: State, x: Tensor, places: Places) -> tuple[Tensor, State]:
        mixer: Any = self.mixer
        y, base = row_product(x[:, 0], *part)
        answers, state = mixer.extend_heads(state, mixer.split_heads(y[:, None].split(mixer.q.fused.sizes, -1), places), places)
        y = answers.to(x.dtype).transpose(1, 2).reshape(len(x), -1)
        return add_product(base, y, part.last)[:, None], state


class StepLanguageModel(nn.Module):
    """A `LanguageModel` of tokens for steps of one token: its embedding is one launch, its last norm a part of the head."""

    def __init__(self, model: LanguageModel, norm: RowNorm | None, head: RowMap) -> None:
        super().__init__()
        self.model, self.norm, self.map = model, norm, head
        self.rows: dict[int, Tensor] = {}  # vectors of positions, by how many there are

    @staticmethod
    def of(model: nn.Module) -> StepLanguageModel | None:
        """Return the model for steps; None: its embedding or its head is of another kind."""
        if type(model) is not LanguageModel or type(model.embed) is not Tokens or type(model.head) is not NextToken:
            return None
        embed, head, norm = model.embed, _row_map(model.head.map), RowNorm.of(model.stack.final_norm)
        table = embed.table.weight
        plain = embed.segments is None and embed.norm is None and type(embed.positions) in (type(None), Sinusoidal, Learned)
        known = norm is not None or model.stack.final_norm is None
        if not plain or not known or head is None or has_hooks(embed) or has_hooks(model.head):
            return None
        if rows_refuse(head.weight, head.bias, table, *(() if norm is None else norm[:2])):
            return None
        model.stack.final_norm = None
        return StepLanguageModel(model, norm, head)

    def extend(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Return scores (b 1 v) of what follows tokens (b 1), and the state after them."""
        embed: Any = self.model.embed
        places = embed.places(tokens, None, state)
        x = embed_rows(tokens, embed.table.weight, embed.scale, places.at, self._positions(places))
        y, after = self.model.stack.extend(state, x[:, None], places)
        return row_product(y[:, 0], self.norm, self.map).y[:, None], after

    def _positions(self, places: Places) -> Tensor | None:
        """Return the vectors of positions below the bound of a step, in the type of the tokens."""
        positions: Any = self.model.embed.positions
        if positions is None:
            return None
        count = position_bound() or places.longest
        if count not in self.rows:
            like = self.map.weight
            self.rows[count] = positions._known(count, like.device).to(like.dtype).contiguous()
        return self.rows[count]


def fuse_steps(model: Any) -> Any:
    """Return a copy of a model for steps of one token, with the same weights and states; the model itself if nothing is fused."""
    made: Any = inference_copy(model, {})
    found = 0
    for stack in [part for part in made.modules() if isinstance(part, Stack)]:
        for number, block in enumerate(stack.blocks):
            if type(block) is Block and block.pre and _wants_kernels(block.mixer):
                step = StepBlock(block)
                if step.own is not None or step.channels is not None:
                    stack.blocks[number] = step
                    found += 1
    if not found:
        return model
    return StepLanguageModel.of(made) or made


def _wants_kernels(mixer: Mixer) -> bool:
    """Return whether kernels are for a mixer: on a GPU, unless its backend is another one."""
    weight, backend = mixer.like(), mixer.dims.backend
    return weight is not None and (backend == "triton" or (backend == "auto" and weight.is_cuda))
