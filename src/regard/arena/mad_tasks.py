"""Mechanistic architecture design (MAD): what its six tasks have in common. Poli et al. 2024, arXiv:2403.17844."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.arena.arena_task import IGNORED, ArenaBudget, ArenaModel, Examples, ExamplesPart
from regard.arena.example_draws import DrawnTask, small_integers
from regard.arena.token_floors import token_floors

MAD_EPOCHS, MAD_BATCH = 200, 128


@dataclass(frozen=True)
class MadTask(DrawnTask):
    """Describe a task of MAD: ids from 1 to `symbols`, a label per token, causal."""

    form = "token"
    causal = True
    source = "Poli et al. 2024, arXiv:2403.17844 (MAD)"

    length: int = 128
    symbols: int = 16  # ids beside padding, the special ones included

    @property
    def vocab(self) -> int:
        """Return the number of ids, padding included."""
        return self.symbols + 1

    @property
    def classes(self) -> int:
        """Return the number of labels: all ids."""
        return self.vocab

    @property
    def answers(self) -> int:
        """Return the number of ids that answers are drawn from."""
        raise NotImplementedError

    def made(self, tokens: Tensor, targets: Tensor, slices: dict[str, Tensor] | None = None) -> Examples:
        """Return examples in small types."""
        own = {name: values.to(torch.int16) for name, values in (slices or {}).items()}
        return Examples(small_integers(tokens, self.symbols), small_integers(targets, self.symbols, signed=True), None, own)

    def floors(self) -> dict[str, float]:
        """Return accuracies without attention, fitted on validation, where the same targets are scored as in test."""
        found = token_floors(self.examples("val"), self.examples("test"), self.classes)
        return {"chance": 1 / self.answers, **found}

    def model(self) -> ArenaModel:
        """Return MAD's: two blocks of a mixer with 16 heads and a gated feed-forward layer, width 128.

        Its attention has rotary positions. Sinusoidal ones take their place here, because every mechanism can have them.
        """
        return ArenaModel(width=128, depth=2, heads=16, ffn=352, gated=True)

    def budget(self) -> ArenaBudget:
        """Return MAD's, with two more learning rates and one weight decay: 200 epochs of batches of 128."""
        steps = MAD_EPOCHS * -(-self.train // MAD_BATCH)
        return ArenaBudget(steps, MAD_BATCH, (1e-4, 2e-4, 5e-4, 1e-3, 2e-3), weight_decay=0.0, warmup=0.0, evaluations=20)


def next_tokens(tokens: Tensor, scored: Tensor | None = None) -> Tensor:
    """Return the next token of each as target, IGNORED at the last and, of a mask of tokens, in front of those not scored."""
    following = tokens[:, 1:] if scored is None else tokens[:, 1:].masked_fill(~scored[:, 1:], IGNORED)
    return torch.cat([following, following.new_full((len(tokens), 1), IGNORED)], 1)


def targets_of_part(tokens: Tensor, scored: Tensor, part: ExamplesPart) -> Tensor:
    """Return targets as MAD has them: all next tokens in training, those with an answer in validation and test."""
    return next_tokens(tokens, None if part == "train" else scored)
