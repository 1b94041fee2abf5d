"""Join the records of comparisons whose training had techniques: a row for each tested cell, with what was on.

    python benchmarks/recipes.py FOLDER_OR_ARCHIVE ...

Folders are those that `regard compare --out` wrote, archives (.tgz) have one or more of them inside. Rows of the same cell
replace earlier ones. Writes results/recipes.json; docs/arena.md has the table.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import RESULTS, only_words, save
from regard.arena.arena_catalogue import arena_task, short_task
from regard.arena.arena_task import ArenaBudget, ArenaModel
from regard.compare.cell_record import CellRecord

ON_MODELS = ("positions", "conv", "pooling")  # fields of a model that are techniques
KEPT = (
    "key",
    "mixer",
    "family",
    "lr",
    "seed",
    "parameters",
    "val",
    "test",
    "test_count",
    "floors",
    "curve",
    "train_seconds",
    "slices",
)


def techniques(record: CellRecord) -> list[str]:
    """Name what was on: options of the task, then of the model and its batches, as they are written on the command line."""
    task = arena_task(record.task)
    found = [f"{name}={getattr(task, name)}" for name in task.techniques if getattr(task, name)]
    usual = asdict(ArenaModel())
    model, budget = record.settings["model"], record.settings["budget"]
    found += [f"{name}={model[name]}" for name in ON_MODELS if model.get(name, usual[name]) != usual[name]]
    buckets = budget.get("buckets", ArenaBudget().buckets)
    return found + ([f"buckets={buckets}"] if buckets > 1 else [])


def row(record: CellRecord) -> dict[str, Any]:
    plain = record.to_json()
    settings = record.settings
    return {
        "task": short_task(str(arena_task(record.task).plain())),
        "techniques": techniques(record),
        **{name: plain[name] for name in KEPT},
        **{name: settings.get(name) for name in ("model", "budget", "steps", "graph", "dtype", "made_with")},
    }


def records(source: Path) -> list[CellRecord]:
    """Read the tested cells of a folder or of an archive."""
    if source.is_dir():
        found = [CellRecord.from_json(json.loads(path.read_text())) for path in sorted(source.rglob("cells/*.json"))]
        return [record for record in found if record.final]
    with tempfile.TemporaryDirectory() as folder, tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
        return records(Path(folder))


def main() -> None:
    path = RESULTS / "recipes.json"
    rows = {x["key"]: x for x in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for source in only_words(__doc__, "sources", nargs="+"):
        found = [row(record) for record in records(Path(source))]
        rows |= {x["key"]: x for x in found}
        print(f"{source}: {len(found)} tested cells")
    save("recipes", {}, sorted(rows.values(), key=lambda x: (x["task"], x["mixer"], x["techniques"], x["seed"])))


if __name__ == "__main__":
    main()
