"""Training modes of a decoder, as texts with options: `mode="rdrop(alpha=5)"`. Imports no torch; the losses are in decoder_modes.

The attributes of `Mode` are what a mode needs: whether the decoder must be autoregressive, and whether its loss does the same
work at every update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from regard.options import Options, check_choice, check_positive, check_probability, family
from regard.training.sampling_schedule import SAMPLING_SCHEDULES

INPUT_FORMS = ("argmax", "sample", "softmax", "gumbel")
HARD_FORMS = INPUT_FORMS[:2]  # one token, not a mean of embeddings


@dataclass(frozen=True)
class Mode(Options):
    """What all modes have."""

    autoregressive: ClassVar[bool] = True  # it is for a decoder that generates one token after another
    steady: ClassVar[bool] = False  # its loss does the same work at every update


@dataclass(frozen=True)
class TeacherForcing(Mode):
    """Every step is conditioned on the true tokens before it."""

    name = "teacher_forcing"
    autoregressive = False
    steady = True


@dataclass(frozen=True)
class RDrop(Mode):
    """Teacher forcing in two passes with different dropout, and a penalty for their divergence."""

    name = "rdrop"
    autoregressive = False
    steady = True
    alpha: float = 5.0  # weight of the divergence of the two passes

    def check(self) -> None:
        if self.alpha <= 0:
            raise ValueError(f"alpha must be above 0, not {self.alpha!r}")


@dataclass(frozen=True)
class FreeRunning(Mode):
    """Every step is conditioned on the model's own argmax tokens."""

    name = "free_running"


@dataclass(frozen=True)
class Scheduled(Mode):
    """Scheduled sampling, token by token: each input is the true token or a predicted one."""

    name = "scheduled"
    schedule: str = "linear"  # how the probability of a true token falls: linear, exponential, inverse_sigmoid
    floor: float = 0.5  # the probability of a true token at the end
    inputs: str = "argmax"  # predicted inputs: argmax, sample, or soft mixes of embeddings: softmax, gumbel
    alpha: float = 1.0  # sharpness of soft mixes: softmax(alpha scores)
    through: bool = False  # soft mixes: gradients flow back through them

    def check(self) -> None:
        check_choice("schedule", self.schedule, SAMPLING_SCHEDULES)
        check_choice("inputs", self.inputs, INPUT_FORMS)
        check_probability("floor", self.floor)
        if self.alpha <= 0:
            raise ValueError(f"alpha must be above 0, not {self.alpha!r}")
        if self.inputs in HARD_FORMS and (self.alpha != 1 or self.through):
            raise ValueError(f"inputs={self.inputs!r} chooses one token: alpha and through are for softmax and gumbel")


@dataclass(frozen=True)
class TwoPass(Scheduled):
    """Scheduled sampling in two passes: the second is fed predictions of the first."""

    name = "two_pass"


@dataclass(frozen=True)
class Parallel(Scheduled):
    """Scheduled sampling in several passes, each fed predictions of the one before it."""

    name = "parallel"
    passes: int = 3  # the last one is learned from

    def check(self) -> None:
        super().check()
        check_positive("passes", self.passes)


@dataclass(frozen=True)
class SelfCritical(Mode):
    """Policy gradient of BLEU, against the greedy answer."""

    name = "self_critical"


@dataclass(frozen=True)
class MinimumRisk(Mode):
    """Expected BLEU over sampled answers."""

    name = "minimum_risk"
    samples: int = 8  # answers that are compared

    def check(self) -> None:
        check_positive("samples", self.samples)


MODES: dict[str, type[Mode]] = family(
    (TeacherForcing, RDrop, FreeRunning, Scheduled, TwoPass, Parallel, SelfCritical, MinimumRisk)
)
