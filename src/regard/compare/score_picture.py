"""Draw scores over speed, one panel a task: the area of a point is the memory of a training step, its colour the family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from regard.compare.grid_summary import GroupRow
from regard.plots.colours import GREY, INK, LINE

FAMILY_COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#be185d", "#a16207", "#4338ca", "#b91c1c", "#0f766e")
SIZE, LEGEND_INCHES = 5.4, 1.6  # inches of a panel and of the legend
LEAST_AREA, MOST_AREA = 30.0, 420.0


def score_picture(rows: Sequence[GroupRow], floors: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw all rows with a score and a measured speed; the best floor of a task is a dashed line."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    families = list(dict.fromkeys(row.family for row in rows))
    colours = {name: FAMILY_COLOURS[i % len(FAMILY_COLOURS)] for i, name in enumerate(families)}
    columns = min(2, len(tasks)) or 1
    lines = -(-len(tasks) // columns) or 1
    figure = Figure(figsize=(SIZE * columns + LEGEND_INCHES, 0.8 * SIZE * lines), dpi=150, facecolor="white")
    for number, task in enumerate(tasks):
        axes = figure.add_subplot(lines, columns, number + 1)
        _draw_task(axes, task, [row for row in rows if row.task == task], floors.get(task, {}), colours)
    right = 1 - LEGEND_INCHES / figure.get_figwidth()
    figure.tight_layout(rect=(0, 0, right, 1))
    marks = [Line2D([], [], ls="", marker="o", color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=marks, loc="center left", bbox_to_anchor=(right, 0.5), frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _draw_task(axes: Axes, task: str, rows: Sequence[GroupRow], floors: Mapping[str, float], colours: Mapping[str, str]) -> None:
    measured = [row for row in rows if row.score is not None and row.costs.get("train_steps_per_s")]
    most = max((row.costs.get("peak_bytes") or 0 for row in measured), default=0) or 1
    for row in measured:
        area = LEAST_AREA + MOST_AREA * (row.costs.get("peak_bytes") or 0) / most
        speed = row.costs["train_steps_per_s"]
        axes.scatter([speed], [row.score or 0.0], s=area, color=colours[row.family], alpha=0.6, lw=0)
        axes.annotate(row.mixer[:28], (speed, row.score or 0.0), size=6.5, color=INK, xytext=(4, 4), textcoords="offset points")
    metric = rows[0].metric
    if floors:
        best = min(floors.values()) if metric != "accuracy" else max(floors.values())
        axes.axhline(best, color=GREY, ls="--", lw=0.8)
        axes.annotate("best floor", (0.01, best), xycoords=("axes fraction", "data"), size=6.5, color=GREY, va="bottom")
    axes.set_title(task, size=9, color=INK, loc="left")
    axes.set_xlabel("training steps a second, alone on the device (area: memory of a step)", size=8, color=GREY)
    axes.set_ylabel(f"test {metric}", size=8, color=GREY)
    if measured:
        axes.set_xscale("log")
    axes.tick_params(colors=GREY, labelsize=7.5, which="both")
    axes.grid(color=LINE, lw=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
