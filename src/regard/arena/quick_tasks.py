"""Tasks small enough for a comparison on two CPU cores, without data: seconds a mechanism, and softmax solves them."""

from __future__ import annotations

from typing import NamedTuple

from regard.arena.arena_task import ArenaBudget, ArenaModel


class QuickTask(NamedTuple):
    """Hold a task by its text, and what it is compared with instead of the usual model and budget."""

    task: str
    model: ArenaModel
    budget: ArenaBudget


CONVOLVED = ArenaModel(positions="none", conv=3)

QUICK_TASKS = (
    QuickTask("recall(length=64, pairs=8, vocab=128, train=20000, test=500)", CONVOLVED, ArenaBudget(200, 64, (1e-2,))),
    QuickTask("induction(length=64, test=500)", CONVOLVED, ArenaBudget(200, 64, (1e-2,))),
    QuickTask("selective_copy(length=48, copied=4, symbols=8, test=500)", ArenaModel(conv=3), ArenaBudget(300, 64, (5e-3,))),
)
