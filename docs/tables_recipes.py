"""The table of techniques of training, from results/recipes.json."""

from __future__ import annotations

from tables_base import Made, code, not_yet, table


def recipes(made: Made) -> str:
    """What every tested cell scored, with the techniques that were on; the best of each task first."""
    if not made["rows"]:
        return not_yet("recipes.py FOLDER")
    head = ["task", "mechanism", "techniques", "model", "rate", "steps of", "minutes", "validation", "test", "floors on test"]
    body = []
    for r in sorted(made["rows"], key=lambda x: (x["task"], -x["test"])):
        model = f"{r['model']['depth']} x {r['model']['width']}, {r['parameters']:,} weights"
        steps = f"{r['steps']:,} of {r['budget']['batch']}"
        floors = ", ".join(f"{100 * x:.1f}" for x in sorted(r["floors"].values()))
        scores = [f"{100 * r['val']:.1f}", f"**{100 * r['test']:.1f}**"]
        minutes = f"{r['train_seconds'] / 60:.1f}"
        body.append(
            [
                code(r["task"]),
                code(r["mixer"]),
                ", ".join(r["techniques"]),
                model,
                f"{r['lr']:g}",
                steps,
                minutes,
                *scores,
                floors,
            ]
        )
    machines = sorted({f"{r['made_with']['device']}, torch {r['made_with']['torch']}, {r['dtype']}" for r in made["rows"]})
    text = f"Seed 0; minutes of training steps, beside other trainings on the same card ({'; '.join(machines)})."
    return f"{text} Floors are those of the table above, in the order of their scores.\n\n{table(head, body)}"
