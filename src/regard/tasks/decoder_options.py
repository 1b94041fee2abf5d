"""Decoders of a translation model, as texts with options: `decoder="ctc(upsample=2)"`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from regard.options import Options, check_choice, check_positive, check_probability, family

SLOT_INPUTS = ("soft", "uniform", "none", "begin")


@dataclass(frozen=True)
class Decoder(Options):
    """What all decoders have."""

    autoregressive: ClassVar[bool] = False
    steady: ClassVar[bool] = True  # its loss reads no number from the device
    built: ClassVar[tuple[str, ...]] = ()  # options that the weights depend on
    inference: ClassVar[tuple[str, ...]] = ()  # options that may change after training

    @property
    def kind(self) -> str:
        """Text of the slots of a non-autoregressive model, for `nat_translator`."""
        return self.name

    @property
    def glancing(self) -> float:
        """Fraction of mistakes that are revealed at the first update."""
        return getattr(self, "glance", 0.0)

    def decoding(self) -> dict[str, int]:
        """Options of `generate_nat`."""
        return {name: getattr(self, name, 1) for name in ("lengths", "iterations")}

    def check(self) -> None:
        check_probability("glance", self.glancing)
        for name, value in self.decoding().items():
            check_positive(name, value)


@dataclass(frozen=True)
class Autoregressive(Decoder):
    """One token after another."""

    name = "autoregressive"
    autoregressive = True


@dataclass(frozen=True)
class Ctc(Decoder):
    """All tokens at once, in several slots for every source token; blanks and repetitions are removed."""

    name = "ctc"
    built = ("upsample",)
    upsample: int = 3  # slots for every source token
    glance: float = 0.5  # fraction of its mistakes that is revealed in training, at the start

    def check(self) -> None:
        super().check()
        check_positive("upsample", self.upsample)

    @property
    def kind(self) -> str:
        return f"ctc(upsample={self.upsample})"


@dataclass(frozen=True)
class Masked(Decoder):
    """All tokens at once, then those of least confidence again (mask-predict)."""

    name = "masked"
    inference = ("iterations", "lengths")
    iterations: int = 4  # rounds of an answer
    lengths: int = 4  # lengths that are tried


@dataclass(frozen=True)
class Length(Decoder):
    """All tokens at once, after their number is predicted."""

    name = "length"
    built = ("slots",)
    inference = ("lengths",)
    slots: str = "soft"  # inputs: soft or uniform copies of the source, none (one vector), begin (BEGIN tokens)
    lengths: int = 4  # lengths that are tried
    glance: float = 0.5  # fraction of its mistakes that is revealed in training, at the start

    def check(self) -> None:
        super().check()
        check_choice("slots", self.slots, SLOT_INPUTS)

    @property
    def kind(self) -> str:
        return f"length(copy={self.slots!r})"


@dataclass(frozen=True)
class Fixed(Decoder):
    """All tokens at once, in a fixed number of slots."""

    name = "fixed"
    steady = False  # it reads how long targets are
    glance: float = 0.5  # fraction of its mistakes that is revealed in training, at the start


DECODERS: dict[str, type[Decoder]] = family((Autoregressive, Ctc, Masked, Length, Fixed))
