"""Draws scores on long texts against the speed of models at that length, the dots are memory, into docs/lra.png.

python docs/make_lra.py          from results/arena_lra.json and results/bench_models.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regard.plots.comparison_plot import AxesWords, Bubble, bubble_plot

RESULTS = Path(__file__).parents[1] / "results"
TASK, LENGTH = "text", 4096
WINDOWS = {"Local": "Local(256)"}  # a mechanism with a window of another size in the models that were timed


def name_of(spec: str) -> str:
    return spec.partition("(")[0]


def bubbles(scores: dict[str, Any], models: dict[str, Any]) -> list[Bubble]:
    """Return the mechanisms that are in both files: scores on the task, speed and memory of an encoder at its length."""
    timed = {r["spec"]: r for r in models["rows"] if r["model"] == "encoder" and r["n"] == LENGTH and "tokens_per_second" in r}
    by_name = {name_of(spec): row for spec, row in timed.items()} | {name: timed[spec] for name, spec in WINDOWS.items()}
    number = next(place for place, task in enumerate(scores["settings"]["tasks"]) if name_of(task["task"]) == TASK)
    found = []
    for row in scores["rows"]:
        model = by_name.get(name_of(row["mixer"]))
        if row["task"] == number and "score" in row and model is not None:
            parts = row["score"], row["low"], row["high"]
            speed, memory = model["tokens_per_second"] / 1e6, model["peak_bytes"]
            found.append(Bubble(name_of(row["mixer"]), row["family"], speed, *(100 * x for x in parts), memory))
    return found


def main() -> None:
    scores, models = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("arena_lra", "bench_models"))
    words = AxesWords(
        "Reviews of 4,096 bytes: accuracy of small equal models against the speed of a six-layer encoder at that length",
        "million tokens a second, training on an H200 (area: memory of a pass)",
        "% right on test",
    )
    figure = bubble_plot(bubbles(scores, models), words)
    out = Path(__file__).with_name("lra.png")
    figure.savefig(out)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
