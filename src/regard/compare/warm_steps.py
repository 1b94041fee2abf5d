"""Captured training steps that are used again: the next cell of the same model needs other weights, and no new CUDA graph."""

from __future__ import annotations

from regard.compare.compared_model import ComparedModel
from regard.compare.grid_plan import Cell
from regard.compare.training_step import TrainingStep

KEPT_STEPS = 8  # that no cell uses; memory of their graphs stays allocated


class WarmSteps:
    """Hold captured steps that no cell uses, the newest last. Cells differ in their learning rate and seed alone."""

    def __init__(self, most: int = KEPT_STEPS) -> None:
        self.most = most
        self.idle: list[tuple[str, TrainingStep]] = []

    def take(self, cell: Cell, model: ComparedModel) -> TrainingStep | None:
        """Return a step that was captured for another cell of this model, with the weights of `model`; None if there is none."""
        shape = _shape(cell)
        for place, (key, step) in enumerate(self.idle):
            if key == shape:
                del self.idle[place]
                step.restart(model)
                return step
        return None

    def give(self, cell: Cell, step: TrainingStep) -> None:
        """Keep the step of a cell that is done, if it was captured."""
        if step.captured:
            self.idle = [*self.idle, (_shape(cell), step)][-self.most :]


def _shape(cell: Cell) -> str:
    """Return the key that cells of equal settings share, whatever their learning rate and seed."""
    return cell.at(0.0, 0).key
