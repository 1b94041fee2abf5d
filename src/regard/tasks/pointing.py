"""Answers that are positions of the input, by a pointer network: sorted numbers, convex hulls. Vinyals et al. 2015."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.checks import need
from regard.data.batch import NO_LABEL, Batch, padded
from regard.data.point_sets import SIDE_UNITS, Point, PointedSet, extremes, hull_order, pointed_sets, polygon_area, sorted_order
from regard.decoding import Constraints, beam, generate
from regard.models.pointer import Pointer, pointer
from regard.tasks.pointing_config import Pointing
from regard.tasks.support import device_under, evaluating, in_order
from regard.tasks.task import ENCODER_DECODER, Task
from regard.training.learnable import Step
from regard.training.losses import Loss, cross_entropy

POINTER_TOKENS = 20_000  # points of a batch when nothing is kept for a backward pass
NAMES_SHOWN = 6  # points of the sample that is printed


class PointingTask(Task):
    """Positions of a set of points, one after the other; scored by the share of answers that are right as a whole."""

    best = ("exact", "max")
    bodies = ENCODER_DECODER
    answering = ("beam", "length_penalty")
    steady = True
    dims = 1
    config: Pointing

    def __init__(self, config: Pointing) -> None:
        super().__init__(config)
        need("least", config.least, 3)
        need("examples", config.examples)
        if not config.least <= config.most < config.max_len:
            raise ValueError(f"most must be from least={config.least} to max_len - 1 = {config.max_len - 1}, not {config.most}")

    def unused(self) -> dict[str, str]:
        found = super().unused() | dict.fromkeys(("share", "smoothing"), "models with a vocabulary")
        return found | {"wiring": "decoders that do not point at what they read"}

    def order(self, points: Sequence[Point]) -> tuple[int, ...]:
        """Answer the question."""
        return sorted_order(points)

    def guess(self, points: Sequence[Point]) -> tuple[int, ...]:
        """Answer without a network: the floor."""
        return tuple(range(len(points)))

    def read(self, folder: Path | None = None) -> None:  # noqa: ARG002 - made, not read
        config = self.config
        parts = pointed_sets(self.order, self.dims, least=config.least, most=config.most, train=config.examples)
        self.splits = parts._asdict()
        self.sample = " ".join(map(_written, parts.val[0].points[:NAMES_SHOWN]))

    def size(self, example: PointedSet) -> int:
        return len(example.points) + 1

    def batch(self, examples: Sequence[PointedSet]) -> Batch:
        """Pad sets, with coordinates from -1 to 1, and answers: position j is j + 1, and END is behind them."""
        _, valid = padded([range(len(x.points)) for x in examples], multiple=self.multiple)
        longest = max(len(x.points) for x in examples) if valid is None else valid.shape[1]
        source = torch.zeros(len(examples), longest, self.dims)
        for row, x in enumerate(examples):
            source[row, : len(x.points)] = torch.tensor(x.points) * (2 / SIDE_UNITS) - 1
        answers = [[*(position + 1 for position in x.answer), Pointer.END] for x in examples]
        target, target_valid = padded(answers, NO_LABEL, multiple=self.multiple)
        return Batch(source, valid, target, target_valid)

    def model(self) -> nn.Module:
        return pointer(self.config, self.dims)

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Loss:  # noqa: ARG002 - the same at every update
        assert batch.target is not None
        fed = torch.cat([torch.zeros_like(batch.target[:, :1]), batch.target[:, :-1]], 1).clamp_min(0)
        source = batch.source.to(next(model.parameters()).dtype)
        return cross_entropy(model(source, batch.source_valid, fed, batch.target_valid), batch.target)

    def score(self, model: nn.Module, split: str) -> dict[str, float]:
        examples = self.splits[split]
        found = self._answers(model, examples)
        guesses = [self.guess(x.points) for x in examples]
        return {**self._scores(examples, found), "floor": self._scores(examples, guesses)["exact"]}

    def _scores(self, examples: Sequence[PointedSet], found: Sequence[Sequence[int]]) -> dict[str, float]:
        """Count answers that are right as a whole, and their positions that are."""
        pairs = list(zip(examples, found, strict=True))
        exact = sum(tuple(answer) == x.answer for x, answer in pairs)
        places = sum(a == b for x, answer in pairs for a, b in zip(x.answer, answer, strict=False))
        whole = sum(max(len(x.answer), len(answer)) for x, answer in pairs)
        return {"exact": 100 * exact / max(1, len(pairs)), "places": 100 * places / max(1, whole)}

    def _answers(self, model: Any, examples: Sequence[PointedSet]) -> list[list[int]]:
        """Generate positions, none of them twice."""

        def answer(part: list[PointedSet]) -> list[list[int]]:
            batch = self.batch(part).to(device_under(model))
            source = batch.source.to(next(model.parameters()).dtype)
            state, begin = model.start(source, batch.source_valid), torch.zeros(len(part), 1, dtype=torch.long).to(source.device)
            most = max(len(x.points) for x in part) + 1
            rules = Constraints(Pointer.END, max_new_tokens=most, min_new_tokens=1, no_repeat_ngram_size=1)
            return [[slot - 1 for slot in row] for row in self._search(model, state, begin, rules)]

        with evaluating(model):
            return in_order(examples, self.size, POINTER_TOKENS, answer)

    def _search(self, model: Any, state: Any, begin: Tensor, rules: Constraints) -> list[list[int]]:
        if self.config.beam == 1:
            return generate(model, state, begin, constraints=rules)
        best = beam(model, state, begin, constraints=rules, width=self.config.beam, penalty=self.config.length_penalty)
        return [row[0] if row else [] for row in best.answers(Pointer.END)]

    def predict(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """Answer lines of points with spaces between them, numbers or x,y from 0 to 1, by the same points in their order."""
        written = [line.split() for line in lines]
        sets = [tuple(self._point(word, number) for word in words) for number, words in enumerate(written, 1)]
        for number, points in enumerate(sets, 1):
            if not len(points) < self.config.max_len:
                raise ValueError(f"line {number} has {len(points):,} points, but this model reads {self.config.max_len - 1:,}")
        found = iter(self._answers(model, [PointedSet(points, ()) for points in sets if points]))
        return [" ".join(words[position] for position in next(found)) if words else "" for words in written]

    def _point(self, word: str, number: int) -> Any:
        try:
            point = tuple(float(part) for part in word.split(","))
        except ValueError:
            point = ()
        if len(point) != self.dims or not all(0 <= x <= 1 for x in point):
            form = "a number" if self.dims == 1 else "a point, written x,y,"
            raise ValueError(f"line {number} has {word[:40]!r}, which is not {form} from 0 to 1")
        return tuple(x * SIDE_UNITS for x in point)


class SortingTask(PointingTask):
    """Numbers from the smallest to the largest; the floor is their order in the input."""


class HullTask(PointingTask):
    """Corners of the convex hull, counter-clockwise from the leftmost; the floor is the extreme point of each side.

    An answer that begins elsewhere is right too. `area` is the share of the hull that the answers cover; a polygon that crosses
    itself covers nothing.
    """

    dims = 2

    def order(self, points: Sequence[Point]) -> tuple[int, ...]:
        return hull_order(points)

    def guess(self, points: Sequence[Point]) -> tuple[int, ...]:
        return extremes(points)

    def _scores(self, examples: Sequence[PointedSet], found: Sequence[Sequence[int]]) -> dict[str, float]:
        turned = [_from(answer, x.answer[0]) for x, answer in zip(examples, found, strict=True)]
        shares = [_covered(x, answer) for x, answer in zip(examples, turned, strict=True)]
        return {**super()._scores(examples, turned), "area": 100 * math.fsum(shares) / max(1, len(shares))}


def _from(answer: Sequence[int], first: int) -> list[int]:
    """Turn a closed list so that it begins with one of its positions, if it has it."""
    at = list(answer).index(first) if first in answer else 0
    return [*answer[at:], *answer[:at]]


def _covered(x: PointedSet, answer: Sequence[int]) -> float:
    whole = polygon_area([x.points[position] for position in x.answer])
    return polygon_area([x.points[position] for position in answer]) / whole if whole else 0.0


def _written(point: Point) -> str:
    return ",".join(f"{x / SIDE_UNITS:.4f}" for x in point)
