"""A task that a small model begins to learn in a second: sequences backwards. Tests and benchmarks/faults.py train it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from regard.blocks import Stack
from regard.config import Config
from regard.data.batch import NO_LABEL, Batch, padded
from regard.tasks.task import Task
from regard.training.losses import Loss, cross_entropy

WORDS = 12


@dataclass
class SmallConfig(Config):
    examples: int = 256


def small(**changes) -> SmallConfig:
    """Sixty updates of two layers, saved every five."""
    settings = {
        "task": "small", "width": 32, "heads": 4, "depth": 2, "ffn": 64, "dropout": 0.1, "steps": 60, "batch_tokens": 256,
        "lr": 1e-2, "warmup": 10, "validate_every": 10, "save_every": 5, "average": 3, "seed": 7, "decay": 0.01,
    }  # fmt: skip
    return SmallConfig(**{**settings, **changes})


class Reader(nn.Module):
    """A label for every token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, config.width)
        nn.init.normal_(self.table.weight, std=config.width**-0.5)
        self.places = nn.Embedding(16, config.width)
        self.stack = Stack.of(
            "softmax", width=config.width, heads=config.heads, depth=config.depth, ffn=config.ffn, dropout=config.dropout
        )
        self.out = nn.Linear(config.width, WORDS, bias=False)
        self.out.weight = self.table.weight  # one table with two names, as in every translator

    def forward(self, source, valid=None):
        n = source.shape[1]
        x = self.table(source) + self.places(torch.arange(n, device=source.device))
        return self.out(self.stack(x, valid=valid))


class Small(Task):
    best = ("accuracy", "max")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        dice = random.Random(config.seed)
        rows = [[dice.randrange(5, WORDS) for _ in range(dice.randrange(3, 9))] for _ in range(config.examples)]
        self.splits = {"train": rows[: -len(rows) // 8], "val": rows[-len(rows) // 8 :]}

    def assets(self):
        return {"words.json": "[5, 6, 7, 8, 9, 10, 11]"}

    def size(self, example) -> int:
        return len(example)

    def batch(self, examples: Sequence[list[int]]) -> Batch:
        source, valid = padded(examples)
        target, _ = padded([row[::-1] for row in examples], NO_LABEL)
        return Batch(source, valid, target)

    def model(self) -> nn.Module:
        return Reader(self.config)

    def loss(self, model, batch, step) -> Loss:  # noqa: ARG002
        return cross_entropy(model(batch.source, batch.source_valid), batch.target)

    def score(self, model, split):
        device = next(model.parameters()).device
        batch = self.batch(self.splits[split]).to(device)
        scores = model(batch.source, batch.source_valid)
        right, real = (scores.argmax(-1) == batch.target).sum().item(), (batch.target != NO_LABEL).sum().item()
        return {"accuracy": right / real, "loss": cross_entropy(scores, batch.target).mean.item()}
