"""Non-autoregressive sequence to sequence: all tokens of an output are predicted at once, each from a slot of its own.

A decoder that is not causal returns scores for every slot. The kinds differ in their slots:

    ctc       several for every encoded vector; slots may be left blank, and a token may fill several
    length    as many as the predicted length, each a copy of the source near it, or all of them BEGIN tokens
    masked    as many, all alike and empty; some are filled, the others are predicted, repeatedly
    fixed     always the same number; slots behind the end are ignored

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

BLANK = 0  # no token: the id of padding, which no output contains
COPIES = ("soft", "uniform", "none", "begin")


class EncodedSource(NamedTuple):
    """The encoded source: the contexts of the decoder's blocks, and the vectors that slots are made of."""

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
    """Vectors of the slots at the decoder's input. The real ones of a row come first."""

    x: Tensor  # (b m w)
    valid: Tensor | None  # (b m)

    def at(self, rows: slice) -> SlotInputs:
        valid = None if self.valid is None else self.valid[rows]
        return SlotInputs(self.x[rows], valid)


def left_aligned(x: Tensor, valid: Tensor | None) -> Tensor:
    """Move the real ones of each row of x (b n) or (b n w) to the front, in their order."""
    order = None if valid is None else unpad_order(valid)
    if order is None:
        return x
    index = order.there
    if x.dim() == 3:
        index = index[..., None].expand_as(x)
    return x.gather(1, index)


class SlotMaker(nn.Module):
    """Base class of slots: their number, and their vectors at the decoder's input."""

    name: str  # as in `SLOT_KINDS`

    copies = False  # whether it needs the source's own vectors
    begins = False  # whether every slot holds the BEGIN token, which the model's table has

    def longest(self, n: int) -> int:
        """Return the largest number of slots for sources of up to n vectors."""
        return n

    def forward(self, read: EncodedSource, m: int | None = None, valid: Tensor | None = None) -> SlotInputs:
        """Return `m` slots, of which `valid` (b m) are real; kinds that determine both themselves refuse the arguments."""
        raise NotImplementedError

    def _refuse_count(self, m: int | None, valid: Tensor | None) -> None:
        if m is not None or valid is not None:
            raise ValueError(f"{self.name} knows how many slots it has: leave out m and valid")


class FixedSlots(SlotMaker):
    """Always `count` slots (max_len unless given), each with a learned vector; an output ends in front of its first END.

    p(y) = prod_i p_i(y_i), the end among them: slots behind it are neither trained nor read.
    """

    name = "fixed"

    def __init__(self, dims: Dims, *, count: int | None = None) -> None:
        super().__init__()
        count = needed_length("fixed", dims) if count is None else need("count", count)
        self.vectors = nn.Parameter(torch.randn(count, dims.width))

    def longest(self, n: int) -> int:  # noqa: ARG002
        return len(self.vectors)

    def forward(self, read: EncodedSource, m: int | None = None, valid: Tensor | None = None) -> SlotInputs:
        self._refuse_count(m, valid)
        vectors = self.vectors.to(read.x.dtype)
        return SlotInputs(vectors.expand(len(read.x), -1, -1), None)


class CtcSlots(SlotMaker):
    """`upsample` slots from every encoded vector, by a linear map each. A path over slots collapses to an output by merging
    repeated tokens and removing blanks; the probability of an output is summed over its paths:

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
        self._refuse_count(m, valid)
        x = left_aligned(read.x, read.valid)
        b, n, w = x.shape
        y = self.split(x).view(b, n * self.upsample, w)
        if read.valid is None:
            return SlotInputs(y, None)
        count = self.upsample * read.valid.sum(1, keepdim=True)
        valid = torch.arange(y.shape[1], device=y.device) < count
        return SlotInputs(y, valid)


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
        self.copy = copy
        self.copies = copy in ("soft", "uniform")
        self.begins = copy == "begin"
        self.lengths = LengthPredictor(dims.width, reach=reach, most=dims.max_len)
        self.empty = None
        if copy == "none":
            self.empty = nn.Parameter(torch.randn(dims.width))

    def forward(self, read: EncodedSource, m: int | None = None, valid: Tensor | None = None) -> SlotInputs:
        if m is None:
            raise ValueError(f"{self.name} must be told how many slots there are: m, and which are real")
        b, _, w = read.x.shape
        if self.begins:  # `NatTranslator.slot_inputs` adds the token
            zero = read.x.new_zeros(())
            return SlotInputs(zero.expand(b, m, w), valid)
        if self.empty is not None:
            empty = self.empty.to(read.x.dtype)
            return SlotInputs(empty.expand(b, m, -1), valid)
        return SlotInputs(self._copied(read, m, valid), valid)

    def _copied(self, read: EncodedSource, m: int, valid: Tensor | None) -> Tensor:
        """Copy source vectors into m slots, (b m w)."""
        assert read.vectors is not None
        x = left_aligned(read.vectors, read.vectors_valid)
        n = x.shape[1]
        length = length_targets(x, read.vectors_valid)[:, None]  # (b 1)
        slots = m if valid is None else valid.sum(1, keepdim=True).clamp_min(1)
        twice = 2 * torch.arange(m, device=x.device) + 1
        scaled = twice * length
        if self.copy == "uniform":
            at = scaled // (2 * slots)
            at = at.clamp_max(n - 1)
            index = at[..., None].expand(-1, -1, x.shape[2])
            return x.gather(1, index)
        centre = scaled / (2 * slots) - 0.5
        places = torch.arange(n, device=x.device)
        distance = (places - centre[..., None]).abs()
        padding = places >= length[..., None]
        weights = (-distance).masked_fill(padding, -torch.inf).softmax(-1)
        nothing = length[..., None] == 0
        weights = weights.masked_fill(nothing, 0)
        return weights.to(x.dtype) @ x


class MaskedSlots(LengthSlots):
    """Slots that are all alike: tokens of empty ones are predicted from those of filled ones.

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
    """Encoder and decoder, all slots at once: `model(source, source_valid)` returns scores (b m v) and the mask of slots (b m).

    `encode` encodes the source, `slot_inputs` makes the slots, `answer` returns their scores, optionally with tokens in some.

    `encoder` encodes the source, `embed` makes vectors of tokens in slots, `decoder` reads the source and is not causal, `head`
    makes scores, `slots` makes the slots, `wiring` is that of `Translator`. `nat_translator` builds one from a configuration.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models.nat import nat_translator
    >>> model = nat_translator(Config(width=16, heads=2, depth=1, ffn=32), vocab=20, kind="ctc")
    >>> scores, valid = model(torch.randint(1, 20, (2, 5)), None)
    >>> len(scores), scores.shape[-1]
    (2, 20)
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
        self.encoder = encoder
        self.embed = embed
        self.decoder = decoder
        self.head = head
        self.slots = slots
        self.wiring = CrossWiring(wiring, encoder.stack, decoder, encoder.width)

    def encode(self, source: Tensor, source_valid: Tensor | None = None) -> EncodedSource:
        """Encode the source (b n), once for all passes of the decoder."""
        read = self.encoder(source, source_valid, layers=self.wiring.norms is not None)
        contexts = self.wiring(read)
        if not self.slots.copies:
            return EncodedSource(contexts, read.x, read.valid, None, None)
        embed = self.encoder.embed
        tokens = embed.unpadded(source, source_valid)
        vectors = mask_padding(embed.vectors(tokens), source_valid)
        return EncodedSource(contexts, read.x, read.valid, vectors, source_valid)

    def guess(self, read: EncodedSource, k: int = 1) -> tuple[Tensor, Tensor]:
        """Return the k likeliest lengths (b k), the end counted, and their log-probabilities, for slots of predicted number."""
        if not isinstance(self.slots, LengthSlots):
            raise ValueError(f"{self.slots.name} has no length to guess: it knows how many slots it has")
        return self.slots.lengths.best(read.x, read.valid, k)

    def slot_inputs(self, read: EncodedSource, m: int | None = None, valid: Tensor | None = None) -> SlotInputs:
        """Return the vectors of `m` slots, of which `valid` (b m) are real, where the kind does not determine both."""
        found: SlotInputs = self.slots(read, m, valid)
        if not self.slots.begins:
            return found
        token = torch.full((1, 1), BEGIN, device=found.x.device)
        begin = self.embed.vectors(token)
        return found._replace(x=begin.expand_as(found.x))

    def answer(self, read: EncodedSource, slots: SlotInputs, filled: Tensor | None = None, shown: Tensor | None = None) -> Tensor:
        """Return scores of every slot (b m v). Where `shown` (b m), the slot holds the token `filled` (b m) instead."""
        embed = self.embed
        valid = slots.valid
        x = slots.x.to(read.x.dtype)  # under autocast, the residual stream keeps the width of an embedding
        if filled is not None and shown is not None:
            vectors = embed.vectors(filled).to(x.dtype)
            x = torch.where(shown[..., None], vectors, x)
        if embed.positions is not None:
            x = embed.positions.add(x, Places.of(x))  # real slots come first: places are those of the columns
        if embed.norm is not None:
            x = embed.norm(x)
        x = mask_padding(embed.drop(x), valid)
        y = self.decoder(x, valid, context=read.contexts, context_valid=read.valid)
        return self.head(y)

    def forward(self, source: Tensor, source_valid: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        read = self.encode(source, source_valid)
        m, valid = None, None
        if isinstance(self.slots, LengthSlots):
            lengths, _ = self.guess(read)
            m, valid = slots_for(lengths[:, 0])
        slots = self.slot_inputs(read, m, valid)
        return self.answer(read, slots), slots.valid


def slots_for(lengths: Tensor, most: int | None = None) -> tuple[int, Tensor | None]:
    """Return the number of slots for rows of these lengths (b), and a mask of real ones; the only copy of a length to the host.

    With `most` slots, which must be enough, nothing is copied.
    """
    m = most
    if m is None:
        m = int(lengths.max()) if lengths.numel() else 0
        if len(lengths) == 1:
            return m, None
    slots = torch.arange(m, device=lengths.device)
    return m, slots < lengths[:, None]


def nat_translator(
    config: Config, vocab: int, target_vocab: int | None = None, *, kind: str = "ctc", upsample: int = 3
) -> NatTranslator:
    """Build the model of a configuration, as `translator` does; `kind` is "ctc", "length(copy='uniform')", "fixed(count=64)", ...

    `upsample` is that of a ctc whose text has none. With one vocabulary for both sides, `config.share` makes one table of it for
    source, slots and output.
    """
    makers: dict[str, Callable[..., SlotMaker]] = {**SLOT_KINDS, "ctc": partial(CtcSlots, upsample=upsample)}
    dims = Dims(config.width, config.heads, max_len=config.max_len)
    slots = parse_choice(kind, makers)(dims)
    max_len = max(config.max_len, slots.longest(config.max_len))
    wider = replace(config, max_len=max_len)
    source = tokens(config, vocab)
    target = tokens(wider, vocab if target_vocab is None else target_vocab)
    if config.share and target_vocab is None:
        target.table = source.table
    head = NextToken(config.width, target.vocab, table=target.table if config.share else None)
    body = glorot(stack(wider, reads=True))
    encoder = make_encoder(config, source)
    return NatTranslator(encoder, target, body, head, slots, wiring=config.wiring)
