"""Which cells are trained as one: those of one task and mechanism that differ in learning rate and seed, if models allow it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from regard.arena.arena_task import ArenaModel, ArenaTask
from regard.compare.compared_model import build_model, is_causal
from regard.compare.grid_plan import Cell
from regard.compare.own_code import read_task
from regard.compare.stacked_layers import HeadStack
from regard.compare.stacked_model import CannotStack, StackedModel
from regard.compare.stacked_step import STACKED_TOKENS

MOST_STACKED = 32  # models
NARROW = 4  # width of feed-forward layers, for a model without weights
_REFUSALS: dict[Hashable, str] = {}
SIDE_BY_SIDE, AS_HEADS = "sequences side by side", "heads side by side"


def stack_size(cell: Cell) -> int:
    """Return how many cells of the group of this one may be trained as one; 1 where each is trained by itself."""
    tokens = cell.usual.batch * cell.length
    room = min(MOST_STACKED, STACKED_TOKENS // max(1, tokens))
    timed = cell.grid.seconds is not None  # a budget of seconds is that of one model
    if timed or cell.usual.buckets > 1 or room < 2:
        return 1
    return 1 if _refusal(cell) else room


def _refusal(cell: Cell) -> str:
    """Return why models of a cell cannot be one; tasks of one form have the same answer, and so have all widths."""
    task = read_task(cell.task, cell.grid.files)
    model = replace(cell.model, ffn=min(cell.model.ffn, NARROW))
    key = (task.form, bool(task.masked), is_causal(task), cell.mixer, model)
    if key not in _REFUSALS:
        _REFUSALS[key] = stack_form(task, cell.mixer, model)[1]
    return _REFUSALS[key]


def stack_form(task: ArenaTask, mixer: str, model: ArenaModel) -> tuple[str, str]:
    """Return how several models of a mechanism are one, and why they cannot be: one of both is empty. Makes no weights."""
    with torch.device("meta"):
        try:
            made = StackedModel([build_model(task, mixer, model) for _ in range(2)])
        except CannotStack as error:
            return "", str(error)
    by_heads = any(isinstance(part, HeadStack) for part in made.modules())
    return AS_HEADS if by_heads else SIDE_BY_SIDE, ""


def stacks(cells: Sequence[Cell], size: int) -> list[Sequence[Cell]]:
    """Divide cells into as few stacks as there can be, of about equal sizes."""
    count = -(-len(cells) // size)
    return [cells[len(cells) * n // count : len(cells) * (n + 1) // count] for n in range(count)]
