"""Blocks one after another: the body of every encoder and decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, Self

from torch import Tensor, nn

from regard.blocks.block import Block, NormClass, check_context
from regard.blocks.feedforward import FeedForward
from regard.blocks.positioned_block import PlacedBlock
from regard.checks import check_dense, need
from regard.mixers.base import Dims, State, check_valid, mask_padding, pooled_valid
from regard.mixers.position_interface import Positions
from regard.mixers.state import check_states
from regard.ops.once import one_pass
from regard.patterns import Pattern
from regard.positions import entering
from regard.spec import Spec

Context = Tensor | tuple[Tensor, ...] | None
Named = Spec | str | Pattern | Mapping[str, Any]


class Stack(nn.Module):
    """Blocks in order, and a norm behind the last: (b n w) -> (b n w), all at once or streamed.

    `Stack.of("softmax", width=512, heads=8, depth=6)` builds one; a list of mechanisms is a hybrid. Its state is a value: its
    memory holds the states of the blocks, so `state.select(rows)` reorders beams through all layers.
    """

    def __init__(self, blocks: Sequence[Block], final_norm: nn.Module | None = None) -> None:
        super().__init__()
        if not blocks or any(block.width != blocks[0].width for block in blocks):
            raise ValueError(f"a stack needs blocks of one width, not of {sorted({block.width for block in blocks})}")
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = final_norm
        self.rate = math.prod(block.rate for block in blocks)
        self.reads = any(block.cross is not None for block in blocks)

    @classmethod
    def of(
        cls,
        specs: Named | Sequence[Named],
        *,
        width: int,
        heads: int,
        depth: int | None = None,
        causal: bool = False,
        kv_heads: int | None = None,
        max_len: int | None = None,
        positions: str | Positions | None = None,
        cross: Named | None = None,
        context_width: int | None = None,
        context_len: int | None = None,
        ffn: int | Callable[[], nn.Module] | None = None,
        norm: str = "pre",
        norm_class: NormClass = nn.LayerNorm,
        dropout: float = 0.0,
        weight_dropout: float = 0.0,
    ) -> Self:
        """A stack of one mechanism, or of several that take turns until there are `depth` blocks (one of each unless given).

        `positions` act inside every mixer, as in `layer`, or enter every block: "floater(every_block=True)". `cross` reads a
        context in every block. `ffn` is the hidden size of the ReLU layer (4 * width unless given), or makes another:
        `ffn=lambda: FeedForward(64, 171, activation="silu", gated=True)`. `dropout` is for what layers add and for the hidden
        layer, `weight_dropout` for attention weights. Where norms stand in front, one more stands behind the last block.
        """
        names = [Spec.of(x) for x in (specs if isinstance(specs, Sequence) and not isinstance(specs, str) else [specs])]
        depth = need("depth", len(names) if depth is None else depth)
        own = Dims(width, heads, kv_heads, causal=causal, max_len=max_len, dropout=weight_dropout)
        if cross is None and not context_width is context_len is None:
            raise ValueError("context_width and context_len are for a stack that reads a context: say how with cross=...")

        def channel() -> nn.Module:
            return ffn() if callable(ffn) else FeedForward(width, 4 * width if ffn is None else ffn, dropout=dropout)

        def reader() -> Any:
            read = Dims(width, heads, kv_heads, None, None, context_width, False, True, context_len, weight_dropout)
            return None if cross is None else Spec.of(cross).build(read)

        enters = entering(positions, own, depth)

        def block(number: int, spec: Spec) -> Block:
            parts = spec.build(own, positions=None if enters else positions), channel()
            options = {"cross": reader(), "norm": norm, "norm_class": norm_class, "dropout": dropout}
            return Block(*parts, **options) if enters is None else PlacedBlock(*parts, positions=enters, number=number, **options)

        blocks = [block(number, spec) for number, spec in enumerate(islice(cycle(names), depth))]
        if enters is not None and any(part.rate > 1 for part in blocks):
            raise ValueError("positions enter every block only where no block gives fewer answers than it has tokens")
        return cls(blocks, norm_class(width) if norm == "pre" else None)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)  # type: ignore[arg-type]

    def valid(self, valid: Tensor | None) -> Tensor | None:
        """Which outputs are real: `valid` itself, unless a mixer gives fewer answers than it has tokens."""
        return pooled_valid(valid, self.rate)

    def forward(
        self, x: Tensor, valid: Tensor | None = None, *, context: Context = None, context_valid: Tensor | None = None
    ) -> Tensor:
        """`context` is one for all blocks that read, or a tuple with one for each block."""
        x = self._tokens(x, valid)
        with one_pass():
            for block, read in zip(self, self._contexts(context, context_valid), strict=True):
                x = block(x, valid, context=read, context_valid=context_valid if read is not None else None, hush=False)
                valid = pooled_valid(valid, block.rate)
        return self._finish(x, valid)

    def start(self, batch: int | None = None, *, context: Context = None, context_valid: Tensor | None = None) -> State:
        """Before the first token: the number of sequences, or the context that they will read."""
        contexts = self._contexts(context, context_valid)
        batch = next((len(read) for read in contexts if read is not None), None) if batch is None else batch
        states = []
        with one_pass():
            for block, read in zip(self, contexts, strict=True):
                states.append(block.start(batch, context=read, context_valid=context_valid if read is not None else None))
        return State(tuple(states), states[0].t, states[0].start)

    def extend(self, state: State, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """n >= 0 more tokens through all blocks."""
        check_states(state, x, len(self.blocks), "stack")
        x, states = self._tokens(x, valid), []
        with one_pass():
            for block, before in zip(self, state.memory, strict=True):
                x, after = block.extend(before, x, valid, hush=False)
                states.append(after)
        return self._finish(x, valid), State(tuple(states), states[0].t, states[0].start)

    def _contexts(self, context: Context, valid: Tensor | None) -> list[Tensor | None]:
        """What each block reads."""
        many = (context,) if isinstance(context, Tensor) else context or ()
        check_context(self.reads, many[0] if many else None, valid)
        if len(many) not in (0, 1, len(self.blocks)):
            raise ValueError(f"{len(many)} contexts for {len(self.blocks)} blocks: give one for all of them, or one for each")
        many = tuple(self._masked(read, valid) for read in many)
        each = many if len(many) == len(self.blocks) else [many[0] if many else None] * len(self.blocks)
        return [read if block.cross is not None else None for block, read in zip(self, each, strict=True)]

    def _tokens(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Tokens (b n w) with zeros for padding: blocks need not care what it holds."""
        self.blocks[0].mixer.check(x)  # type: ignore[union-attr, operator]
        self.blocks[0].mixer.check_padding(valid, x)  # type: ignore[union-attr, operator]
        return mask_padding(x, valid)

    @staticmethod
    def _masked(read: Tensor, valid: Tensor | None) -> Tensor:
        check_dense(read, "context")
        check_valid(valid, read.shape[0], read.shape[1], "the context")
        return mask_padding(read, valid)

    def _finish(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Padding is silenced here, once: no block looks at it."""
        return mask_padding(x if self.final_norm is None else self.final_norm(x), valid)
