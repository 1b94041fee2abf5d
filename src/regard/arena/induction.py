"""Induction heads: a trigger somewhere in a random sequence, and once more at its end. Which token came after the first?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.arena.arena_task import IGNORED, ArenaBudget, ArenaModel, Examples, ExamplesPart
from regard.arena.example_draws import DrawnTask, log_buckets, small_integers
from regard.arena.token_floors import token_floors

TRIGGER = 1  # ids from 2 are ordinary tokens


@dataclass(frozen=True)
class Induction(DrawnTask):
    """Name the token behind the trigger. One answer per sequence, at its last token, which is the trigger again."""

    name = "induction"
    form = "token"
    causal = True
    title = "induction heads"
    source = "Fu et al. 2022, arXiv:2212.14052; settings of Gu & Dao 2023, arXiv:2312.00752, appendix E.1"

    length: int = 256  # of test sequences
    trained: int = 0  # length of training and validation sequences; 0: as in test
    symbols: int = 15  # ordinary tokens; the trigger makes it 16
    fresh: bool = True  # every training batch is drawn anew
    train: int = 8192  # examples for training, where they are not drawn anew

    def check(self) -> None:
        """Refuse sequences that are too short for two triggers and an answer."""
        super().check()
        if self.length < 3:
            raise ValueError(f"two triggers and an answer need a length of at least 3, not {self.length}")
        if self.trained and not 3 <= self.trained <= self.length:
            raise ValueError(f"trained must be 0 or from 3 to the length of {self.length}, not {self.trained}")
        if self.symbols < 2:
            raise ValueError(f"symbols must be an integer of at least 2, not {self.symbols!r}")

    @property
    def vocab(self) -> int:
        """Return the number of ids."""
        return TRIGGER + 1 + self.symbols

    @property
    def classes(self) -> int:
        """Return the number of labels: all ids."""
        return self.vocab

    def drawn(
        self, count: int, length: int, generator: Generator | None, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw tokens (count n), the place of the first trigger and the answer (count 1); always the same operations."""
        tokens = torch.randint(TRIGGER + 1, self.vocab, (count, length), generator=generator, device=device)
        place = torch.randint(length - 2, (count, 1), generator=generator, device=device)
        tokens.scatter_(1, place, TRIGGER)
        tokens[:, -1] = TRIGGER
        return tokens, place, tokens.gather(1, place + 1)

    def draw(self, part: ExamplesPart, count: int, generator: Generator) -> Examples:
        """Draw examples, with a slice: the distance from the last token to the answer, in powers of two."""
        length = self.length if part == "test" else self.trained or self.length
        tokens, place, answer = self.drawn(count, length, generator)
        distance = log_buckets(length - 2 - place[:, 0], 1).to(torch.int32)
        targets = small_integers(_at_the_end(answer, length), self.vocab, signed=True)
        return Examples(small_integers(tokens, self.vocab), targets, None, {"distance": distance})

    def augment(self, tokens: Tensor, targets: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Draw a new batch, as the published recipe does, unless `fresh` is off."""
        if not self.fresh:
            return tokens, targets
        drawn, _, answer = self.drawn(len(tokens), tokens.shape[1], generator, tokens.device)
        return drawn.to(tokens.dtype), _at_the_end(answer, tokens.shape[1]).to(targets.dtype)

    def floors(self) -> dict[str, float]:
        """Return accuracies without attention; `token before` repeats the last token in front of the second trigger."""
        test = self.examples("test")
        answers = test.targets[:, -1].long()
        counts = torch.zeros(len(answers), self.vocab).scatter_add_(1, test.tokens.long(), torch.ones(test.tokens.shape))
        counts[:, TRIGGER] = 0
        found = token_floors(self.examples("val"), test, self.classes)
        found["most frequent of it"] = float((counts.argmax(1) == answers).double().mean())
        found["token before"] = float((test.tokens[:, -2].long() == answers).double().mean())
        return {"chance": 1 / self.symbols, **found}

    def model(self) -> ArenaModel:
        """Return the paper's: two layers of width 64."""
        return ArenaModel(width=64, depth=2, heads=2, ffn=128)

    def budget(self) -> ArenaBudget:
        """Return the paper's: 25 times 8,192 batches of 8, with its learning rates between others."""
        return ArenaBudget(25 * 8192, 8, (1e-4, 2e-4, 5e-4, 1e-3, 2e-3), weight_decay=0.0, evaluations=25)


def _at_the_end(answer: Tensor, length: int) -> Tensor:
    """Return targets (count n) that are scored at the last token only."""
    return torch.cat([answer.new_full((len(answer), length - 1), IGNORED), answer], 1)
