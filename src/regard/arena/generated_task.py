"""Tasks that are drawn from a seed: test first, then validation without its examples, then training without either."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.arena.arena_task import ArenaTask, Examples, ExamplesPart
from regard.arena.split_cache import cached_split, split_key
from regard.options import check_positive

DRAW_ORDER: tuple[ExamplesPart, ...] = ("test", "val", "train")  # the small splits need not wait for the large one
PATIENCE = 20  # draws without a new example, before there seem to be no more


@dataclass(frozen=True)
class GeneratedTask(ArenaTask):
    """Draw splits of a given size. A subclass defines `draws`: batches of examples without an end."""

    train: int = 96000  # examples
    val: int = 2000  # examples
    test: int = 2000  # examples
    seed: int = 1  # of the generator

    def check(self) -> None:
        """Refuse splits without examples and seeds below 0."""
        for name in DRAW_ORDER:
            check_positive(name, getattr(self, name))
        if self.seed < 0:
            raise ValueError(f"seed must not be below 0, but it is {self.seed}")

    @abstractmethod
    def draws(self, generator: np.random.Generator) -> Iterator[Examples]:
        """Iterate over batches of examples, some of which may be equal."""

    def examples(self, part: ExamplesPart) -> Examples:
        """Return one split; its examples differ from each other and from those of the other splits."""
        return cached_split(split_key(self, part), lambda: self.first_examples(part, getattr(self, part)))

    def first_examples(self, part: ExamplesPart, count: int) -> Examples:
        """Return the first examples of a split, without drawing the others of it."""
        if part not in DRAW_ORDER:
            raise ValueError(f"a split is one of {', '.join(DRAW_ORDER)}, not {part!r}")
        return self._drawn(part, count)[part]

    def train_and_test(self, most: int) -> tuple[Examples, Examples]:
        """Return the first examples of train, at most so many, and all of test: what floors are fitted to and scored on."""
        found = self._drawn("train", min(most, self.train))
        return found["train"], found["test"]

    def _drawn(self, last: ExamplesPart, count: int) -> dict[ExamplesPart, Examples]:
        """Draw splits up to one of them, and so many examples of that."""
        taken: set[bytes] = set()
        found: dict[ExamplesPart, Examples] = {}
        for number, name in enumerate(DRAW_ORDER):
            stream = self.draws(np.random.default_rng([self.seed, number]))
            found[name] = distinct_examples(stream, count if name == last else getattr(self, name), taken, str(self))
            if name == last:
                break
        return found


def distinct_examples(stream: Iterable[Examples], count: int, taken: set[bytes], name: str) -> Examples:
    """Collect examples whose tokens are not in `taken`, and add them to it. ValueError if a stream has too few of them."""
    found: list[Examples] = []
    have = without = 0
    for batch in stream:
        fresh = new_rows(batch.tokens, taken, count - have)
        without = 0 if fresh else without + 1
        if fresh:
            found.append(select_examples(batch, torch.tensor(fresh)))
        have += len(fresh)
        if have == count:
            return join_examples(found)
        if without == PATIENCE:
            break
    raise ValueError(f"{name} has no {count:,} different examples beside those of other splits: {have:,} were found")


def new_rows(tokens: Tensor, taken: set[bytes], most: int | None = None) -> list[int]:
    """Return the indices of rows that are not in `taken`, at most so many, and add their digests to it."""
    fresh: list[int] = []
    for row, key in enumerate(row_digests(tokens)):
        if len(fresh) == most:
            break
        if key not in taken:
            taken.add(key)
            fresh.append(row)
    return fresh


def row_digests(tokens: Tensor) -> Iterator[bytes]:
    """Iterate over a digest of the tokens of each example."""
    rows = tokens.contiguous().numpy()
    return (hashlib.blake2b(row.data, digest_size=16).digest() for row in rows)


def select_examples(examples: Examples, index: Tensor) -> Examples:
    """Return the examples of an index, with their lengths and slices."""
    lengths = None if examples.lengths is None else examples.lengths[index]
    slices = {name: values[index] for name, values in examples.slices.items()}
    return Examples(examples.tokens[index], examples.targets[index], lengths, slices)


def join_examples(parts: list[Examples]) -> Examples:
    """Concatenate parts of one split."""
    tokens = torch.cat([part.tokens for part in parts])
    targets = torch.cat([part.targets for part in parts])
    known = [part.lengths for part in parts if part.lengths is not None]
    slices = {name: torch.cat([part.slices[name] for part in parts]) for name in parts[0].slices}
    return Examples(tokens, targets, torch.cat(known) if known else None, slices)
