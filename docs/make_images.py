"""Draws the accuracy of a CNN, a ViT and a hybrid by the number of training images, into docs/images.png.

python docs/make_images.py       from results/images.json
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from regard.plots.colours import GREY, INK, LINE
from tables_images import curve_parts

RESULTS = Path(__file__).parents[1] / "results"
NAMES = {
    "cnn": ("CNN", "#1d4ed8"),
    "hybrid": ("convolutions, then attention", "#7e22ce"),
    "vit": ("attention over patches (ViT)", "#c2410c"),
}
Curve = list[tuple[int, float]]  # training images, % right on test


def curves(rows: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return the points of each model, means over seeds, few images first; of several ways of training that with most points."""
    found: dict[str, dict[int, list[float]]] = {}
    for own in curve_parts([row for row in rows if row["part"] == "curve"])[:1]:
        for row in own:
            found.setdefault(row["model"], {}).setdefault(row["train_images"], []).append(row["test"])
    return {name: [(count, fmean(scores)) for count, scores in sorted(points.items())] for name, points in found.items()}


def draw(found: dict[str, Curve], floor: tuple[str, float]) -> Figure:
    figure = Figure(figsize=(8.4, 4.4), dpi=150, facecolor="white")
    axes = figure.add_axes((0.09, 0.14, 0.62, 0.68))
    heights: list[float] = []
    for name, curve in sorted(found.items(), key=lambda item: item[1][-1][1]):
        label, colour = NAMES[name]
        counts, scores = zip(*curve, strict=True)
        axes.plot(counts, scores, color=colour, linewidth=2, marker="o", markersize=5)
        height = max(scores[-1], heights[-1] + 5) if heights else scores[-1]
        heights.append(height)
        axes.annotate(
            label,
            (counts[-1], height),
            (10, 0),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )
    axes.axhline(floor[1], color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(floor[0], (counts[-1], floor[1]), (0, 4), textcoords="offset points", color=GREY, fontsize=8, ha="right")
    axes.set_xscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("training images", color=GREY, fontsize=9)
    axes.set_ylabel("% right on 10,000 test images", color=GREY, fontsize=9)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=INK)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.spines[:].set_visible(False)
    figure.text(
        0.03,
        0.92,
        "CIFAR-10: convolutions against attention, by the number of training images",
        fontsize=12,
        weight="bold",
        color=INK,
    )
    figure.text(0.03, 0.865, "equal numbers of updates at each share; small models without pre-training", fontsize=9, color=GREY)
    return figure


def main() -> None:
    made = json.loads((RESULTS / "images.json").read_text())
    name, score = max(made["floors"].items(), key=lambda item: item[1])
    out = Path(__file__).with_name("images.png")
    draw(curves(made["rows"]), (f"{name}: {score:.1f} %, all images", score)).savefig(out)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
