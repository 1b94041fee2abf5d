"""Blocks one after another: the body of every encoder and decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, Self

import torch
from torch import Tensor, nn

from regard.blocks.block import Block, NormClass, check_context
from regard.blocks.feedforward import FeedForward
from regard.blocks.positioned_block import PlacedBlock
from regard.checks import check_batch, check_same_batch, need
from regard.mixers.attention import has_hooks
from regard.mixers.base import Mixer
from regard.mixers.dims import Can, Dims
from regard.mixers.places import PaddingMask, Places, mask_padding, pooled_valid
from regard.mixers.position_interface import Positions
from regard.mixers.state import State, check_states
from regard.ops.add_norm import add_norm
from regard.positions import entering
from regard.spec import Named, Spec

Context = Tensor | tuple[Tensor, ...] | None


class Stack(nn.Module):
    """Blocks in order, and a norm behind the last: (b n w) -> (b n w), all at once or streamed.

    `Stack.of("softmax", width=512, heads=8, depth=6)` builds one; a list of mechanisms is a hybrid. Its state is a value: its
    memory holds the states of the blocks, so `state.select(rows)` reorders beams through all layers.

    `blocks` are Blocks of one width, `final_norm` is the norm behind the last one, or None.

    >>> import torch
    >>> from regard.blocks import Stack
    >>> stack = Stack.of(["gla", "Local(4)"], width=16, heads=2, depth=4, ffn=32, causal=True)
    >>> x = torch.randn(1, 10, 16)
    >>> y, state = stack.extend(stack.start(1), x)
    >>> torch.allclose(y, stack(x), atol=1e-5)
    True
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
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
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
        layer, `weight_dropout` for attention weights. Where norms are in front, one more is behind the last block. `head_dim` is
        the size of a head, width / heads unless given; `bias` that of the projections, and `out_bias` that of the last one.
        """
        names = [Spec.of(x) for x in (specs if isinstance(specs, Sequence) and not isinstance(specs, str) else [specs])]
        count = len(names) if depth is None else depth
        depth = need("depth", count)
        own = Dims(width, heads, kv_heads, head_dim, head_dim, causal=causal, max_len=max_len, dropout=weight_dropout)
        if cross is None and not context_width is context_len is None:
            raise ValueError("context_width and context_len are for a stack that reads a context: say how with cross=...")

        def channel() -> nn.Module:
            if callable(ffn):
                return ffn()
            hidden = 4 * width if ffn is None else ffn
            return FeedForward(width, hidden, dropout=dropout)

        def reader() -> Any:
            read = Dims(width, heads, kv_heads, head_dim, head_dim, context_width, False, True, context_len, weight_dropout)
            if cross is None:
                return None
            return Spec.of(cross).build(read, **biases)

        biases: dict[str, Any] = {"bias": bias, "out_bias": out_bias}
        enters = entering(positions, own, depth)

        def block(number: int, spec: Spec) -> Block:
            parts = spec.build(own, positions=None if enters else positions, **biases), channel()
            options = {"cross": reader(), "norm": norm, "norm_class": norm_class, "dropout": dropout}
            if enters is None:
                return Block(*parts, **options)
            return PlacedBlock(*parts, positions=enters, number=number, **options)

        repeated = islice(cycle(names), depth)
        blocks = [block(number, spec) for number, spec in enumerate(repeated)]
        if enters is not None and any(part.rate > 1 for part in blocks):
            raise ValueError("positions enter every block only where no block gives fewer answers than it has tokens")
        final_norm = norm_class(width) if norm == "pre" else None
        return cls(blocks, final_norm)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)  # type: ignore[arg-type]

    def valid(self, valid: Tensor | None) -> Tensor | None:
        """Return which outputs are real: `valid` itself, unless a mixer has fewer outputs than tokens."""
        return pooled_valid(valid, self.rate)

    def outputs(self, places: Places) -> Places:
        """Return the places of the outputs: those of the tokens, unless a mixer has fewer outputs than tokens."""
        for block in self:
            places = places.pooled(block.rate)
        return places

    def forward(
        self, x: Tensor, valid: PaddingMask = None, *, context: Context = None, context_valid: PaddingMask = None
    ) -> Tensor:
        """Run all blocks on x (b n w); outputs at padding are zero.

        `context` (b m w) is one for all blocks that read, or a tuple with one for each block. `valid` (b n) and `context_valid`
        (b m) may be `Places`, of tokens that were checked and hold finite numbers at padding.
        """
        x, places = self._tokens(x, valid)
        contexts = self._contexts(context, context_valid)
        more = self._entering(x, places)
        for read, _ in contexts[:1]:
            if read is not None:
                check_same_batch(x, read)
        added = None  # to x, together with the next norm
        for block, (read, seen) in zip(self, contexts, strict=True):
            if not more and _runs_through(block):
                given = {} if read is None else {"context": read, "context_places": seen}
                x, added = block.through(x, added, places, **given)
            else:
                x = x if added is None else x + added
                x, added = block(x, places, context=read, context_valid=seen, **more), None
            places = places.pooled(block.rate)
        return self._finish(x, places.valid, added)

    def layers(
        self, x: Tensor, valid: PaddingMask = None, *, context: Context = None, context_valid: PaddingMask = None
    ) -> list[Tensor]:
        """Return the outputs (b n w) of every block, and behind them those of the stack; arguments are those of `forward`."""
        x, places = self._tokens(x, valid)
        contexts = self._contexts(context, context_valid)
        more, found = self._entering(x, places), []
        for read, _ in contexts[:1]:
            if read is not None:
                check_same_batch(x, read)
        for block, (read, seen) in zip(self, contexts, strict=True):
            x = block(x, places, context=read, context_valid=seen, **more)
            places = places.pooled(block.rate)
            found.append(mask_padding(x, places.valid))
        return [*found, self._finish(x, places.valid)]

    def start(self, batch: int | None = None, *, context: Context = None, context_valid: PaddingMask = None) -> State:
        """Return the state before the first token: of so many sequences, or of those that will read the context."""
        contexts = self._contexts(context, context_valid)
        rows = next((len(read) for read, _ in contexts if read is not None), None)
        if None not in (batch, rows) and batch != rows:
            raise ValueError(f"the context has {rows} sequences, not {batch}: leave out the batch")
        if batch is None and rows is None:
            raise ValueError("a stack starts from nothing: start(batch), with the number of sequences")
        if batch is None:
            batch = rows
        check_batch(batch)
        weight = next(self.parameters(), None)
        t = torch.zeros(batch, dtype=torch.long, device=None if weight is None else weight.device)  # type: ignore[arg-type]
        states = [
            block.start_at(t, context=read, context_places=seen) for block, (read, seen) in zip(self, contexts, strict=True)
        ]
        return State(tuple(states), t, 0)

    def extend(self, state: State, x: Tensor, valid: PaddingMask = None) -> tuple[Tensor, State]:
        """Return the outputs of n >= 0 more tokens (b n w) through all blocks, and the state after them."""
        check_states(state, x, len(self.blocks), "stack")
        for block, before in zip(self, state.memory, strict=True):
            block.check_state(before, x)
        x, places = self._tokens(x, valid, state)
        more, states = self._entering(x, places), []
        for block, before in zip(self, state.memory, strict=True):
            x, after = block.extend(before, x, places, **more)
            states.append(after)
        outputs = self._finish(x, places.valid)
        return outputs, State(tuple(states), states[0].t, states[0].start)

    def _tokens(self, x: Tensor, valid: PaddingMask, after: State | None = None) -> tuple[Tensor, Places]:
        """Return checked tokens (b n w) with finite numbers at padding, and their places."""
        first = self.blocks[0].mixer
        first.check(x)  # type: ignore[union-attr, operator]
        real = valid.valid if isinstance(valid, Places) else valid
        if real is not None:
            self._check_padding(real, x)
        if isinstance(valid, Places):
            return x, valid
        t, start = (None, 0) if after is None else (after.t, after.start)
        return mask_padding(x, valid), Places.of(x, valid, t, start)

    def _check_padding(self, valid: Tensor, x: Tensor) -> None:
        """Refuse a mask of another shape or device, and a mixer that takes no padding."""
        mixers = [mixer for block in self for mixer in (block.mixer, block.cross) if mixer is not None]
        unable = [mixer for mixer in mixers if Can.PADDING not in mixer.can]
        (unable or mixers)[0].check_padding(valid, x)

    def _contexts(self, context: Context, valid: PaddingMask) -> list[tuple[Tensor | None, Places | None]]:
        """Return what each block reads, (b m w) with finite numbers at padding, and its places."""
        many = (context,) if isinstance(context, Tensor) else context or ()
        check_context(self.reads, many[0] if many else None, valid)
        if len(many) not in (0, 1, len(self.blocks)):
            raise ValueError(f"{len(many)} contexts for {len(self.blocks)} blocks: give one for all of them, or one for each")
        readers = [block.cross for block in self if block.cross is not None]
        found: list[tuple[Tensor, Places]] = []
        for read in many:
            found.append(self._read(readers, read, valid, found))
        if not found:
            return [(None, None)] * len(self.blocks)
        if len(found) != len(self.blocks):
            found = found * len(self.blocks)
        pairs = zip(self, found, strict=True)
        return [pair if block.cross is not None else (None, None) for block, pair in pairs]

    @staticmethod
    def _read(
        readers: list[Mixer], read: Tensor, valid: PaddingMask, others: list[tuple[Tensor, Places]]
    ) -> tuple[Tensor, Places]:
        """Return a checked context, and its places: those of another context of the same length, if there is one."""
        reader = next((one for one in readers if Can.PADDING not in one.can), readers[0])
        reader.check(read, "context", reader.dims.context_width)
        if isinstance(valid, Places):
            reader.check_padding(valid.valid, read)
            return read, valid
        reader.check_padding(valid, read)
        same = [places for _, places in others if places.shape == read.shape[:2]]
        places = same[0] if same else Places.of(read, valid)
        return mask_padding(read, valid), places

    def _entering(self, x: Tensor, places: Places) -> dict[str, Tensor]:
        """Compute the positions that enter every block, if they are of that kind."""
        first = self.blocks[0]
        rows = first.rows(x, places) if isinstance(first, PlacedBlock) else None
        return {} if rows is None else {"rows": rows}

    def _finish(self, x: Tensor, valid: Tensor | None, added: Tensor | None = None) -> Tensor:
        """Normalise outputs x + added, and set those at padding to zero: blocks leave anything finite there."""
        if self.final_norm is not None:
            x = add_norm(x, added, self.final_norm)[1]
        elif added is not None:
            x = x + added
        return mask_padding(x, valid)


def _runs_through(block: Block) -> bool:
    """Return whether a block may leave its last sum to what follows: it is of no other kind, and nothing is hooked to it."""
    own = type(block).forward is Block.forward and not has_hooks(block)
    return own and block.pre
