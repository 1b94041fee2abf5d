"""Draw comparisons: quality against speed with memory as area, curves of many mechanisms, and attention matrices of layers."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox
from torch import Tensor

from regard.plots.colours import GREY, INK, LINE, family_shades
from regard.plots.mechanism_plot import paint, scale_of

DASH_STYLES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (8, 2)))
LEAST_BUBBLE, MOST_BUBBLE = 30.0, 900.0  # square points
ROW_CELLS = 8  # matrices in a row
MATRIX_INCHES = 1.5
LONGEST_NAME = 34  # letters
SHEET_LETTERS, LETTERS_AN_INCH = 95, 10  # of a title
NAME_PLACES = tuple((x, y) for y in (4, -10, 14, -20, 24, -30) for x in (5, -5))  # of a name beside its dot, in points


class Bubble(NamedTuple):
    """Hold one mechanism: speed, score, its interval, and memory."""

    name: str
    family: str
    speed: float
    score: float
    low: float | None
    high: float | None
    memory: float | None


class Curve(NamedTuple):
    """Hold one line of a figure."""

    name: str
    family: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[tuple[float | None, float | None]] = ()  # the interval of each y, if it has one


class AxesWords(NamedTuple):
    """Hold the words of a figure, and the kind of its axes."""

    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    reversed_y: bool = False
    ticks: Sequence[tuple[float, str]] = ()  # of x


def bubble_plot(bubbles: Sequence[Bubble], words: AxesWords, floor: float | None = None) -> Figure:
    """Draw score over speed; the area of a dot is memory, its colour the family, a dashed line the best trivial score."""
    figure, axes = _sheet(words)
    axes.margins(x=0.14, y=0.1)  # room for names and large dots
    shades = family_shades(dict.fromkeys(bubble.family for bubble in bubbles))
    most = max((bubble.memory or 0 for bubble in bubbles), default=0) or 1
    names = []
    for bubble in bubbles:
        colour = shades[bubble.family][0]
        area = LEAST_BUBBLE + MOST_BUBBLE * (bubble.memory or 0) / most
        if bubble.low is not None and bubble.high is not None:
            axes.plot([bubble.speed] * 2, [bubble.low, bubble.high], color=colour, lw=1.2, alpha=0.8)
        axes.scatter([bubble.speed], [bubble.score], s=area, color=colour, alpha=0.6, lw=0)
        place: dict[str, Any] = {"xytext": NAME_PLACES[0], "textcoords": "offset points", "size": 7, "color": colour}
        names.append(axes.annotate(_short_name(bubble.name), (bubble.speed, bubble.score), **place))
    if floor is not None:
        axes.axhline(floor, color=GREY, ls="--", lw=0.9)
        axes.annotate("best floor", (0.01, floor), xycoords=("axes fraction", "data"), size=7, color=GREY, va="bottom")
    marks = [Line2D([], [], ls="", marker="o", color=shade, label=_plain_text(name)) for name, (shade, _) in shades.items()]
    _add_legend(figure, marks)
    _part_names(axes, names)
    return figure


def _part_names(axes: Axes, names: Sequence[Annotation]) -> None:
    """Move names that would lie over others: the first free place beside the dot, above it or below it."""
    axes.autoscale_view()
    renderer = FigureCanvasAgg(axes.figure.get_figure(root=True)).get_renderer()
    taken: list[Bbox] = []
    for name in sorted(names, key=lambda name: name.xy[0]):
        free = (place for place in NAME_PLACES if not any(_moved(name, place, renderer).overlaps(other) for other in taken))
        taken.append(_moved(name, next(free, NAME_PLACES[0]), renderer))


def _moved(name: Annotation, place: tuple[int, int], renderer: Any) -> Bbox:
    name.set_position(place)
    name.set_horizontalalignment("right" if place[0] < 0 else "left")
    return name.get_window_extent(renderer)


def curve_plot(curves: Sequence[Curve], words: AxesWords) -> Figure:
    """Draw lines in the colours of their families; lines of one family differ in their dashes."""
    figure, axes = _sheet(words)
    shades = family_shades(dict.fromkeys(curve.family for curve in curves))
    used: dict[str, int] = {}
    marks = []
    for curve in curves:
        number = used.setdefault(curve.family, 0)
        used[curve.family] += 1
        style: Any = DASH_STYLES[number % len(DASH_STYLES)]
        (line,) = axes.plot(curve.x, curve.y, color=shades[curve.family][0], ls=style, marker="o", ms=3, lw=1.5)
        line.set_label(_short_name(curve.name))
        marks.append(line)
        known = [(x, low, high) for x, (low, high) in zip(curve.x, curve.spread, strict=False) if low is not None]
        if known:
            axes.vlines(*zip(*known, strict=True), color=line.get_color(), lw=0.8, alpha=0.5)
    _add_legend(figure, marks)
    return figure


def layers_plot(matrices: Sequence[tuple[str, Tensor]], title: str) -> Figure:
    """Draw attention matrices with a line of words above each; dark is large, grey is zero."""
    columns = min(ROW_CELLS, len(matrices)) or 1
    lines = -(-len(matrices) // columns) or 1
    width = columns * MATRIX_INCHES + 0.5
    written = [_plain_text(line) for line in wrap(title, int(LETTERS_AN_INCH * (width - 0.5)))]
    head = 0.45 + 0.17 * len(written)
    size = (width, lines * (MATRIX_INCHES + 0.35) + head)
    figure = Figure(figsize=size, dpi=150, facecolor="white")
    figure.text(0.25 / size[0], 1 - 0.15 / size[1], "\n".join(written), ha="left", va="top", size=10, weight="bold", color=INK)
    for number, (name, matrix) in enumerate(matrices):
        row, column = divmod(number, columns)
        top = size[1] - head - row * (MATRIX_INCHES + 0.35) - 0.25
        side = MATRIX_INCHES - 0.15
        place = ((0.25 + column * MATRIX_INCHES) / size[0], (top - side) / size[1], side / size[0], side / size[1])
        axes = figure.add_axes(place)
        paint(axes, matrix, scale_of(matrix))
        axes.set_title(_plain_text(name[:24]), size=6, color=GREY, loc="left", pad=3)
    return figure


def _sheet(words: AxesWords) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10.5, 5.4), dpi=150, facecolor="white")
    axes = figure.add_axes((0.08, 0.11, 0.68, 0.78))
    title = "\n".join(wrap(words.title, SHEET_LETTERS))
    axes.set_title(_plain_text(title), size=10.5, weight="bold", color=INK, loc="left")
    axes.set_xlabel(_plain_text(words.x), size=8.5, color=GREY)
    axes.set_ylabel(_plain_text(words.y), size=8.5, color=GREY)
    if words.log_x:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    if words.log_y:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    if words.reversed_y:
        axes.invert_yaxis()
    if words.ticks:
        axes.set_xticks([at for at, _ in words.ticks], [_plain_text(text) for _, text in words.ticks])
        axes.xaxis.minorticks_off()
    axes.tick_params(colors=GREY, labelsize=8, which="both")
    axes.grid(color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure, axes


def _plain_ticks(axis: Axis) -> None:
    """Write 20,000 and 0.001 instead of powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain_number(value)))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: _plain_number(value) if f"{value:.0e}"[0] in "25" else ""))


def _plain_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _add_legend(figure: Figure, marks: Sequence[Line2D]) -> None:
    if not marks:
        return
    size = 7.5 if len(marks) <= 24 else 5.0
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (0.77, 0.5), "frameon": False}
    figure.legend(handles=list(marks), fontsize=size, labelcolor=INK, handlelength=2.6, **place)


def _short_name(name: str) -> str:
    return _plain_text(name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…")


def _plain_text(text: str) -> str:
    """Write a text so that matplotlib reads no mathematics in it."""
    return text.replace("$", r"\$")
