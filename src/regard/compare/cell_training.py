"""Training of one cell: warm-up and one cosine over a budget of steps or seconds, validated at equal distances."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from regard.arena.arena_task import ArenaBudget
from regard.compare.batch_order import BatchGroup, BatchOrder, length_groups, one_group
from regard.compare.cell_record import is_better
from regard.compare.device_split import DeviceSplit
from regard.compare.split_score import mean_points, target_points
from regard.compare.training_step import TrainingStep

CHECKED = 25  # steps between two readings of the clock and of the loss
TURN = 0.02  # seconds in which a cell that shares a GPU may start steps, before the next cell may: those not captured are slow
EVALUATED = {"cpu": 4, "cuda": 16}  # batches of training in one of evaluation


class Diverged(ValueError):
    """Report a loss that is not finite."""


@dataclass(frozen=True)
class CellBudget:
    """Hold how long a cell is trained: so many steps, or so many seconds of steps."""

    usual: ArenaBudget
    steps: int | None = None  # that of the task unless given
    seconds: float | None = None

    @property
    def total(self) -> float:
        """Return the end of the schedule, in steps or in seconds."""
        return self.seconds if self.seconds is not None else float(self.steps or self.usual.steps)


@dataclass
class TrainedCell:
    """Hold the outcome of a training."""

    curve: list[tuple[int, float, float, float]] = field(default_factory=list)
    val: float | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)  # of the best evaluation
    steps: int = 0
    seconds: float = 0.0
    note: str = ""  # why steps were not captured as a CUDA graph


def rate_factor(done: float, warmup: float) -> float:
    """Return the share of the learning rate at a part of the budget from 0 to 1: linear warm-up, then a cosine to 0."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / max(1 - warmup, 1e-9)))


def batch_groups(split: DeviceSplit, usual: ArenaBudget) -> list[BatchGroup]:
    """Divide training examples into groups of about one length, as many as the budget asks for."""
    if usual.buckets < 2 or split.lengths is None:
        return one_group(len(split))
    if split.targets.dim() > 1:
        raise ValueError("buckets are for tasks with one label an example: use buckets=1")
    lengths = split.lengths if split.lengths.dim() == 1 else split.lengths.amax(1)
    return length_groups(lengths, usual.buckets, usual.batch, split.tokens.shape[-1])


class CellTraining:
    """Train one model and keep its best weights on validation. `report` gets the share of the budget that is done."""

    def __init__(
        self,
        step: TrainingStep,
        val: DeviceSplit,
        budget: CellBudget,
        lr: float,
        seed: int,
        report: Callable[[float], None] | None = None,
    ) -> None:
        self.step, self.val, self.budget, self.lr, self.report = step, val, budget, lr, report
        self.order = BatchOrder(batch_groups(step.split, budget.usual), budget.usual.batch, seed, step.device)
        self.metric = step.task.metric
        self.found = TrainedCell(note=step.note)

    def run(self) -> TrainedCell:
        """Train to the end of the budget. Raises Diverged where the loss is not finite."""
        for _ in self.parts():
            pass
        return self.found

    def parts(self) -> Iterator[None]:
        """Train, with a stop behind every few steps that were started: other cells may start theirs before these are done."""
        count = self.budget.usual.evaluations
        for number in range(1, count + 1):
            before = self.found.steps
            yield from self._train_to(self.budget.total * number / count)
            if self.found.steps == before:  # more evaluations than steps: these weights have a score
                continue
            with self.step.on_stream():
                self._evaluate()
            if self._is_learned():
                break
        self.step.join()
        self.found.note = self.step.note

    def _is_learned(self) -> bool:
        """Return whether the score is one that ends training early."""
        stop, best = self.budget.usual.stop, self.found.val
        return stop > 0 and best is not None and not is_better(self.metric, stop, best)

    def _train_to(self, end: float) -> Iterator[None]:
        """Make steps until so much of the budget is used, CHECKED of them between two readings of the clock."""
        found, by_time = self.found, self.budget.seconds is not None
        while (found.seconds if by_time else found.steps) < end:
            count = CHECKED if by_time else min(CHECKED, math.ceil(end) - found.steps)
            warm = self._next_is_cold()
            begun = time.perf_counter()
            with self.step.on_stream():
                self._step()
                while (count := count - 1) and not warm and not self._next_is_cold():
                    self._step()
                    if self.step.on_card and time.perf_counter() - begun > TURN:
                        break
            yield
            with self.step.on_stream():
                self._wait()
            found.seconds += 0.0 if warm else time.perf_counter() - begun
            if self.report is not None:
                self.report(min(1.0, self._share()))

    def _next_is_cold(self) -> bool:
        """Return whether the next step is one of those before a capture, whose time does not count."""
        return not self.step.is_warm(self.order.length(self.found.steps))

    def _step(self) -> None:
        found = self.found
        share = (found.steps + 1) / self.budget.total if self.budget.seconds is None else self._share()
        rate = self.lr * rate_factor(min(1.0, share), self.budget.usual.warmup)
        self.step(self.order(found.steps), rate, self.order.length(found.steps))
        found.steps += 1

    def _share(self) -> float:
        used = self.found.steps if self.budget.seconds is None else self.found.seconds
        return used / self.budget.total

    def _wait(self) -> None:
        """Wait for the device, and stop where the loss is not finite."""
        if not math.isfinite(float(self.step.total_loss)):
            raise Diverged(f"the loss was not finite at step {self.found.steps}: a smaller learning rate may help")

    def _evaluate(self) -> None:
        found, step = self.found, self.step
        loss = step.mean_loss()
        batch = EVALUATED[step.device.type] * self.budget.usual.batch
        score = mean_points(target_points(step.model, self.val, self.metric, batch, step.dtype))
        found.curve.append((found.steps, loss, score, found.seconds))
        if is_better(self.metric, score, found.val):
            found.val = score
            found.weights = {name: x.detach().clone() for name, x in step.model.state_dict().items()}
