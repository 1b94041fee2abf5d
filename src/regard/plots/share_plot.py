"""Draw which part of a model takes its time and its memory, stacked, over lengths."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.bench.advice_text import shares_of
from regard.bench.model_parts import PART_KINDS
from regard.plots.colours import GREY, INK, LINE
from regard.plots.speed_plot import PALETTE

SHARE_COLOURS = dict(zip(PART_KINDS, (*PALETTE[:6], GREY), strict=False))
BAR = 0.7  # of the room for one length
TITLES = {"parts_ms": "time of a step", "parts_bytes": "memory kept for the backward pass, weights and optimiser"}


def share_plot(record: dict[str, Any]) -> Figure:
    """Draw the shares of a record of `regard advise`: one bar for each length."""
    rows = [row for row in record["shares"] if "ms" in row]
    size = (11.0, 4.6)
    figure = Figure(figsize=size, dpi=150, facecolor="white")
    model = record["settings"]["model"]
    name = record["settings"]["factory"] or f"{record['settings']['base']}, {model['depth']} layers, width {model['width']}"
    title = f"{name}, {model['dtype']}, {record['made_with']['device']}"
    figure.text(0.06, 0.94, title, size=11, weight="bold", color=INK)
    handles: dict[str, Any] = {}
    for place, (key, words) in enumerate(TITLES.items()):
        axes = figure.add_axes((0.06 + 0.41 * place, 0.13, 0.35, 0.68))
        _draw_shares(axes, rows, key, handles)
        axes.set_title(words, size=9, color=INK, loc="left")
    place_of: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (0.84, 0.5), "frameon": False}
    names = [kind for kind in reversed(PART_KINDS) if kind in handles]
    figure.legend([handles[kind] for kind in names], names, fontsize=8, labelcolor=INK, **place_of)
    return figure


def _draw_shares(axes: Axes, rows: list[dict[str, Any]], key: str, handles: dict[str, Any]) -> None:
    shares = [shares_of(row[key]) for row in rows]
    places = range(len(rows))
    below = [0.0] * len(rows)
    for kind in PART_KINDS:
        heights = [100 * share.get(kind, 0.0) for share in shares]
        if not any(heights):
            continue
        bars = axes.bar(places, heights, BAR, bottom=below, color=SHARE_COLOURS[kind], label=kind)
        handles.setdefault(kind, bars)
        _write_shares(axes, heights, below)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xticks(list(places), [f"{row['n']:,}" for row in rows])
    axes.set_xlabel("tokens of a sequence", size=8, color=GREY)
    axes.set_ylabel("%", size=8, color=GREY)
    axes.set_ylim(0, 100)
    axes.tick_params(colors=GREY, labelsize=8, length=0)
    axes.grid(axis="y", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _write_shares(axes: Axes, heights: list[float], below: list[float]) -> None:
    for x, (height, low) in enumerate(zip(heights, below, strict=True)):
        if height > 6:
            axes.text(x, low + height / 2, f"{height:.0f}", ha="center", va="center", size=7.5, color="white")
