"""Scheduled sampling: a decoder is fed true tokens less and less often, and its own predictions instead.

Letters: b examples, m target tokens, w width, v vocabulary.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.mixers.feature_math import upcast
from regard.models.embedding import Tokens
from regard.models.translator import Translator
from regard.text import unknown
from regard.training.decoder_inputs import at_front, before, no_gradients, previous_tokens, sequence, step_by_step
from regard.training.losses import Loss, cross_entropy
from regard.training.mode_options import HARD_FORMS, INPUT_FORMS


@dataclass(frozen=True)
class PredictedInputs:
    """Inputs of a decoder made of its predictions, from its scores s and the embeddings e of its vocabulary.

    argmax: e of the likeliest token. sample: of one drawn by its probability. softmax: their mean, softmax(alpha s) e.
    gumbel: a mean by chance, softmax(alpha (s + g)) e with Gumbel noise g, a drawn token as alpha grows (Jang et al. 2016,
    arXiv:1611.01144). `top_k` leaves only the likeliest to choose from. `through` lets gradients of a mean go back into the
    scores (Goyal et al. 2017, arXiv:1704.06970).
    """

    form: str = "argmax"
    alpha: float = 1.0
    top_k: int | None = None
    through: bool = False

    def __post_init__(self) -> None:
        if self.form not in INPUT_FORMS:
            raise ValueError(unknown("there is no form", self.form, INPUT_FORMS))
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha sharpens, so it is above 0, not {self.alpha!r}")
        if self.form in HARD_FORMS and (self.alpha != 1 or self.through):
            raise ValueError(f"{self.form} chooses one token: alpha and through are for the means, softmax and gumbel")
        if self.top_k is not None and (self.top_k < 1 or self.form == "argmax"):
            raise ValueError(f"top_k is at least 1, for any form but argmax, not {self.top_k!r} for {self.form}")

    def noise(self, target: Tensor, embed: Tokens, dice: torch.Generator | None) -> Tensor | None:
        """Draw the noise of the scores (b m v), once, so that every pass over a step makes the same choice."""
        if self.form not in ("sample", "gumbel"):
            return None
        waits = upcast(embed.table.weight).new_empty(*target.shape, embed.vocab)
        waits.exponential_(generator=dice)
        tiny = torch.finfo(waits.dtype).tiny
        return -waits.clamp_min(tiny).log()

    def vectors(self, embed: Tokens, scores: Tensor, noise: Tensor | None) -> Tensor:
        """Turn scores (b m v) into inputs (b m w)."""
        if not self.through:
            scores = scores.detach()
        scores = upcast(scores)
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            lowest = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < lowest, -torch.inf)
        if noise is not None:
            scores = scores + noise
        if self.form in HARD_FORMS:
            return embed.vectors(scores.argmax(-1))
        weights = (self.alpha * scores).softmax(-1)
        return embed.mixed(weights)


ARGMAX = PredictedInputs()


def token_by_token(
    model: Translator,
    batch: Batch,
    share: float,
    *,
    inputs: PredictedInputs = ARGMAX,
    smoothing: float = 0.0,
    dice: torch.Generator | None = None,
) -> Loss:
    """Feed each step the true token before it with probability `share`, else the predicted one.

    Bengio et al. 2015, arXiv:1506.03099.
    """
    target = sequence(batch)
    embed = _vocabulary(model)
    true, kept, noise = _mixture(batch, embed, share, inputs, dice)

    def feed(i: int, last: Tensor | None) -> Tensor:
        one = slice(i, i + 1)
        if last is None:
            return true[:, one]
        own_noise = None if noise is None else noise[:, one]
        predicted = inputs.vectors(embed, last, own_noise)
        return torch.where(kept[:, one], true[:, one], predicted)

    scores = step_by_step(model, batch, feed)
    return cross_entropy(scores, target, batch.target_valid, smoothing=smoothing)


def parallel_passes(
    model: Translator,
    batch: Batch,
    share: float,
    *,
    passes: int = 3,
    inputs: PredictedInputs = ARGMAX,
    smoothing: float = 0.0,
    dice: torch.Generator | None = None,
) -> Loss:
    """Compute all steps at once in several passes: the first is fed the true tokens, each later one the predictions of the pass
    before it, except at the fraction of steps that keep the true token; the loss is that of the last one.
    Duckworth et al. 2019, arXiv:1906.04331.

    After i passes the first i steps are those of `token_by_token`, so with m of them it is the same, of any target of m tokens.
    """
    if passes < 1:
        raise ValueError(f"passes must be at least 1, not {passes!r}")
    target, valid = sequence(batch), batch.target_valid
    embed = _vocabulary(model)
    true, kept, noise = _mixture(batch, embed, share, inputs, dice)
    encoded = model.encode(batch.source, batch.source_valid)
    x = true
    predictions = passes - 1 if share < 1 else 0
    for _ in range(predictions):
        with nullcontext() if inputs.through else no_gradients():
            scores = model.head(model.hidden(encoded, x, valid))
        predicted = inputs.vectors(embed, before(scores, valid), noise)
        x = torch.where(kept, true, predicted)
    y = model.hidden(encoded, x, valid)
    return cross_entropy(model.head(y), target, valid, smoothing=smoothing)


def two_pass(
    model: Translator,
    batch: Batch,
    share: float,
    *,
    inputs: PredictedInputs = ARGMAX,
    smoothing: float = 0.0,
    dice: torch.Generator | None = None,
) -> Loss:
    """Compute one pass over the true tokens, and one over true tokens mixed with predictions of the first.

    Mihaylova & Martins 2019, arXiv:1906.07651: scheduled sampling for Transformers.
    """
    return parallel_passes(model, batch, share, passes=2, inputs=inputs, smoothing=smoothing, dice=dice)


def _mixture(
    batch: Batch, embed: Tokens, share: float, inputs: PredictedInputs, dice: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make the true inputs (b m w), the mask of steps that keep them (b m 1), and the noise of all others."""
    if not 0 <= share <= 1:
        raise ValueError(f"the share of true tokens must be in [0, 1], not {share!r}")
    target, valid = sequence(batch), batch.target_valid
    kept = torch.rand(target.shape, device=target.device, generator=dice) < share
    kept = (kept | at_front(target, valid))[..., None]  # BEGIN is never predicted
    true = embed.vectors(previous_tokens(target, valid))
    noise = inputs.noise(target, embed, dice)
    return true, kept, noise


def _vocabulary(model: Translator) -> Tokens:
    if not isinstance(model.embed, Tokens):
        raise ValueError(f"predictions can be fed to a decoder whose inputs are tokens, not {type(model.embed).__name__.lower()}")
    return model.embed
