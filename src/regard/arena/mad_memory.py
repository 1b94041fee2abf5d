"""Tasks of MAD beside recall: selective copying, compression into one vector, and facts that are the same in all sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from regard.arena.arena_task import IGNORED, ArenaModel, Examples, ExamplesPart
from regard.arena.example_draws import SEED_STEP, log_buckets
from regard.arena.mad_tasks import MadTask
from regard.arena.token_floors import label_accuracy
from regard.options import check_positive


@dataclass(frozen=True)
class MadSelectiveCopy(MadTask):
    """Copy tokens in order. Blanks lie in front of each; behind the last come a mark and blanks, one for each token to copy."""

    name = "mad_selective_copy"
    title = "MAD: selective copying"

    length: int = 256
    copied: int = 16  # tokens to copy

    def check(self) -> None:
        """Refuse lengths without room for a blank."""
        super().check()
        check_positive("copied", self.copied)
        if self.symbols < 4:
            raise ValueError(f"symbols must be an integer of at least 4, not {self.symbols!r}")
        if self.length < 2 * self.copied + 2:
            raise ValueError(f"{self.copied} copied tokens need a length of at least {2 * self.copied + 2}, not {self.length}")

    @property
    def answers(self) -> int:
        """Return the number of ids to copy: all but blank and mark."""
        return self.symbols - 2

    def draw(self, part: ExamplesPart, count: int, generator: Generator) -> Examples:
        """Draw examples; a slice is the distance to the copied token in powers of two."""
        blank, mark, blanks = self.symbols - 1, self.symbols, self.length - 2 * self.copied - 1
        data = torch.randint(1, blank, (count, self.copied), generator=generator)
        slots = torch.randint(self.copied, (count, blanks), generator=generator)
        in_front = torch.zeros_like(data).scatter_add_(1, slots, torch.ones_like(slots))
        places = in_front.cumsum(1) + torch.arange(self.copied)
        tokens = torch.full((count, self.length), blank).scatter_(1, places, data)
        tokens[:, -self.copied - 1] = mark
        unscored = torch.full((count, self.length - self.copied), IGNORED)
        distance = torch.arange(self.length - self.copied, self.length) - places
        slices = {} if part == "train" else {"distance": torch.cat([unscored * 0, log_buckets(distance, 1)], 1)}
        return self.made(tokens, torch.cat([unscored, data], 1), slices)

    def floors(self) -> dict[str, float]:
        """Return accuracies without attention; `commonest of it` counts the copied tokens of each sequence, without order."""
        data = self.examples("test").targets[:, -self.copied :].long()
        counts = torch.zeros(len(data), self.vocab).scatter_add_(1, data, torch.ones(data.shape))
        return {**super().floors(), "commonest of it": float(counts.max(1).values.mean() / self.copied)}


@dataclass(frozen=True)
class MadCompression(MadTask):
    """Repeat all tokens from one vector: the model's last, of a mark behind random tokens. The targets are the tokens.

    The model must have the bottleneck; a model that reads each target from its own token has nothing to learn.
    """

    name = "mad_compression"
    title = "MAD: compression"

    length: int = 32

    def check(self) -> None:
        """Refuse sequences of the mark alone."""
        super().check()
        if self.length < 2 or self.symbols < 3:
            raise ValueError(f"length must be at least 2 and symbols at least 3, not {self.length} and {self.symbols}")

    @property
    def answers(self) -> int:
        """Return the number of ids beside the mark."""
        return self.symbols - 1

    def draw(self, part: ExamplesPart, count: int, generator: Generator) -> Examples:  # noqa: ARG002 - splits differ by seed
        """Draw examples; a slice is the position."""
        tokens = torch.randint(1, self.symbols, (count, self.length), generator=generator)
        tokens[:, -1] = self.symbols
        return self.made(tokens, tokens, {"position": torch.arange(self.length).expand_as(tokens)})

    def floors(self) -> dict[str, float]:
        """Return accuracies without attention; not that of the token, which is the answer and lies in front of the bottleneck."""
        return {name: value for name, value in super().floors().items() if name != "token"}

    def model(self) -> ArenaModel:
        """Return MAD's, as an auto-encoder."""
        return replace(super().model(), bottleneck=True)


@dataclass(frozen=True)
class MadMemorization(MadTask):
    """Give the value of a key, which is the same in all sequences: nothing is in the context, all must be in the weights."""

    name = "mad_memorization"
    title = "MAD: memorization"

    length: int = 32
    symbols: int = 256  # ids beside padding: keys, values and a mark
    train: int = 256  # examples for training

    def check(self) -> None:
        """Refuse lengths that are no sequence of pairs, and vocabularies without keys."""
        super().check()
        if self.length < 2 or self.length % 2 or self.symbols < 5:
            raise ValueError(f"length must be even and symbols at least 5, not {self.length} and {self.symbols}")

    @property
    def answers(self) -> int:
        """Return the number of facts: keys with a value."""
        return (self.symbols - 1) // 2

    def values(self) -> Tensor:
        """Return the value of each key, the same in all splits; entry 0 belongs to key 1."""
        generator = Generator().manual_seed(self.seed * SEED_STEP - 1)
        return 1 + self.answers + torch.randperm(self.symbols - 1 - self.answers, generator=generator)[: self.answers]

    def draw(self, part: ExamplesPart, count: int, generator: Generator) -> Examples:  # noqa: ARG002 - splits differ by seed
        """Draw keys, each with a mark behind it where its value is the target."""
        keys = torch.randint(self.answers, (count, self.length // 2), generator=generator)
        tokens = torch.stack([1 + keys, torch.full_like(keys, self.symbols)], -1).flatten(1)
        targets = torch.stack([torch.full_like(keys, IGNORED), self.values()[keys]], -1).flatten(1)
        return self.made(tokens, targets)

    def floors(self) -> dict[str, float]:
        """Return accuracies without attention; `token before` is a table of the training examples, all that is needed."""
        train, test = self.examples("train"), self.examples("test")
        key, key_test = (x.tokens[:, 0::2].flatten().long() for x in (train, test))
        label, truth = (x.targets[:, 1::2].flatten().long() for x in (train, test))
        return {**super().floors(), "token before": label_accuracy(key, key_test, label, truth, self.vocab, self.classes)}
