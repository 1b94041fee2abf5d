"""Sequence to sequence with words taken from the source: what the vocabulary does not have can still be said.

Letters: b batch, h heads, n source tokens, m target tokens, w width, v vocabulary, o words that only sources of this batch have.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.blocks.stack import Stack
from regard.config import Config
from regard.mixers.attention import no_autocast
from regard.mixers.base import State
from regard.mixers.feature_math import upcast
from regard.models.build import translator
from regard.models.embedding import Embedding
from regard.models.encoder import Encoder
from regard.models.pointer import PointerState, check_each
from regard.models.translator import SourceMemory, Translator

LOG_ZERO = -1e30  # a log-probability of nothing that sums and gradients survive; -inf would make NaN of them


class CopySource(NamedTuple):
    """What can be copied."""

    keys: Tensor  # (b h n d)
    lean: Tensor  # (b n): how much looking at a token speaks for the vocabulary
    words: Tensor  # (b n): extended ids
    real: Tensor  # (b n)
    own: Tensor  # (b o): which of the ids behind the vocabulary a source has

    @property
    def any(self) -> Tensor:
        return self.real.any(1)


class GeneratorState(NamedTuple):
    """Two ways to say a word, each in logs: from the vocabulary with probability p_gen, or from the source."""

    speak: Tensor  # (b m): log p_gen
    copy: Tensor  # (b m): log(1 - p_gen)
    words: Tensor  # (b m v): scores of the vocabulary
    look: Tensor  # (b m n): log of where it looks, summing to 1 over real tokens; NEVER at padding


class PointerGenerator(Translator):
    """A translator that can copy. See, Liu, Manning 2017, arXiv:1704.04368.

    p(w) = p_gen softmax(head(y))_w + (1 - p_gen) sum_{j: source_j = w} a_j,  p_gen = sigmoid(u.y + sum_j a_j g.x_j)

    y is the decoder's last hidden vector, x_j what the encoder made of token j, and a_j an attention of its own from y to x, the
    mean of `heads` softmaxes: so it works with every mixer. Words run over the extended vocabulary: `source_extended` (b n) has
    ids from v on for words that the vocabulary lacks, counted anew in every source. Scores are log-probabilities (b m v + o);
    an id that a source does not have has -inf. An extended id is embedded as the word `unknown`.
    """

    def __init__(
        self,
        encoder: Encoder,
        embed: Embedding,
        decoder: Stack,
        head: nn.Module,
        *,
        vocab: int,
        wiring: str = "last",
        heads: int = 1,
        unknown: int = 1,
    ) -> None:
        super().__init__(encoder, embed, decoder, head, wiring=wiring)
        check_each(encoder, "copies")
        self.vocab, self.unknown = vocab, unknown
        self.point = PointerState(encoder.width, heads)
        self.gate, self.lean = nn.Linear(encoder.width, 1), nn.Linear(encoder.width, 1, bias=False)

    def forward(
        self,
        source: Tensor,
        source_valid: Tensor | None,
        target: Tensor,
        target_valid: Tensor | None = None,
        source_extended: Tensor | None = None,
    ) -> Tensor:
        """Without `source_extended` only words of the vocabulary are copied."""
        heard = self.hear(source, source_valid)
        copied = self._copied(heard, source_extended, source)
        return self._scores(self._said(self.hidden(heard, target, target_valid), copied), copied)

    def likelihood(
        self,
        source: Tensor,
        source_valid: Tensor | None,
        target: Tensor,
        target_valid: Tensor | None,
        source_extended: Tensor | None,
        answer: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of `answer` (b m), extended ids, and the weights of the pointer (b m n).

        It is `forward` at the answer, without ever making (b m v + o): what training needs.
        """
        heard = self.hear(source, source_valid)
        copied = self._copied(heard, source_extended, source, count=False)
        said = self._said(self.hidden(heard, target, target_valid), copied)
        known = answer < self.vocab
        spoken = -F.cross_entropy(upcast(said.words).mT, answer.masked_fill(~known, self.unknown), reduction="none")
        same = (answer[..., None] == copied.words[:, None]) & copied.real[:, None]  # (b m n)
        found = same.any(-1)
        mass = said.look.masked_fill(~same & found[..., None], -torch.inf).logsumexp(-1)
        spoken = torch.where(known, said.speak + spoken, LOG_ZERO)
        logs = torch.logaddexp(spoken, torch.where(found, said.copy + mass, LOG_ZERO))
        return logs, said.look.exp()

    def hidden(self, heard: SourceMemory, target: Tensor, target_valid: Tensor | None = None) -> Tensor:
        return super().hidden(heard, self._known(target), target_valid)

    def start(self, source: Tensor, source_valid: Tensor | None = None, source_extended: Tensor | None = None) -> State:
        heard = self.hear(source, source_valid)
        state = self.decoder.start(context=heard.contexts, context_valid=heard.places)
        copied = self._copied(heard, source_extended, source)
        return State((state, copied), state.t, state.start)

    def extend(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        before, copied = state.memory
        known = self._known(tokens)
        places = self.embed.places(known, valid, state)
        y, after = self.decoder.extend(before, self.embed(known, places), places)
        return self._scores(self._said(y, copied), copied), State((after, copied), after.t, after.start)

    def _known(self, tokens: Tensor) -> Tensor:
        return tokens.masked_fill(tokens >= self.vocab, self.unknown)

    def _copied(self, heard: SourceMemory, words: Tensor | None, source: Tensor, *, count: bool = True) -> CopySource:
        """`count` how many words only the sources have: that waits for the device, and is for scores of all words alone."""
        x, words = heard.contexts[-1], source if words is None else words
        if words.shape != x.shape[:2] or words.is_floating_point():
            raise ValueError(
                f"source_extended has shape {tuple(words.shape)}, {words.dtype}: ids of shape {tuple(x.shape[:2])} are needed"
            )
        real = torch.ones_like(words, dtype=torch.bool) if heard.valid is None else heard.valid
        words = words.masked_fill(~real, 0)
        new = max(int(words.max()) + 1 - self.vocab, 0) if count and words.numel() else 0
        own = (words[..., None] == torch.arange(self.vocab, self.vocab + new, device=words.device)).any(1)
        return CopySource(self.point.keys(x), self.lean(x).squeeze(-1), words, real, own)

    def _said(self, y: Tensor, copied: CopySource) -> GeneratorState:
        real = copied.real[:, None, None]
        logs = self.point(y, copied.keys).masked_fill(~real, LOG_ZERO).log_softmax(-1)
        look = logs.logsumexp(1) - math.log(self.point.heads)  # the mean over heads
        look = look.masked_fill(~real[:, 0], LOG_ZERO)
        gate = upcast(self.gate(y)).squeeze(-1)
        with no_autocast(look):
            lean = gate + torch.einsum("bmn,bn->bm", look.exp(), upcast(copied.lean))
        nothing = ~copied.any[:, None]
        return GeneratorState(
            F.logsigmoid(lean).masked_fill(nothing, 0), F.logsigmoid(-lean).masked_fill(nothing, LOG_ZERO), self.head(y), look
        )

    def _scores(self, said: GeneratorState, copied: CopySource) -> Tensor:
        """The definition, all words at once: masses are summed as probabilities, then both ways to say a word as logs."""
        (b, m, _), o = said.words.shape, copied.own.shape[1]
        spoken = said.speak[..., None] + upcast(said.words).log_softmax(-1)
        spoken = F.pad(spoken, (0, o), value=LOG_ZERO)
        mass = spoken.new_zeros(b, m, self.vocab + o)
        mass = mass.scatter_add(2, copied.words[:, None].expand(-1, m, -1), said.look.exp())
        tiny = torch.finfo(mass.dtype).tiny
        here = mass >= tiny
        taken = torch.where(here, said.copy[..., None] + mass.where(here, 1.0).log(), LOG_ZERO)
        logs = torch.logaddexp(spoken, taken)
        lost = F.pad(~copied.own, (self.vocab, 0))[:, None]
        return logs.masked_fill(lost, -torch.inf)


def coverage(weights: Tensor, valid: Tensor | None = None) -> Tensor:
    """The coverage loss of the same paper, summed over real steps: sum_t sum_j min(a_tj, sum_{s < t} a_sj), weights (b m n).

    What has been looked at is not to be looked at again. Only the loss: the pointer itself is not told, so steps need not wait.
    """
    if valid is not None:
        weights = weights.masked_fill(~valid[..., None], 0)
    return torch.minimum(weights, weights.cumsum(1) - weights).sum()


def pointer_generator(config: Config, vocab: int, *, heads: int = 1) -> PointerGenerator:
    """The translator that a configuration describes, one vocabulary for both sides, with a pointer of so many heads."""
    made = translator(config, vocab)
    return PointerGenerator(made.encoder, made.embed, made.decoder, made.head, vocab=vocab, wiring=config.wiring, heads=heads)
