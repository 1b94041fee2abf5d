"""The tasks of the arena: sizes of their splits, and what they score without attention.

python benchmarks/arena_floors.py                        all tasks, as they are and in the forms of FORMS
python benchmarks/arena_floors.py listops image          those alone; the other rows of the file stay

Tasks that are read need REGARD_DATA. Writes results/arena_floors.json after each task.
"""

from __future__ import annotations

import json
import time
from typing import Any

from common import RESULTS, Progress, only_words, save
from regard.arena.arena_catalogue import ARENA, arena_task
from regard.arena.generated_task import GeneratedTask

FORMS = (
    "text(length=1024)",
    'retrieval(split="documents")',
    "pathfinder(contour=6)",
    "pathfinder(contour=9)",
)


def row(text: str) -> dict[str, Any]:
    task = arena_task(text)
    sizes = {part: getattr(task, part, 0) or len(task.examples(part).targets) for part in ("train", "val", "test")}
    few = task.first_examples("test", 1) if isinstance(task, GeneratedTask) else task.examples("test")
    start = time.process_time()
    floors = task.floors()
    return {
        "task": text,
        "form": task.form,
        "metric": task.metric,
        "n": task.length,
        "vocab": task.vocab,
        "classes": task.classes,
        **sizes,
        "slices": list(few.slices),
        "floors": floors,
        "floor_seconds": round(time.process_time() - start, 2),
    }


def main() -> None:
    every = [*ARENA, *FORMS]
    chosen = only_words(__doc__, "tasks") or every
    path = RESULTS / "arena_floors.json"
    rows = {x["task"]: x for x in json.loads(path.read_text())["rows"]} if path.exists() else {}
    shown = Progress(len(chosen))
    for text in chosen:
        rows[text] = row(text)
        save("arena_floors", {}, sorted(rows.values(), key=lambda x: x["task"]))
        shown.step(text)


if __name__ == "__main__":
    main()
