"""Sequence to sequence without waiting: all tokens of an answer are said at once, each from a slot of its own.

A decoder that is not causal gives scores for every slot. What differs is where the slots come from:

    ctc       several for every vector that was read; slots may be left blank, and a token may fill several
    length    as many as a predicted length says, each a copy of the source near it, or all of them BEGIN tokens
    masked    as many, all alike and empty; some are filled, the others are said, again and again
    fixed     always the same number; what stands behind the end is not heard

Letters: b batch, n source tokens, m slots, s slots per source vector, w width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.blocks.stack import Stack
from regard.checks import need
from regard.config import Config
from regard.data.batch import BEGIN
from regard.mixers.dims import Dims, needed_length
from regard.mixers.places import Places, mask_padding, unpad_order
from regard.models.build import encoder as make_encoder
from regard.models.build import glorot, stack, tokens
from regard.models.embedding import Embedding
from regard.models.encoder import Encoder
from regard.models.heads import NextToken
from regard.models.length_predictor import LengthPredictor, length_targets
from regard.models.translator import CrossWiring
from regard.text import parse_choice, unknown

BLANK = 0  # nothing is said: the id of padding, which no answer holds
COPIES = ("soft", "uniform", "none", "begin")


class EncodedSource(NamedTuple):
    """The source, read once: what the decoder's blocks read, and what slots are made of."""

    contexts: tuple[Tensor, ...]  # (b n w): one for all blocks, or one for each
    x: Tensor  # (b n w) behind the encoder
    valid: Tensor | None  # (b n)
    vectors: Tensor | None  # (b n w) in front of the encoder, if slots copy them
    vectors_valid: Tensor | None

    def select(self, rows: Tensor) -> EncodedSource:
        return self._each(lambda x: x.index_select(0, rows))

    def at(self, rows: slice) -> EncodedSource:
        return self._each(lambda x: x[rows])

    def _each(self, some: Callable[[Tensor], Tensor]) -> EncodedSource:
        parts = [None if x is None else some(x) for x in self[1:]]
        return EncodedSource(tuple(map(some, self.contexts)), *parts)  # type: ignore[arg-type]


class SlotInputs(NamedTuple):
    """Slots before anything is said. The real ones of a row stand in front."""

    x: Tensor  # (b m w)
    valid: Tensor | None  # (b m)

    def at(self, rows: slice) -> SlotInputs:
        return SlotInputs(self.x[rows], None if self.valid is None else self.valid[rows])


def left_aligned(x: Tensor, valid: Tensor | None) -> Tensor:
    """x (b n) or (b n w) with the real ones of each row in front, in their order."""
    order = None if valid is None else unpad_order(valid)
    if order is None:
        return x
    return x.gather(1, order.there if x.dim() == 2 else order.there[..., None].expand_as(x))


class SlotMaker(nn.Module):
    """How many slots there are, and what stands in them at first."""

    name: str  # as in `SLOT_KINDS`

    copies = False  # whether it needs the source's own vectors
    begins = False  # whether every slot holds the BEGIN token, which the model's table has

    def longest(self, n: int) -> int:
        """The most slots for sources of up to n vectors."""
        return n

    def forward(self, read: EncodedSource, m: int | None = None, valid: Tensor | None = None) -> SlotInputs:
        """`m` slots, of which `valid` (b m) are real, where slots do not know that themselves."""
        raise NotImplementedError

    def _knows(self, m: int | None, valid: Tensor | None) -> None:
        if m is not None or valid is not None:
            raise ValueError(f"{self.name} knows how many slots it has: leave out m and valid")


class FixedSlots(SlotMaker):
    """Always `count` slots (max_len unless given), each with a learned vector; an answer ends in front of its first END.

    p(y) = prod_i p_i(y_i), the end among them: what slots behind it say is neither learned nor heard.
    """

    name = "fixed"

    def __init__(self, dims: Dims, *, count: int | None = None) -> None:
        super().__init__()
        count = needed_length("fixed", dims) if count is None else need("count", count)
        self.vectors = nn.Parameter(torch.randn(count, dims.width))

    def longest(self, n: int) -> int:  # noqa: ARG002
        return len(self.vectors)

    def forward(self, read: EncodedSource, m: int | None = None, valid: Tensor | None = None) -> SlotInputs:
        self._knows(m, valid)
        return SlotInputs(self.vectors.to(read.x.dtype).expand(len(read.x), -1, -1), None)


class CtcSlots(SlotMaker):
    """`upsample` slots from every encoded vector, by a linear map each. An answer is what is left when tokens said in a row are
    taken as one and blanks are removed, and its probability is summed over all ways to say it:

    p(y) = sum over paths that collapse to y of prod_i p_i(path_i). Graves et al. 2006; Libovicky & Helcl 2018, arXiv:1811.04719.
    """

    name = "ctc"

    def __init__(self, dims: Dims, *, upsample: int = 3) -> None:
        super().__init__()
        self.upsample = need("upsample", upsample)
        self.split = nn.Linear(dims.width, upsample * dims.width)

    def longest(self, n: int) -> int:
        return self.upsample * n

    def forward(self, read: EncodedSource, m: int | None = None, valid: Tensor | None = None) -> SlotInputs:
        self._knows(m, valid)
        x = left_aligned(read.x, read.valid)
        b, n, w = x.shape
        y = self.split(x).view(b, n * self.upsample, w)
        if read.valid is None:
            return SlotInputs(y, None)
        return SlotInputs(y, torch.arange(y.shape[1], device=y.device) < self.upsample * read.valid.sum(1, keepdim=True))


class LengthSlots(SlotMaker):
    """As many slots as the answer has tokens, its end among them: p(y) = p(m) prod_i p_i(y_i | m). Gu et al., arXiv:1711.02281.

    copy="uniform": slot i holds the source vector at n (i + 1/2) / m. "soft": a mean of all of them by softmax(-|distance from
    there|), after Wei et al. 2019, arXiv:1906.02041. "none": one learned vector for all slots. "begin": the embedding of BEGIN in
    all slots, a row of as many BEGIN tokens as the answer is long. `reach` is that of the length.
    """

    name = "length"

    def __init__(self, dims: Dims, *, copy: str = "soft", reach: int = 32) -> None:
        super().__init__()
        if copy not in COPIES:
            raise ValueError(unknown("slots cannot be filled by", copy, COPIES))
        self.copy, self.copies, self.begins = copy, copy in ("soft", "uniform"), copy == "begin"
        self.lengths = LengthPredictor(dims.width, reach=reach, most=dims.max_len)
        self.empty = nn.Parameter(torch.randn(dims.width)) if copy == "none" else None

    def forward(self, read: EncodedSource, m: int | None = None, valid: Tensor | None = None) -> SlotInputs:
        if m is None:
            raise ValueError(f"{self.name} must be told how many slots there are: m, and which are real")
        if self.begins:  # `Parallel.seats` puts the token in
            return SlotInputs(read.x.new_zeros(()).expand(len(read.x), m, read.x.shape[2]), valid)
        if self.empty is not None:
            return SlotInputs(self.empty.to(read.x.dtype).expand(len(read.x), m, -1), valid)
        assert read.vectors is not None
        x = left_aligned(read.vectors, read.vectors_valid)
        have = length_targets(x, read.vectors_valid)[:, None]  # (b 1)
        want = m if valid is None else valid.sum(1, keepdim=True).clamp_min(1)
        twice = 2 * torch.arange(m, device=x.device) + 1
        if self.copy == "uniform":
            at = (twice * have // (2 * want)).clamp_max(x.shape[1] - 1)
            return SlotInputs(x.gather(1, at[..., None].expand(-1, -1, x.shape[2])), valid)
        places = torch.arange(x.shape[1], device=x.device)
        far = (places - (twice * have / (2 * want) - 0.5)[..., None]).abs()
        near = (-far).masked_fill(places >= have[..., None], -torch.inf).softmax(-1)
        near = near.masked_fill(have[..., None] == 0, 0)  # nothing to copy
        return SlotInputs(near.to(x.dtype) @ x, valid)


class MaskedSlots(LengthSlots):
    """Slots that are all alike; it learns to fill those that are empty from those that are not.

    p(y) = p(m) prod over hidden i of p_i(y_i | the others, m). Ghazvininejad et al. 2019, arXiv:1904.09324. The learned vector of
    an empty slot is the paper's mask token.
    """

    name = "masked"

    def __init__(self, dims: Dims, *, reach: int = 32) -> None:
        super().__init__(dims, copy="none", reach=reach)


SLOT_KINDS: dict[str, Callable[..., SlotMaker]] = {
    "ctc": CtcSlots,
    "length": LengthSlots,
    "masked": MaskedSlots,
    "fixed": FixedSlots,
}


class NatTranslator(nn.Module):
    """Encoder and decoder, all slots at once: `model(source, source_valid)` gives scores (b m v) and which slots are real (b m).

    `hear` reads, `seats` lays out the slots, `answer` gives their scores, with tokens in some of them if one wishes.
    """

    def __init__(
        self, encoder: Encoder, embed: Embedding, decoder: Stack, head: nn.Module, slots: SlotMaker, *, wiring: str = "last"
    ) -> None:
        super().__init__()
        if not decoder.reads:
            raise ValueError("a decoder must read the encoder: build its stack with cross=...")
        if any(block.mixer.dims.causal for block in decoder):
            raise ValueError("slots are filled at once and see each other: the decoder's stack is not causal")
        if decoder.rate > 1:
            raise ValueError("every slot needs an answer: use a decoder whose mixers answer every token")
        self.encoder, self.embed, self.decoder, self.head, self.slots = encoder, embed, decoder, head, slots
        self.wires = CrossWiring(wiring, encoder.stack, decoder, encoder.width)

    def hear(self, source: Tensor, source_valid: Tensor | None = None) -> EncodedSource:
        """The source, read once."""
        read = self.encoder(source, source_valid, layers=self.wires.norms is not None)
        contexts = self.wires(read)
        embed, vectors = self.encoder.embed, None
        if self.slots.copies:
            vectors = mask_padding(embed.vectors(embed.unpadded(source, source_valid)), source_valid)
        return EncodedSource(contexts, read.x, read.valid, vectors, source_valid if self.slots.copies else None)

    def guess(self, read: EncodedSource, k: int = 1) -> tuple[Tensor, Tensor]:
        """The k likeliest lengths (b k), the end counted, and their log-probabilities, for slots that wait to be counted."""
        if not isinstance(self.slots, LengthSlots):
            raise ValueError(f"{self.slots.name} has no length to guess: it knows how many slots it has")
        return self.slots.lengths.best(read.x, read.valid, k)

    def seats(self, read: EncodedSource, m: int | None = None, valid: Tensor | None = None) -> SlotInputs:
        found: SlotInputs = self.slots(read, m, valid)
        if not self.slots.begins:
            return found
        begin = self.embed.vectors(torch.full((1, 1), BEGIN, device=found.x.device))
        return found._replace(x=begin.expand_as(found.x))

    def answer(self, read: EncodedSource, seats: SlotInputs, filled: Tensor | None = None, shown: Tensor | None = None) -> Tensor:
        """Scores of every slot (b m v). Where `shown` (b m), the slot holds the token `filled` (b m) to begin with."""
        x, valid = seats.x.to(read.x.dtype), seats.valid  # under autocast, what blocks add to stays as wide as an embedding is
        if filled is not None and shown is not None:
            x = torch.where(shown[..., None], self.embed.vectors(filled).to(x.dtype), x)
        if self.embed.positions is not None:
            x = self.embed.positions.add(x, Places.of(x))  # real slots stand in front: places are those of the columns
        x = mask_padding(self.embed.drop(x if self.embed.norm is None else self.embed.norm(x)), valid)
        return self.head(self.decoder(x, valid, context=read.contexts, context_valid=read.valid))

    def forward(self, source: Tensor, source_valid: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        read = self.hear(source, source_valid)
        room = slots_for(self.guess(read)[0][:, 0]) if isinstance(self.slots, LengthSlots) else ()
        seats = self.seats(read, *room)
        return self.answer(read, seats), seats.valid


def slots_for(lengths: Tensor, most: int | None = None) -> tuple[int, Tensor | None]:
    """How many slots rows of these lengths (b) need, and which are real; the one place where the host must know a length.

    With `most` slots, which must be enough, it need not.
    """
    m = most if most is not None else int(lengths.max()) if lengths.numel() else 0
    return m, None if len(lengths) == 1 and most is None else torch.arange(m, device=lengths.device) < lengths[:, None]


def nat_translator(
    config: Config, vocab: int, target_vocab: int | None = None, *, kind: str = "ctc", upsample: int = 3
) -> NatTranslator:
    """Built as `translator` is, from one configuration; `kind` is a text: "ctc", "length(copy='uniform')", "fixed(count=64)".

    `upsample` is that of a ctc which does not say so itself. With one vocabulary for both sides, `config.share` makes one table
    of it for source, slots and output.
    """
    makers: dict[str, Callable[..., SlotMaker]] = {**SLOT_KINDS, "ctc": partial(CtcSlots, upsample=upsample)}
    slots = parse_choice(kind, makers)(Dims(config.width, config.heads, max_len=config.max_len))
    wider = replace(config, max_len=max(config.max_len, slots.longest(config.max_len)))
    source, target = tokens(config, vocab), tokens(wider, vocab if target_vocab is None else target_vocab)
    if config.share and target_vocab is None:
        target.table = source.table
    head = NextToken(config.width, target.vocab, table=target.table if config.share else None)
    body = glorot(stack(wider, reads=True))
    return NatTranslator(make_encoder(config, source), target, body, head, slots, wiring=config.wiring)
