"""Draw times over lengths, both logarithmic: mechanisms of regard and their peers, one panel for each pass and form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from regard.plots.colours import GREY, INK, LINE

PALETTE = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#be185d", "#a16207", "#4338ca", "#b91c1c", "#0f766e")
MARKERS = ("s", "^", "v", "D", "P", "X", "*", "<", ">", "p")
FULL_NAME = "SDPA"
PANEL_WIDTH, PANEL_HEIGHT, LEGEND_WIDTH = 4.6, 3.6, 3.0  # inches

Panel = tuple[str, str, bool]


def speed_plot(rows: Sequence[dict[str, Any]], title: str, ours: str = "regard") -> Figure:
    """Draw the rows of a measurement: solid lines are regard, dashed ones of the same colour its peers, SDPA is black.

    A time is that of a CUDA graph where there is one. A row without a time is left out.
    """
    timed = [row for row in rows if row.get("ms")]
    panels = list(dict.fromkeys(_panel(row) for row in timed))
    columns = max(1, min(len(panels), 2))
    lines = -(-max(len(panels), 1) // columns)
    size = (columns * PANEL_WIDTH + LEGEND_WIDTH, lines * PANEL_HEIGHT + 0.5)
    figure = Figure(figsize=size, dpi=150, facecolor="white")
    figure.text(0.02, 1 - 0.12 / size[1], title, ha="left", va="top", size=11, weight="bold", color=INK)
    specs = list(dict.fromkeys(row["spec"] for row in timed if row["by"] == ours))
    colours = {spec: PALETTE[i % len(PALETTE)] for i, spec in enumerate(specs)}
    peers = list(dict.fromkeys(row["by"] for row in timed if row["by"] not in (ours, FULL_NAME)))
    markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(peers)}
    handles: dict[str, Any] = {}
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        _draw_panel(axes, panel, [row for row in timed if _panel(row) == panel], colours, markers, ours, handles)
    top = 1 - 0.4 / figure.get_figheight()
    right = 1 - LEGEND_WIDTH / figure.get_figwidth()
    figure.tight_layout(rect=(0, 0, right, top))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (right, top), "frameon": False}
    figure.legend(list(handles.values()), list(handles), fontsize=7.5, labelcolor=INK, handlelength=2.6, **place)
    return figure


def _panel(row: dict[str, Any]) -> Panel:
    return row["pass"], row["level"], row["causal"]


def _draw_panel(
    axes: Axes,
    panel: Panel,
    rows: Sequence[dict[str, Any]],
    colours: dict[str, str],
    markers: dict[str, str],
    ours: str,
    handles: dict[str, Any],
) -> None:
    curves = dict.fromkeys((row["by"], row["spec"]) for row in rows)
    for by, spec in curves:
        points = sorted((row["n"], row.get("graph_ms") or row["ms"]) for row in rows if (row["by"], row["spec"]) == (by, spec))
        style, name = _style(by, spec, colours, markers, ours)
        (line,) = axes.plot(*zip(*points, strict=True), lw=1.6, ms=4, **style)
        handles.setdefault(name, line)
    _style_panel(axes, panel, sorted({row["n"] for row in rows}))


def _style(by: str, spec: str, colours: dict[str, str], markers: dict[str, str], ours: str) -> tuple[dict[str, Any], str]:
    """The style of a curve and its name in the legend."""
    if by == FULL_NAME:
        return {"color": INK, "ls": "-", "marker": "o"}, "SDPA, all pairs"
    colour = colours.get(spec, GREY)
    if by == ours:
        return {"color": colour, "ls": "-", "marker": "o"}, spec
    return {"color": colour, "ls": "--", "marker": markers[by]}, f"{by}: {spec}"


def _style_panel(axes: Axes, panel: Panel, lengths: Sequence[int]) -> None:
    work, level, causal = panel
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    form = "causal" if causal else "bidirectional"
    what = "operation" if level == "core" else "layer"
    axes.set_title(f"{work}, {form}, {what}", size=9, color=INK, loc="left")
    axes.set_xlabel("tokens of a sequence", size=8, color=GREY)
    axes.set_ylabel("ms", size=8, color=GREY)
    axes.set_xticks(list(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _length_text(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(colors=GREY, labelsize=7.5, which="both")
    axes.grid(color=LINE, lw=0.6, which="major")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _length_text(n: float) -> str:
    """4096 as 4k, 1048576 as 1M."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if n >= size and n % size == 0:
            return f"{n / size:g}{unit}"
    return f"{n:g}"
