"""Training curves of a run: loss and validation score over updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from regard.plots.colours import GREY, INK, LINE

LOSS_COLOUR, SCORE_COLOUR = "#c2410c", "#1d4ed8"  # colours


def training_plot(lines: Sequence[dict[str, Any]], score: str, title: str, chosen: int | None = None) -> Figure:
    """Draw loss and score from the lines of metrics.jsonl; `chosen` is the update whose weights were kept, if any."""
    figure = Figure(figsize=(9, 4.2), dpi=150, facecolor="white")
    left = figure.add_axes((0.09, 0.16, 0.82, 0.62))
    figure.text(0.09, 0.91, title, size=13, weight="bold", color=INK)
    figure.text(0.09, 0.845, _plot_title(lines, score, chosen), size=8.5, color=GREY)
    left.plot([x["step"] for x in lines], [x["loss"] for x in lines], color=LOSS_COLOUR, lw=1.6)
    _style_axes(left, "loss in training", LOSS_COLOUR)
    left.set_xlabel("updates", color=GREY, size=8.5)
    left.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    validations = [(x["step"], x["val"][score]) for x in lines if score in x.get("val", {})]
    if validations:
        right: Any = left.twinx()
        right.plot(*zip(*validations, strict=True), color=SCORE_COLOUR, lw=1.6, marker="o", ms=4, clip_on=False)
        best = [point for point in validations if point[0] == chosen]
        if best:
            right.plot(*zip(*best, strict=True), "o", ms=10, mfc="none", mec=SCORE_COLOUR, mew=1.6, clip_on=False)
        _style_axes(right, f"{score} on validation", SCORE_COLOUR)
    return figure


def _plot_title(lines: Sequence[dict[str, Any]], score: str, chosen: int | None) -> str:
    last = lines[-1]
    at = [x["val"][score] for x in lines if x["step"] == chosen and score in x.get("val", {})]
    kept = f"; circled: update {chosen:,}, {score} {at[0]:.4g}" if at else ""
    return f"{last['step']:,} updates in {last['time']:,.0f} s{kept}"


def _style_axes(axes: Axes, label: str, colour: str) -> None:
    axes.set_ylabel(label, color=colour, size=8.5)
    axes.tick_params(colors=GREY, labelsize=8, length=0)
    axes.tick_params(axis="y", colors=colour)
    if label.startswith("loss"):
        axes.grid(axis="y", color=LINE, lw=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
