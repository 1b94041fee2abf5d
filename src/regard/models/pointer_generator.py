"""Pointer-generator: sequence to sequence that can copy words of the source which the vocabulary lacks.

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
    """The source tokens that can be copied."""

    keys: Tensor  # (b h n d)
    lean: Tensor  # (b n): contribution of attention to a token to the logit of p_gen
    words: Tensor  # (b n): extended ids
    real: Tensor  # (b n)
    own: Tensor  # (b o): which of the ids behind the vocabulary a source has

    @property
    def any(self) -> Tensor:
        return self.real.any(1)


class GeneratorState(NamedTuple):
    """Two sources of a word, each in logs: the vocabulary with probability p_gen, or the source tokens."""

    generate: Tensor  # (b m): log p_gen
    copy: Tensor  # (b m): log(1 - p_gen)
    words: Tensor  # (b m v): scores of the vocabulary
    attention: Tensor  # (b m n): log of the pointer's weights, which sum to 1 over real tokens; LOG_ZERO at padding


class PointerGenerator(Translator):
    """A translator that can copy. See, Liu, Manning 2017, arXiv:1704.04368.

    p(w) = p_gen softmax(head(y))_w + (1 - p_gen) sum_{j: source_j = w} a_j,  p_gen = sigmoid(u.y + sum_j a_j g.x_j)

    y is the decoder's last hidden vector, x_j what the encoder made of token j, and a_j an attention of its own from y to x, the
    mean of `heads` softmaxes: so it works with every mixer. Words run over the extended vocabulary: `source_extended` (b n) has
    ids from v on for words that the vocabulary lacks, counted anew in every source. Scores are log-probabilities (b m v + o);
    an id that a source does not have has -inf. An extended id is embedded as the word `unknown`.

    `encoder`, `embed`, `decoder`, `head` and `wiring` are those of `Translator`; `vocab` is v. `pointer_generator` builds one.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import pointer_generator
    >>> model = pointer_generator(Config(width=16, heads=2, depth=1, ffn=32), vocab=20)
    >>> source, target = torch.randint(1, 20, (2, 5)), torch.randint(1, 20, (2, 7))
    >>> torch.allclose(model(source, None, target).exp().sum(-1), torch.ones(2, 7), atol=1e-5)
    True
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
        self.vocab = vocab
        self.unknown = unknown
        self.point = PointerState(encoder.width, heads)
        self.gate = nn.Linear(encoder.width, 1)
        self.lean = nn.Linear(encoder.width, 1, bias=False)

    def forward(
        self,
        source: Tensor,
        source_valid: Tensor | None,
        target: Tensor,
        target_valid: Tensor | None = None,
        source_extended: Tensor | None = None,
    ) -> Tensor:
        """Return log-probabilities (b m v + o). Without `source_extended` only words of the vocabulary are copied."""
        memory = self.encode(source, source_valid)
        copied = self._copied(memory, source_extended, source)
        y = self.hidden(memory, target, target_valid)
        mixture = self._mixture(y, copied)
        return self._scores(mixture, copied)

    def likelihood(
        self,
        source: Tensor,
        source_valid: Tensor | None,
        target: Tensor,
        target_valid: Tensor | None,
        source_extended: Tensor | None,
        answer: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of `answer` (b m), extended ids, and the weights of the pointer (b m n).

        Equals `forward` at the answer, without the tensor (b m v + o): for training.
        """
        memory = self.encode(source, source_valid)
        copied = self._copied(memory, source_extended, source, count=False)
        y = self.hidden(memory, target, target_valid)
        mixture = self._mixture(y, copied)
        known = answer < self.vocab
        ids = answer.masked_fill(~known, self.unknown)
        generated = -F.cross_entropy(upcast(mixture.words).mT, ids, reduction="none")
        same = answer[..., None] == copied.words[:, None]
        same = same & copied.real[:, None]  # (b m n)
        found = same.any(-1)
        other = ~same & found[..., None]
        mass = mixture.attention.masked_fill(other, -torch.inf).logsumexp(-1)
        generated = torch.where(known, mixture.generate + generated, LOG_ZERO)
        taken = torch.where(found, mixture.copy + mass, LOG_ZERO)
        logs = torch.logaddexp(generated, taken)
        return logs, mixture.attention.exp()

    def hidden(self, memory: SourceMemory, target: Tensor, target_valid: Tensor | None = None) -> Tensor:
        known = self._known(target)
        return super().hidden(memory, known, target_valid)

    def start(self, source: Tensor, source_valid: Tensor | None = None, source_extended: Tensor | None = None) -> State:
        memory = self.encode(source, source_valid)
        state = self.decoder.start(context=memory.contexts, context_valid=memory.places)
        copied = self._copied(memory, source_extended, source)
        return State((state, copied), state.t, state.start)

    def extend(self, state: State, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        before, copied = state.memory
        known = self._known(tokens)
        places = self.embed.places(known, valid, state)
        x = self.embed(known, places)
        y, after = self.decoder.extend(before, x, places)
        mixture = self._mixture(y, copied)
        return self._scores(mixture, copied), State((after, copied), after.t, after.start)

    def _known(self, tokens: Tensor) -> Tensor:
        extended = tokens >= self.vocab
        return tokens.masked_fill(extended, self.unknown)

    def _copied(self, memory: SourceMemory, words: Tensor | None, source: Tensor, *, count: bool = True) -> CopySource:
        """Return what can be copied. `count` the words that only sources have, which synchronizes, for scores of all words."""
        x = memory.contexts[-1]
        if words is None:
            words = source
        if words.shape != x.shape[:2] or words.is_floating_point():
            raise ValueError(
                f"source_extended has shape {tuple(words.shape)}, {words.dtype}: ids of shape {tuple(x.shape[:2])} are needed"
            )
        real = torch.ones_like(words, dtype=torch.bool) if memory.valid is None else memory.valid
        words = words.masked_fill(~real, 0)
        new = self._extended(words) if count else 0
        ids = torch.arange(self.vocab, self.vocab + new, device=words.device)
        own = (words[..., None] == ids).any(1)
        keys = self.point.keys(x)
        lean = self.lean(x).squeeze(-1)
        return CopySource(keys, lean, words, real, own)

    def _extended(self, words: Tensor) -> int:
        """Count the ids behind the vocabulary up to the highest one in use."""
        if not words.numel():
            return 0
        highest = int(words.max())
        return max(highest + 1 - self.vocab, 0)

    def _mixture(self, y: Tensor, copied: CopySource) -> GeneratorState:
        """Return both parts of the mixture for the decoder's outputs y (b m w)."""
        real = copied.real[:, None, None]
        scores = self.point(y, copied.keys)
        logs = scores.masked_fill(~real, LOG_ZERO).log_softmax(-1)
        attention = logs.logsumexp(1) - math.log(self.point.heads)  # the mean over heads
        attention = attention.masked_fill(~real[:, 0], LOG_ZERO)
        gate = upcast(self.gate(y)).squeeze(-1)
        with no_autocast(attention):
            lean = gate + torch.einsum("bmn,bn->bm", attention.exp(), upcast(copied.lean))
        nothing = ~copied.any[:, None]
        generate = F.logsigmoid(lean).masked_fill(nothing, 0)
        copy = F.logsigmoid(-lean).masked_fill(nothing, LOG_ZERO)
        words = self.head(y)
        return GeneratorState(generate, copy, words, attention)

    def _scores(self, mixture: GeneratorState, copied: CopySource) -> Tensor:
        """Compute the definition for all words: masses are summed as probabilities, then the two parts of the mixture as logs."""
        b, m, _ = mixture.words.shape
        o = copied.own.shape[1]
        generated = mixture.generate[..., None] + upcast(mixture.words).log_softmax(-1)
        generated = F.pad(generated, (0, o), value=LOG_ZERO)
        mass = generated.new_zeros(b, m, self.vocab + o)
        ids = copied.words[:, None].expand(-1, m, -1)
        mass = mass.scatter_add(2, ids, mixture.attention.exp())
        tiny = torch.finfo(mass.dtype).tiny
        here = mass >= tiny
        taken = mixture.copy[..., None] + mass.where(here, 1.0).log()
        taken = torch.where(here, taken, LOG_ZERO)
        logs = torch.logaddexp(generated, taken)
        absent = F.pad(~copied.own, (self.vocab, 0))[:, None]
        return logs.masked_fill(absent, -torch.inf)


def coverage(weights: Tensor, valid: Tensor | None = None) -> Tensor:
    """Sum the coverage loss of the same paper over real steps: sum_t sum_j min(a_tj, sum_{s < t} a_sj), weights (b m n).

    It penalizes repeated attention to a token. Only the loss: coverage is no input of the pointer, so steps stay independent.
    """
    if valid is not None:
        weights = weights.masked_fill(~valid[..., None], 0)
    covered = weights.cumsum(1) - weights
    return torch.minimum(weights, covered).sum()


def pointer_generator(config: Config, vocab: int, *, heads: int = 1) -> PointerGenerator:
    """Build a translator from a configuration, one vocabulary for both sides, with a pointer of `heads` heads.

    `config` has the sizes and the mechanisms, `vocab` is the number of tokens.

    >>> import torch
    >>> from regard.config import Config
    >>> from regard.models import pointer_generator
    >>> model = pointer_generator(Config(width=16, heads=2, depth=1, ffn=32), vocab=20, heads=2)
    >>> type(model).__name__
    'PointerGenerator'
    """
    made = translator(config, vocab)
    return PointerGenerator(made.encoder, made.embed, made.decoder, made.head, vocab=vocab, wiring=config.wiring, heads=heads)
