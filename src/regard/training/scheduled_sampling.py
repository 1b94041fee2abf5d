"""Scheduled sampling: the truth is whispered less and less, so that a decoder learns to go on from what it said itself.

Letters: b examples, m target tokens, w width, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.mixers.feature_math import upcast
from regard.models.embedding import Tokens
from regard.models.translator import Translator
from regard.text import unknown
from regard.training.decoder_inputs import at_front, before, sequence, step_by_step, told, unlearned
from regard.training.losses import Loss, cross_entropy

OWN_FORMS = ("argmax", "sample", "softmax", "gumbel")
HARD = OWN_FORMS[:2]


@dataclass(frozen=True)
class OwnTokens:
    """What a decoder hears of itself, from its scores s and the vectors e of its vocabulary.

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
        if self.form not in OWN_FORMS:
            raise ValueError(unknown("there is no form", self.form, OWN_FORMS))
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha sharpens, so it is above 0, not {self.alpha!r}")
        if self.form in HARD and (self.alpha != 1 or self.through):
            raise ValueError(f"{self.form} chooses one token: alpha and through are for the means, softmax and gumbel")
        if self.top_k is not None and (self.top_k < 1 or self.form == "argmax"):
            raise ValueError(f"top_k is at least 1, for any form but argmax, not {self.top_k!r} for {self.form}")

    def noise(self, target: Tensor, embed: Tokens, dice: torch.Generator | None) -> Tensor | None:
        """What chance adds to the scores (b m v). Drawn once, so that whoever comes back to a step chooses as before."""
        if self.form not in ("sample", "gumbel"):
            return None
        waits = upcast(embed.table.weight).new_empty(*target.shape, embed.vocab).exponential_(generator=dice)
        return -waits.clamp_min(torch.finfo(waits.dtype).tiny).log()

    def vectors(self, embed: Tokens, scores: Tensor, noise: Tensor | None) -> Tensor:
        """(b m v) -> (b m w)."""
        scores = upcast(scores if self.through else scores.detach())
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[..., -1:], -torch.inf)
        if noise is not None:
            scores = scores + noise
        if self.form in HARD:
            return embed.vectors(scores.argmax(-1))
        return embed.mixed((self.alpha * scores).softmax(-1))


ARGMAX = OwnTokens()


def token_by_token(
    model: Translator,
    batch: Batch,
    share: float,
    *,
    own: OwnTokens = ARGMAX,
    smoothing: float = 0.0,
    dice: torch.Generator | None = None,
) -> Loss:
    """Feed each step the true token before it with probability `truth_probability`, else the predicted one.

    Bengio et al. 2015, arXiv:1506.03099.
    """
    target, embed = sequence(batch), _vocabulary(model)
    true, kept, noise = _mixture(batch, embed, share, own, dice)

    def feed(i: int, last: Tensor | None) -> Tensor:
        one = slice(i, i + 1)
        if last is None:
            return true[:, one]
        said = own.vectors(embed, last, None if noise is None else noise[:, one])
        return torch.where(kept[:, one], true[:, one], said)

    return cross_entropy(step_by_step(model, batch, feed), target, batch.target_valid, smoothing=smoothing)


def parallel_passes(
    model: Translator,
    batch: Batch,
    share: float,
    *,
    passes: int = 3,
    own: OwnTokens = ARGMAX,
    smoothing: float = 0.0,
    dice: torch.Generator | None = None,
) -> Loss:
    """All steps at once, several times: the first pass hears the truth, each later one what the pass before it said, except
    at the share of steps that keep the truth; the last one learns. Duckworth et al. 2019, arXiv:1906.04331.

    After i passes the first i steps are those of `token_by_token`, so with m of them it is the same, of any target of m tokens.
    """
    if passes < 1:
        raise ValueError(f"passes must be at least 1, not {passes!r}")
    target, valid, embed = sequence(batch), batch.target_valid, _vocabulary(model)
    true, kept, noise = _mixture(batch, embed, share, own, dice)
    heard, x = model.hear(batch.source, batch.source_valid), true
    for _ in range(passes - 1 if share < 1 else 0):
        with nullcontext() if own.through else unlearned():
            scores = model.head(model.hidden(heard, x, valid))
        x = torch.where(kept, true, own.vectors(embed, before(scores, valid), noise))
    return cross_entropy(model.head(model.hidden(heard, x, valid)), target, valid, smoothing=smoothing)


def two_pass(
    model: Translator,
    batch: Batch,
    share: float,
    *,
    own: OwnTokens = ARGMAX,
    smoothing: float = 0.0,
    dice: torch.Generator | None = None,
) -> Loss:
    """One pass that hears the truth, and one that hears the truth mixed with what the first one said.

    Mihaylova & Martins 2019, arXiv:1906.07651: scheduled sampling for Transformers.
    """
    return parallel_passes(model, batch, share, passes=2, own=own, smoothing=smoothing, dice=dice)


def _mixture(
    batch: Batch, embed: Tokens, share: float, own: OwnTokens, dice: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The truth as vectors (b m w), where it is kept (b m 1), and the noise for where it is not."""
    if not 0 <= share <= 1:
        raise ValueError(f"the share of true tokens must be in [0, 1], not {share!r}")
    target, valid = sequence(batch), batch.target_valid
    kept = torch.rand(target.shape, device=target.device, generator=dice) < share
    kept = (kept | at_front(target, valid))[..., None]  # the begin is nobody's choice
    return embed.vectors(told(target, valid)), kept, own.noise(target, embed, dice)


def _vocabulary(model: Translator) -> Tokens:
    if not isinstance(model.embed, Tokens):
        raise ValueError(f"a decoder can hear itself only if it hears tokens, not {type(model.embed).__name__.lower()}")
    return model.embed


def linear_decay(step: float, steps: float, floor: float = 0.0) -> float:
    """From 1 to `floor` in so many steps."""
    return 1 - (1 - floor) * min(1.0, step / steps)


def exponential_decay(step: float, k: float) -> float:
    """k ** step, k < 1."""
    return k**step


def inverse_sigmoid_decay(step: float, k: float) -> float:
    """k / (k + exp(step / k)), k >= 1: high at first, half at k log k, low at last."""
    return 1 / (1 + math.exp(min(step / k - math.log(k), 700.0)))


def _exponentially(step: float, steps: float, floor: float) -> float:
    return floor + (1 - floor) * exponential_decay(step, 0.01 ** (1 / steps))  # a hundredth is left at the end


def _sigmoidally(step: float, steps: float, floor: float) -> float:
    """Half is left at half of the steps: k log k = steps / 2, by Newton's method for z = log k."""
    half = steps / 2
    z = 1.0 + math.log1p(half)
    for _ in range(50):
        z -= (z * math.exp(z) - half) / (math.exp(z) * (1 + z))
    return floor + (1 - floor) * inverse_sigmoid_decay(step, math.exp(z))


# by name, called as schedule(step, steps, floor): from about 1 to about `floor`
SAMPLING_SCHEDULES: dict[str, Callable[[float, float, float], float]] = {
    "linear": linear_decay,
    "exponential": _exponentially,
    "inverse_sigmoid": _sigmoidally,
}


def truth_probability(schedule: str, step: float, steps: float, floor: float = 0.0) -> float:
    """The probability of a true token at an update: the table's schedules, in one place that checks what it is given."""
    if schedule not in SAMPLING_SCHEDULES:
        raise ValueError(unknown("there is no schedule of true tokens", schedule, SAMPLING_SCHEDULES))
    if not 0 <= floor <= 1 or steps <= 0 or step < 0:
        raise ValueError(f"step >= 0, steps > 0 and floor in [0, 1] are needed, not {step!r}, {steps!r} and {floor!r}")
    return SAMPLING_SCHEDULES[schedule](step, steps, floor)
