"""The table of the arena's tasks, from results/arena_floors.json."""

from __future__ import annotations

from tables_base import Made, code, not_yet, table


def arena_tasks(made: Made) -> str:
    """Sizes of every task, and its floors beside them."""
    if not made["rows"]:
        return not_yet("arena_floors.py")
    head = ["task", "form", "n", "classes", "train / val / test", "slices", "floors on test"]
    body = []
    for r in made["rows"]:
        sizes = " / ".join(f"{r[part]:,}" for part in ("train", "val", "test"))
        floors = "<br>".join(f"{name} {_score(value, r['metric'])}" for name, value in r["floors"].items())
        body.append([code(r["task"]), r["form"], f"{r['n']:,}", r["classes"], sizes, ", ".join(r["slices"]), floors])
    return table(head, body)


def _score(value: float, metric: str) -> str:
    """A share in percent; other metrics as they are."""
    return f"**{100 * value:.1f}**" if metric == "accuracy" else f"**{value:.3f}** {metric}"
