"""Training of several cells as one: each has its own learning rate, batches, curve, best weights and end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from regard.compare.batch_order import BatchOrder
from regard.compare.cell_record import is_better
from regard.compare.cell_training import CellBudget, CellTraining, TrainedCell, batch_groups, is_learned, rate_factor
from regard.compare.device_split import DeviceSplit
from regard.compare.split_score import mean_points
from regard.compare.stacked_step import StackedOrder, StackedStep, stacked_points


class StackedTraining(CellTraining):
    """Train the models of a step together and keep the best weights of each: as a `CellTraining` of each does.

    A model whose loss is not finite, or whose score ends its training early, stays in the step, and nothing more is kept of it.
    """

    def __init__(
        self,
        step: StackedStep,
        val: DeviceSplit,
        budget: CellBudget,
        seeds: Sequence[int],
        report: Callable[[float], None] | None = None,
    ) -> None:
        self.step, self.val, self.budget, self.report = step, val, budget, report  # type: ignore[assignment]
        self.stacked, self.metric = step, step.task.metric
        groups, host = batch_groups(step.split, budget.usual), step.split.tokens.new_empty(0).cpu().device
        orders = [BatchOrder(groups, budget.usual.batch, seed, host) for seed in seeds]
        self.order = StackedOrder(orders, step.device)  # type: ignore[assignment]
        self.found = TrainedCell(note=step.note)  # steps and seconds of all
        self.each = [TrainedCell() for _ in seeds]
        self.best: list[dict[str, Tensor]] = [{} for _ in seeds]
        self.diverged: dict[int, str] = {}  # reasons, by number of the model
        self.learned: set[int] = set()

    def trained(self, number: int) -> TrainedCell:
        """Return the outcome of one model, with its share of the time."""
        found = self.each[number]
        found.note, found.seconds = self.found.note, found.seconds
        if self.best[number]:
            found.weights = self.stacked.model.weights_of(self.best[number])
        return found

    @property
    def going(self) -> list[int]:
        """Return the numbers of the models that are still trained."""
        return [number for number in range(len(self.each)) if number not in self.diverged and number not in self.learned]

    def _step(self) -> None:
        found = self.found
        factor = rate_factor(min(1.0, (found.steps + 1) / self.budget.total), self.budget.usual.warmup)
        self.step(self.order(found.steps), factor)
        found.steps += 1

    def _wait(self) -> None:
        """Wait for the device, and end the training of models whose loss is not finite."""
        losses = self.stacked.total_loss.tolist()
        for number in self.going:
            if not math.isfinite(losses[number]):
                self.diverged[number] = f"the loss was not finite at step {self.found.steps}: a smaller learning rate may help"

    def _evaluate(self) -> None:
        step, done, seconds = self.stacked, self.found.steps, self.found.seconds / len(self.each)
        losses = step.mean_losses()
        points = stacked_points(step.model, self.val, self.metric, step.dtype)
        for number in self.going:
            found, score = self.each[number], mean_points(points[number])
            found.steps, found.seconds = done, seconds
            found.curve.append((done, losses[number], score, seconds))
            if is_better(self.metric, score, found.val):
                found.val = score
                self.best[number] = step.model.row(number)
            if is_learned(self.budget, self.metric, found.val):
                self.learned.add(number)

    def _is_learned(self) -> bool:
        """Return whether no model is left to train."""
        return not self.going
