"""ListOps: the value of nested operators on digits, as a label per sequence. Nangia, Bowman 2018, arXiv:1804.06028.

The generator follows the Long Range Arena (Tay et al. 2020, arXiv:2011.04006): an argument is an operator with probability 1/4,
an operator has 2 to 10 arguments, and operators are nested up to a depth; trees are kept whose length lies between two bounds.
Brackets are tokens. Trees are drawn level by level, many at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from regard.arena.arena_task import IGNORED, ArenaBudget, Examples, SideTargets
from regard.arena.argument_order import DIGIT_VALUES, ExpressionTrees, shuffle_arguments
from regard.arena.generated_task import GeneratedTask
from regard.arena.trivial_floors import PART_READERS, label_by_value, most_frequent, share_right
from regard.options import check_positive

OPERATORS = ("MIN", "MAX", "MED", "SM")  # SM: the sum modulo 10
DIGIT, OPERATOR, CLOSE = 1, 11, 15  # token ids of 0, of [MIN and of ]; 0 is padding
OPERATOR_SHARE = 0.25  # of arguments
TREES = 4096  # drawn at a time
READER_LEVELS = 3  # of operators that the shallow readers evaluate
FLOOR_EXAMPLES = 5000  # of train, which the labels of the root operators are counted on


@dataclass(frozen=True)
class ListOps(GeneratedTask):
    """Evaluate nested MIN, MAX, MED and SM (sum modulo 10) of digits; 10 labels."""

    name: ClassVar[str] = "listops"
    title: ClassVar[str] = "the value of nested operators on digits"
    source: ClassVar[str] = "Nangia, Bowman 2018, arXiv:1804.06028; lengths of Tay et al. 2020, arXiv:2011.04006"
    techniques: ClassVar[tuple[str, ...]] = ("shuffled", "subtrees")
    slice_names: ClassVar[Mapping[str, Sequence[str]]] = {"operator": OPERATORS}

    length: int = 2000  # examples have fewer tokens than this
    shortest: int = 0  # examples have more tokens than this; 0: a quarter of length
    depth: int = 10  # levels of a tree, digits counted: operators are nested one less
    arguments: int = 10  # most arguments of an operator, of 2 or more
    shuffled: bool = False  # training shuffles the arguments of every operator, which changes no value
    subtrees: bool = False  # training asks for the value of every operator too, at its bracket

    def check(self) -> None:
        """Refuse sizes that no tree has."""
        super().check()
        check_positive("length", self.length)
        if not 0 <= self.shortest < self.length - 1:
            raise ValueError(f"shortest must be from 0 to length - 2 = {self.length - 2}, not {self.shortest}")
        for name in ("depth", "arguments"):
            if not 2 <= getattr(self, name) <= 100:
                raise ValueError(f"{name} must be from 2 to 100, not {getattr(self, name)}")
        if self.length < 6:
            raise ValueError(
                f"length must be at least 6, not {self.length}: the least tree has an operator, two digits and a bracket"
            )

    @property
    def vocab(self) -> int:
        """Return the number of token ids: padding, digits, operators, a bracket."""
        return CLOSE + 1

    @property
    def classes(self) -> int:
        """Return the number of digits."""
        return 10

    def draws(self, generator: np.random.Generator) -> Iterator[Examples]:
        """Iterate over batches of trees whose length is within bounds."""
        least = self.shortest or self.length // 4
        while True:
            forest = _Forest(generator, self.depth, self.arguments, self.length)
            kept = (forest.sizes > least) & (forest.sizes < self.length)
            yield forest.examples(np.flatnonzero(kept), self.length)

    def augment(self, tokens: Tensor, targets: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Shuffle the arguments of every operator, if that is asked for."""
        if not self.shuffled:
            return tokens, targets
        return shuffle_arguments(tokens, *_brackets(tokens), self.depth - 1, generator), targets

    @property
    def side_labels(self) -> int:
        """Return the number of values of an operator, if they are asked for."""
        return DIGIT_VALUES if self.subtrees else 0

    def side_targets(self, tokens: Tensor, valid: Tensor | None, generator: Generator | None = None) -> SideTargets:  # noqa: ARG002
        """Ask for the value of every operator at its bracket; nothing is hidden."""
        return SideTargets(tokens, subtree_values(tokens, self.depth - 1))

    def floors(self) -> dict[str, float]:
        """Score the most frequent label, that of the root operator, and readers of the first levels alone."""
        train, test = self.train_and_test(FLOOR_EXAMPLES)
        found = {
            "most frequent label": most_frequent(train.targets, test.targets),
            "most frequent label of the root operator": label_by_value(train, test, "operator"),
        }
        rows = [row.tolist() for row in test.tokens]
        for k in range(1, READER_LEVELS + 1):
            values = torch.tensor([shallow_value(row, k) for row in rows])
            found[f"{PART_READERS[0]}: {k}"] = share_right(values, test.targets)
        return found

    def budget(self) -> ArenaBudget:
        """Return the budget of the published re-run: 5,000 steps of 32."""
        return ArenaBudget(steps=5000, batch=32)


def subtree_values(tokens: Tensor, depth: int) -> Tensor:
    """Return the value of every operator at its bracket (b n), IGNORED at other tokens; at most `depth` operators are nested."""
    opens, closes = _brackets(tokens)
    operator = (tokens.long() - OPERATOR).clamp(0, len(OPERATORS) - 1)
    digits = torch.where((tokens >= DIGIT) & (tokens < OPERATOR), tokens.long() - DIGIT, -1)
    values = ExpressionTrees(opens, closes, depth).bracket_values(digits, lambda counts: _values_of(counts, operator))
    return torch.where(closes, values, IGNORED)


def _brackets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return where operators begin, and where their brackets are."""
    return (tokens >= OPERATOR) & (tokens < CLOSE), tokens == CLOSE


def _values_of(counts: Tensor, operator: Tensor) -> Tensor:
    """Return the value of each operator (...), given how often each digit is an argument (..., 10); see `operator_values`."""
    below = counts.cumsum(-1, dtype=torch.int32)
    total = below[..., -1:]
    lower, upper = ((below < bound).sum(-1) for bound in ((total + 1) // 2, total // 2 + 1))
    there = counts > 0
    digits = torch.arange(DIGIT_VALUES, device=counts.device)
    least = torch.where(there, digits, DIGIT_VALUES - 1).amin(-1)
    most = torch.where(there, digits, 0).amax(-1)
    ways = [least, most, (lower + upper) // 2, (counts * digits).sum(-1) % DIGIT_VALUES]
    return torch.stack(ways, -1).gather(-1, operator.unsqueeze(-1)).squeeze(-1)


def shallow_value(tokens: list[int], levels: int) -> int:
    """Evaluate one tree down to some levels of operators; what is nested deeper is left out. -1 where no digit is left."""
    stack: list[tuple[int, list[int]]] = []
    for token in tokens:
        if token == CLOSE:
            operator, digits = stack.pop()
            value = _operator_value(operator, digits) if digits and len(stack) < levels else -1
            if not stack:
                return value
            stack[-1][1].extend([value] if value >= 0 else [])
        elif token >= OPERATOR:
            stack.append((token - OPERATOR, []))
        else:
            stack[-1][1].append(token - DIGIT)
    raise ValueError("a tree ends with the bracket of its first operator")


def _operator_value(operator: int, digits: list[int]) -> int:
    name = OPERATORS[operator]
    if name == "MED":
        return int(median(digits))
    if name == "SM":
        return sum(digits) % 10
    return min(digits) if name == "MIN" else max(digits)


class _Level:
    """Hold the operators of one level of many trees, and their arguments one after another."""

    def __init__(self, generator: np.random.Generator, tree: np.ndarray, most: int, last: bool) -> None:
        self.tree = tree  # of each operator
        self.operator = generator.integers(len(OPERATORS), size=len(tree), dtype=np.uint8)
        self.counts = generator.integers(2, most + 1, size=len(tree), dtype=np.int64)
        self.ends = self.counts.cumsum()
        self.parent = np.repeat(np.arange(len(tree)), self.counts)  # of each argument
        self.nested = generator.random(len(self.parent), dtype=np.float32) < (0 if last else OPERATOR_SHARE)
        self.value = generator.integers(10, size=len(self.parent), dtype=np.uint8)  # of digits; of operators, once evaluated
        self.sizes = np.zeros(0, np.int64)  # tokens of each operator with all below it

    def keep(self, alive: np.ndarray) -> None:
        """Drop the operators of other trees."""
        kept = alive[self.tree]
        inside = kept[self.parent]
        self.tree, self.operator, self.counts = self.tree[kept], self.operator[kept], self.counts[kept]
        self.nested, self.value, self.ends = self.nested[inside], self.value[inside], self.counts.cumsum()
        self.parent = np.repeat(np.arange(len(self.tree)), self.counts)

    def sums(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sum over the arguments of each operator."""
        total = np.concatenate([[0], numbers.cumsum()])
        return total[self.ends] - total[self.ends - self.counts]

    def argument_sizes(self, below: np.ndarray) -> np.ndarray:
        """Return the tokens of each argument: those of the operators below, 1 for a digit."""
        sizes = np.ones(len(self.parent), np.int64)
        sizes[self.nested] = below
        return sizes

    def evaluate(self, value: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Return the value of each operator on the arguments that count, -1 where none does."""
        cells = self.parent[counted] * 10 + value[counted]
        return operator_values(np.bincount(cells, minlength=10 * len(self.tree)).reshape(-1, 10), self.operator)


def operator_values(counts: np.ndarray, operator: np.ndarray) -> np.ndarray:
    """Return the values of operators, given how often each digit is an argument (operators, 10); -1 without arguments."""
    total = counts.sum(1)
    below = counts.cumsum(1)
    lower = (below < (total[:, None] + 1) // 2).sum(1)
    upper = (below < total[:, None] // 2 + 1).sum(1)
    there = counts > 0
    values = [there.argmax(1), 9 - there[:, ::-1].argmax(1), (lower + upper) // 2, counts @ np.arange(10) % 10]
    return np.where(total > 0, np.stack(values)[operator, np.arange(len(operator))], -1)


class _Forest:
    """Draw many trees at a time; those that grow beyond `most` tokens are not finished."""

    def __init__(self, generator: np.random.Generator, depth: int, arguments: int, most: int) -> None:
        self.levels: list[_Level] = []
        self.sizes = np.ones(TREES, np.int64)  # tokens of each tree
        tree = np.arange(TREES)
        for level in range(1, depth):
            self.levels.append(made := _Level(generator, tree, arguments, level == depth - 1))
            self.sizes += np.bincount(tree, made.counts + 1, TREES).astype(np.int64)
            owner = tree[made.parent[made.nested]]
            tree = owner[self.sizes[owner] < most]
            made.nested[np.flatnonzero(made.nested)[self.sizes[owner] >= most]] = False

    def examples(self, trees: np.ndarray, length: int) -> Examples:
        """Return some of the trees as examples; none may be unfinished."""
        alive = np.zeros(TREES, bool)
        alive[trees] = True
        for level in self.levels:
            level.keep(alive)
        row = np.zeros(TREES, np.int64)
        row[trees] = np.arange(len(trees))
        value = self._values(len(self.levels))
        wrong = [self._values(k) != value for k in range(1, READER_LEVELS + 1)]
        slices = {
            "operator": self.levels[0].operator,
            "depth": self._depths(row, len(trees)),
            "levels": 1
            + np.maximum.reduce([wrong[k] * (k + 1) for k in range(READER_LEVELS)]),  # from so many on, readers are right
            "tokens": self.sizes[trees] * 4 // length * length // 4,
        }
        tokens = self._write(row, len(trees), length)
        kept = {name: torch.from_numpy(found.astype(np.int32)) for name, found in slices.items()}
        return Examples(torch.from_numpy(tokens), torch.from_numpy(value), torch.from_numpy(self.sizes[trees]).int(), kept)

    def _values(self, count: int) -> np.ndarray:
        """Evaluate the first levels of each tree; what is nested deeper is left out."""
        below = np.zeros(0, np.int64)
        for number, level in reversed(list(enumerate(self.levels[:count], 1))):
            value, counted = level.value.astype(np.int64), ~level.nested
            if number < count:
                value[level.nested] = below
                counted = value >= 0
            below = level.evaluate(value, counted)
        return below

    def _depths(self, row: np.ndarray, count: int) -> np.ndarray:
        """Return how deeply operators are nested in each tree."""
        depths = np.zeros(count, np.int64)
        for number, level in enumerate(self.levels, 1):
            depths[row[level.tree]] = number
        return depths

    def _write(self, row: np.ndarray, count: int, length: int) -> np.ndarray:
        """Return the tokens of each tree: [operator, arguments, ]."""
        below = np.zeros(0, np.int64)
        for level in reversed(self.levels):
            below = level.sizes = 2 + level.sums(level.argument_sizes(below))
        tokens = np.zeros((count, length), np.uint8)
        start = np.zeros(count, np.int64)  # of each operator of a level, in its tree
        for level, sizes in zip(self.levels, [x.sizes for x in self.levels[1:]] + [below[:0]], strict=True):
            rows = row[level.tree]
            tokens[rows, start] = OPERATOR + level.operator
            tokens[rows, start + level.sizes - 1] = CLOSE
            width = level.argument_sizes(sizes)
            before = width.cumsum() - width
            inside = before - before[level.ends - level.counts][level.parent]
            place = start[level.parent] + 1 + inside
            digits = ~level.nested
            tokens[rows[level.parent[digits]], place[digits]] = DIGIT + level.value[digits]
            start = place[level.nested]
        return tokens
