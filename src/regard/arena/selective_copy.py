"""Selective copying as Mamba has it: a few tokens at random places among noise, to be written down in order at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.arena.arena_task import IGNORED, ArenaBudget, ArenaModel, Examples, ExamplesPart
from regard.arena.example_draws import DrawnTask, log_buckets, small_integers
from regard.arena.token_floors import token_floors
from regard.options import check_positive

NOISE, MARKER, FIRST = 1, 2, 3  # ids; FIRST is the first data token


@dataclass(frozen=True)
class SelectiveCopy(DrawnTask):
    """Copy data tokens in order. They lie at random places among noise; behind come markers, one for each, with it as target."""

    name = "selective_copy"
    form = "token"
    causal = True
    title = "selective copying"
    source = "Gu & Dao 2023, arXiv:2312.00752 (Mamba), appendix E.1"

    length: int = 4096  # with the markers
    copied: int = 16  # data tokens of an example
    symbols: int = 14  # different data tokens; noise and marker make it 16
    fresh: bool = True  # every training batch is drawn anew
    train: int = 8192  # examples for training, where they are not drawn anew

    def check(self) -> None:
        """Refuse lengths without room for noise."""
        super().check()
        check_positive("copied", self.copied)
        if self.symbols < 2:
            raise ValueError(f"symbols must be an integer of at least 2, not {self.symbols!r}")
        if self.length < 2 * self.copied + 1:
            raise ValueError(f"{self.copied} copied tokens need a length of at least {2 * self.copied + 1}, not {self.length}")

    @property
    def vocab(self) -> int:
        """Return the number of ids."""
        return FIRST + self.symbols

    @property
    def classes(self) -> int:
        """Return the number of labels: all ids."""
        return self.vocab

    def drawn(self, count: int, generator: Generator | None, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Draw tokens (count n), data tokens and their places (count copied); a number of operations that is always the same."""
        where = {"generator": generator, "device": device}
        room = self.length - self.copied
        data = torch.randint(FIRST, self.vocab, (count, self.copied), **where)  # type: ignore[arg-type]
        places = torch.rand(count, room, **where).topk(self.copied, dim=1).indices.sort(1).values  # type: ignore[arg-type]
        tokens = torch.full((count, self.length), NOISE, device=device).scatter_(1, places, data)
        tokens[:, room:] = MARKER
        return tokens, data, places

    def draw(self, part: ExamplesPart, count: int, generator: Generator) -> Examples:  # noqa: ARG002 - splits differ by seed
        """Draw examples, with slices: the number of the copied token, and its distance to the marker in powers of two."""
        tokens, data, places = self.drawn(count, generator)
        room, blank = self.length - self.copied, torch.zeros(count, self.length - self.copied, dtype=torch.int16)
        distance = torch.arange(room, self.length) - places
        number = torch.arange(self.copied).expand_as(data)
        slices = {
            "distance": torch.cat([blank, log_buckets(distance, 1).to(torch.int16)], 1),
            "number": torch.cat([blank, number.to(torch.int16)], 1),
        }
        targets = small_integers(self._targets(data), self.vocab, signed=True)
        return Examples(small_integers(tokens, self.vocab), targets, None, slices)

    def _targets(self, data: Tensor) -> Tensor:
        unscored = data.new_full((len(data), self.length - self.copied), IGNORED)
        return torch.cat([unscored, data], 1)

    def augment(self, tokens: Tensor, targets: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Draw a new batch, as the published recipe does, unless `fresh` is off."""
        if not self.fresh:
            return tokens, targets
        drawn, data, _ = self.drawn(len(tokens), generator, tokens.device)
        return drawn.to(tokens.dtype), self._targets(data).to(targets.dtype)

    def floors(self) -> dict[str, float]:
        """Return accuracies without attention; `most frequent of it` counts the data tokens of each sequence, without order."""
        test = self.examples("test")
        data = test.targets[:, -self.copied :].long()
        counts = torch.zeros(len(data), self.vocab).scatter_add_(1, data, torch.ones(data.shape))
        found = token_floors(self.examples("val"), test, self.classes)
        return {"chance": 1 / self.symbols, **found, "most frequent of it": float(counts.max(1).values.mean() / self.copied)}

    def model(self) -> ArenaModel:
        """Return the paper's: two layers of width 64."""
        return ArenaModel(width=64, depth=2, heads=2, ffn=128)

    def budget(self) -> ArenaBudget:
        """Return the paper's batches of 64 and its learning rate among others. It trains for 400,000 steps, this for a tenth."""
        return ArenaBudget(40_000, 64, weight_decay=0.0)
