"""Multi-query associative recall: pairs of a key and a value, then keys again among random tokens. What was the value of each?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from regard.arena.arena_task import IGNORED, ArenaBudget, ArenaModel, Examples, ExamplesPart
from regard.arena.example_draws import Draw, DrawnTask, distinct_numbers, log_buckets, small_integers
from regard.arena.token_floors import label_accuracy, scored_targets, token_floors

# (length, pairs, share of the examples) of zoology's mixture; its test has more pairs than any training example.
MIXED_TRAIN = ((64, 4, 5), (128, 8, 1), (256, 16, 1), (256, 32, 1), (256, 64, 1))
MIXED_TEST = ((64, 4, 1), (64, 8, 1), (64, 16, 1), (128, 32, 1), (256, 64, 1), (512, 128, 1), (1024, 256, 1))
EPOCHS = 32


@dataclass(frozen=True)
class PairRecall(DrawnTask):
    """Recall values by their keys. Keys are drawn from the lower half of the vocabulary, values from the upper, no key twice.

    A key comes again after a gap i with a frequency of i ** (power - 1), as bigrams do in text. All other tokens behind the
    pairs are random, and targets are the values of those keys.
    """

    form = "token"
    causal = True
    source = "Arora et al. 2023, arXiv:2312.04927 (zoology)"

    vocab: int = 8192  # ids: padding 0, keys below the half, values from there
    power: float = 0.01  # 1: gaps are uniform

    @property
    def most_pairs(self) -> int:
        """Return the pairs of the fullest example."""
        raise NotImplementedError

    @property
    def classes(self) -> int:
        """Return the number of labels: all ids, although keys are never right."""
        return self.vocab

    def check(self) -> None:
        """Refuse a vocabulary without enough keys."""
        super().check()
        least = 2 * self.most_pairs + 2
        if not least <= self.vocab < 2**31:
            raise ValueError(f"{self.most_pairs} different keys and values need a vocab of at least {least}, not {self.vocab}")
        if self.power <= 0:
            raise ValueError(f"power must be above 0, not {self.power!r}")

    def drawn(self, part: ExamplesPart, length: int, pairs: int, count: int, generator: Generator) -> Examples:
        """Draw examples of a length, with slices: the pairs, and the distance from a key to its value in powers of two."""
        half = self.vocab // 2
        keys = 1 + distinct_numbers(count, pairs, half - 1, generator)
        values = half + distinct_numbers(count, pairs, self.vocab - half, generator)
        begin = 2 * pairs
        places = begin + 2 * self.gaps(count, pairs, (length - begin) // 2, generator)
        tokens = torch.randint(1, self.vocab, (count, length), generator=generator)
        tokens[:, 0:begin:2], tokens[:, 1:begin:2] = keys, values
        tokens.scatter_(1, places, keys)
        targets = torch.full((count, length), IGNORED).scatter_(1, places, values)
        distance = torch.zeros_like(targets).scatter_(1, places, places - torch.arange(1, begin, 2))
        slices = {"pairs": torch.full((count,), pairs, dtype=torch.int16)}
        if part != "train":
            slices["distance"] = log_buckets(distance, 1).to(torch.int16)
        top = self.vocab - 1
        return Examples(small_integers(tokens, top), small_integers(targets, top, signed=True), None, slices)

    def gaps(self, count: int, pairs: int, space: int, generator: Generator) -> Tensor:
        """Draw a different gap below `space` for each pair, one after another with frequencies of (i + 1) ** (power - 1).

        The largest of log p + Gumbel noise are such a selection without replacement, in order.
        """
        weights = (self.power - 1) * torch.arange(1, space + 1).log()
        uniform = torch.rand(count, space, generator=generator).clamp_(min=1e-30)
        return (weights - (-uniform.log()).log()).topk(pairs, dim=1).indices

    def floors(self) -> dict[str, float]:
        """Return accuracies without attention: `a value of it` is any of the sequence, `pair by position` the likeliest."""
        train, test = self.examples("train"), self.examples("test")
        answers = scored_targets(test)
        found = token_floors(train, test, self.classes)
        found["a value of it"] = len(test.tokens) / len(answers.label)
        fitted, truth = _pair_numbers(train), _pair_numbers(test)
        found["pair by position"] = label_accuracy(
            scored_targets(train).position, answers.position, fitted, truth, self.length, self.most_pairs
        )
        return {"chance": 1 / (self.vocab - self.vocab // 2), **found}

    def model(self) -> ArenaModel:
        """Return zoology's: two blocks of a short convolution and the mixer, without feed-forward layers and positions."""
        return ArenaModel(width=64, depth=2, heads=1, ffn=0, positions="none", conv=3)

    def budget(self) -> ArenaBudget:
        """Return zoology's, with five learning rates: 32 epochs of batches of 256."""
        rates = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
        return ArenaBudget(EPOCHS * -(-self.train // 256), 256, rates, weight_decay=0.1, warmup=0.0, evaluations=EPOCHS)


@dataclass(frozen=True)
class Recall(PairRecall):
    """Recall values by their keys, all examples of one length."""

    name = "recall"
    title = "multi-query associative recall"

    length: int = 128
    pairs: int = 8
    train: int = 100_000  # examples for training
    test: int = 3_000  # examples for test, and as many for validation

    @property
    def most_pairs(self) -> int:
        """Return the pairs of every example."""
        return self.pairs

    def check(self) -> None:
        """Refuse lengths without room for the pairs and their keys."""
        if self.pairs < 1 or 4 * self.pairs > self.length:
            raise ValueError(f"{self.pairs} pairs need a length of at least {4 * max(1, self.pairs)}, not {self.length}")
        super().check()

    def draw(self, part: ExamplesPart, count: int, generator: Generator) -> Examples:
        """Draw examples of one length."""
        return self.drawn(part, self.length, self.pairs, count, generator)


@dataclass(frozen=True)
class MixedRecall(PairRecall):
    """Recall values by their keys: lengths of 64 to 256 in training, up to 1,024 and more pairs in validation and test."""

    name = "mixed_recall"
    title = "associative recall, lengths mixed"

    train: int = 180_000  # examples for training, five of nine with 4 pairs
    test: int = 7_000  # examples for test, and as many for validation; a seventh for each number of pairs

    @property
    def length(self) -> int:
        """Return the length of the longest example of test; training examples have up to 256 tokens."""
        return max(length for length, *_ in MIXED_TEST)

    @property
    def most_pairs(self) -> int:
        """Return the pairs of the fullest example of test."""
        return max(pairs for _, pairs, _ in MIXED_TEST)

    def segments(self, part: ExamplesPart) -> list[tuple[int, Draw]]:
        """Return the parts of the mixture."""
        count, parts = (self.train, MIXED_TRAIN) if part == "train" else (self.test, MIXED_TEST)
        whole = sum(share for *_, share in parts)
        return [(-(-count * share // whole), partial(self.drawn, part, length, pairs)) for length, pairs, share in parts]


def _pair_numbers(examples: Examples) -> Tensor:
    """Return the number of the pair that each scored target belongs to."""
    row, column = (examples.targets != IGNORED).nonzero().unbind(1)
    values = examples.tokens[:, 1 : 2 * int(examples.slices["pairs"].max()) : 2]
    return (values[row] == examples.targets[row, column][:, None]).to(torch.uint8).argmax(1)
