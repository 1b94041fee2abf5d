"""The model of a cell: an embedding, a stack of one mechanism, the head of the task's form. All have equal parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from regard.arena.arena_task import ArenaModel, ArenaTask
from regard.blocks.block import Block
from regard.blocks.feedforward import FeedForward
from regard.blocks.stack import Stack
from regard.compare.bottleneck_head import BottleneckHead
from regard.mixers.base import Dims, Mixer, mask_padding
from regard.mixers.state import State
from regard.models.build import glorot
from regard.models.embedding import Tokens, add_positions
from regard.models.heads import Matching, NextToken, PerSequence, PerVector
from regard.spec import Spec

TOLERANCE = 0.02  # of the parameters of softmax
CHECKED_TOKENS = 6
ROUNDED = 4  # widths of feed-forward layers are multiples of this
BASELINE = "softmax"


class MixerBlock(Block):
    """A block without a feed-forward layer: x + mixer(norm(x))."""

    def __init__(self, mixer: Mixer, *, dropout: float = 0.0) -> None:
        super().__init__(mixer, nn.Identity(), dropout=dropout)
        del self.channel_norm, self.channel

    def _channel(self, x: Tensor, valid: Tensor | None) -> Tensor:
        return mask_padding(x, valid)

    def _channel_through(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        return x, added


class ComparedModel(nn.Module):
    """Map tokens to scores of labels, by the form of the task: (b n) or (b 2 n) -> (b c), (b n c) or those at some positions."""

    def __init__(self, embed: Tokens, stack: Stack, head: nn.Module, form: str, side_head: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.stack, self.head, self.form = embed, stack, head, form
        self.side_head = side_head  # of scores at every token, for tasks that ask for more than their labels in training

    def forward(self, tokens: Tensor, valid: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """Return scores; `at` (b k) are the positions that need them, for a label per token."""
        return self._scores(self._vectors(tokens, valid), valid, at)

    def with_side_scores(self, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return scores, and in the same pass those of the side labels at every token, (b n v) or (b 2 n v)."""
        assert self.side_head is not None, "the task asks for nothing beside its labels"
        y = self._vectors(tokens, valid)
        return self._scores(y, valid), self.side_head(y).view(*tokens.shape, -1)

    def _vectors(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """Read the sequences; both of a pair in one pass, twice the batch."""
        if self.form == "pair":
            tokens, valid = tokens.flatten(0, 1), None if valid is None else valid.flatten(0, 1)
        places = self.embed.places(tokens, valid, packed=True)  # as `Examples` are padded
        return self.stack(self.embed(tokens, places), places)

    def _scores(self, y: Tensor, valid: Tensor | None, at: Tensor | None = None) -> Tensor:
        if self.form == "pair":
            return self._pair_scores(y, valid)
        if self.form == "label":
            return self.head(y, self.stack.valid(valid))
        if isinstance(self.head, BottleneckHead):
            scores = self.head(y, valid)
            return scores if at is None else scores.take_along_dim(at[..., None], 1)
        if at is not None:
            y = y.take_along_dim(at[..., None], 1)
        return self.head(y)

    def why_not_decoded(self) -> str:
        """Say why the model has no answer behind each token; empty if it has."""
        if self.form not in ("token", "next"):
            return "the task has one label a sequence: nothing is decoded"
        if isinstance(self.head, BottleneckHead):
            return "all labels are read from the vector of the last token: nothing is decoded"
        return ""

    def start(self, batch: int) -> State:
        """Return the state before the first token. Raises a ValueError where nothing is decoded."""
        reason = self.why_not_decoded()
        if reason:
            raise ValueError(reason)
        return self.stack.start(batch)

    def extend(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Return the scores of every new token of a causal model (b n c), and the state after them."""
        places = self.embed.places(tokens, valid, state)
        y, after = self.stack.extend(state, self.embed(tokens, places), places)
        return self.head(y), after

    def last(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        scores, after = self.extend(state, tokens, valid)
        return scores[:, -1], after

    def _pair_scores(self, y: Tensor, valid: Tensor | None) -> Tensor:
        kept = self.stack.valid(None if valid is None else valid.flatten(0, 1))
        one, two = y.unflatten(0, (-1, 2)).unbind(1)
        seen = (None, None) if kept is None else kept.unflatten(0, (-1, 2)).unbind(1)
        return self.head(one, seen[0], two, seen[1])


@dataclass(frozen=True)
class MatchedModel:
    """Hold the settings of a model whose parameters were made equal to those of softmax, and how that was done."""

    model: ArenaModel
    parameters: int
    note: str


def is_causal(task: ArenaTask) -> bool:
    return task.causal or task.form == "next"


def build_model(task: ArenaTask, mixer: str, model: ArenaModel, length: int | None = None) -> ComparedModel:
    """Build the model of a task with a mechanism; `length` is that of the task unless given.

    Raises a ValueError where the mechanism cannot do what the task needs.
    """
    spec = Spec.parse(mixer)
    causal = is_causal(task)
    own = Dims(model.width, model.heads, causal=causal, max_len=length or task.length)
    outside, inside = add_positions(model.positions, own)
    blocks: list[Block] = []
    for _ in range(model.depth):
        if model.conv:
            blocks.append(_short_conv(model))
        blocks.append(_block(spec.build(own, positions=inside), model))
    stack = Stack(blocks, nn.LayerNorm(model.width))
    if stack.rate > 1 and (task.side_labels or task.form in ("token", "next")):
        raise ValueError(f"{spec.name} gives fewer answers than it has tokens, and {task.name} needs one for each")
    embed = Tokens(task.vocab, model.width, positions=outside, dropout=model.dropout)
    side_head = PerVector(model.width, task.side_labels) if task.side_labels else None
    return ComparedModel(embed, glorot(stack), _head(task, model, length or task.length), task.form, side_head)


def _block(mixer: Mixer, model: ArenaModel) -> Block:
    if not model.ffn:
        return MixerBlock(mixer, dropout=model.dropout)
    activation = "silu" if model.gated else "gelu"
    channel = FeedForward(model.width, model.ffn, activation=activation, gated=model.gated, dropout=model.dropout)
    return Block(mixer, channel, dropout=model.dropout)


def _short_conv(model: ArenaModel) -> Block:
    """Make the causal convolution in front of a mixer, for bidirectional mixers too."""
    dims = Dims(model.width, model.heads, causal=True)
    return MixerBlock(Spec("conv", kernel=model.conv).build(dims), dropout=model.dropout)


def _head(task: ArenaTask, model: ArenaModel, length: int) -> nn.Module:
    if model.bottleneck:
        return BottleneckHead(model.width, task.classes, length)
    makers: dict[str, Callable[[], nn.Module]] = {
        "label": partial(PerSequence, model.width, task.classes, pool=model.pooling),
        "pair": partial(Matching, model.width, task.classes, pool=model.pooling),
        "token": partial(PerVector, model.width, task.classes),
        "next": partial(NextToken, model.width, task.vocab),
    }
    return makers[task.form]()


@torch.no_grad()
def check_outputs(made: ComparedModel, mixer: str, length: int) -> None:
    """Raise a ValueError where a mixer does not give one vector for each token: others would be added by broadcasting."""
    n = min(length, CHECKED_TOKENS)
    made.eval()
    with torch.random.fork_rng(devices=[]):
        for block in made.stack.blocks:
            assert isinstance(block, Block)
            x = torch.zeros(2, n, block.width)
            found, expected = tuple(block.mixer(x).shape), (2, -(-n // block.rate), block.width)
            if found != expected:
                raise ValueError(f"{mixer} makes {found} of tokens {tuple(x.shape)}, where {expected} should be")
    made.train()


def count_parameters(task: ArenaTask, mixer: str, model: ArenaModel) -> int:
    """Count the weights of a model without making them."""
    with torch.device("meta"):
        made = build_model(task, mixer, model)
    return sum(p.numel() for p in made.parameters())


def matched_model(task: ArenaTask, mixer: str, model: ArenaModel) -> MatchedModel:
    """Choose the width of the feed-forward layers so that the total of parameters is that of softmax, within TOLERANCE."""
    goal, own = count_parameters(task, BASELINE, model), count_parameters(task, mixer, model)
    if abs(own - goal) <= TOLERANCE * goal / 4:
        return MatchedModel(model, own, f"{own:,} parameters, softmax has {goal:,}: nothing was changed")
    if not model.ffn:
        return MatchedModel(model, own, f"{own:,} parameters, softmax has {goal:,}: there is no feed-forward layer to change")
    narrow = replace(model, ffn=ROUNDED)
    least = count_parameters(task, mixer, narrow)
    slope = (own - least) / (model.ffn - ROUNDED) if model.ffn > ROUNDED else 1.0
    hidden = max(ROUNDED, ROUNDED * round((ROUNDED + (goal - least) / slope) / ROUNDED))
    found = replace(model, ffn=hidden)
    total = count_parameters(task, mixer, found)
    note = f"feed-forward layers of {hidden} in place of {model.ffn}: {total:,} parameters, softmax has {goal:,}"
    if abs(total - goal) > TOLERANCE * goal:
        note += f" ({100 * (total / goal - 1):+.0f} %: its own weights cannot be made up for)"
    return MatchedModel(found, total, note)
