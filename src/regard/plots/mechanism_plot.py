"""Draw a mechanism: the attention matrix of each head, and its cost."""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from typing import NamedTuple

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from regard.analysis.cost import Cost, cost, pattern_of, sample
from regard.analysis.probe import attention_matrix, has_weights, influence, sampled
from regard.mixers.attention import Attention
from regard.mixers.base import Dims
from regard.mixers.sparse import Longformer, Sparse
from regard.patterns import Causal, Pattern
from regard.patterns.density import cells
from regard.plots.colours import GREY, INK, LINE, NOTHING
from regard.spec import Spec

__all__ = ["Page", "Scale", "View", "attention_matrix", "draw", "influence", "paint", "picture", "scale_of", "view"]

DPI, LONGEST, LONGEST_INFLUENCE, MOST_HEADS = 200, 256, 128, 4
MARGIN, GAP, TOP, FACTS, LEGEND, BOTTOM = 100, 70, 230, 780, 90, 180  # pixels
SIDES = {1: 1040, 2: 720, 3: 600, 4: 500}  # approximate pixels of a matrix, by the number of matrices


def draw(spec: Spec | str | Pattern, *, length: int = 64, causal: bool = False, heads: int = 4, width: int = 256) -> Figure:
    """Draw the figure of `regard show`. Save it with figure.savefig(path)."""
    known = cost(spec, length, causal=causal, heads=heads, width=width)
    return picture(known)


def picture(known: Cost) -> Figure:
    """Draw the matrices and the cost of a mechanism, in whole pixels: all cells of a matrix have one size."""
    shown = view(known.spec, known.dims, known.length)
    matrices = list(shown.matrices.values())
    every = torch.stack(matrices)
    count, _, n = every.shape
    columns = 2 if count == 4 else count
    rows = math.ceil(count / columns)
    pixels = max(1, round(SIDES[count] / n))  # of a cell
    side = n * pixels
    step = side + GAP
    panel = [(label, textwrap.wrap(value, 44)) for label, value in known.lines()]
    panel_height = sum(_room(lines) for _, lines in panel) + LEGEND
    panel_x = MARGIN + columns * step + GAP
    height = max(rows * step - GAP, panel_height)
    bottom = TOP + height
    page = Page(panel_x + FACTS + MARGIN, bottom + BOTTOM)
    scale = scale_of(every)
    _head(page, known)
    for index, (title, matrix) in enumerate(shown.matrices.items()):
        row, column = divmod(index, columns)
        x = MARGIN + column * step
        y = TOP + row * step
        axes = page.axes(x, y, side, side)
        _show(axes, matrix, scale, title, shown.block, first=column == 0, last=row == rows - 1)
    _panel(page, panel_x, panel)
    plot_legend(page, panel_x, bottom, scale, shown.unit)
    caption = _plot_caption(shown, known)
    page.write(MARGIN, bottom + 110, caption, 7.5, GREY)
    return page.figure


class Page:
    """Place axes and text on a figure, in pixels from its top left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        inches = width / DPI, height / DPI
        self.figure = Figure(figsize=inches, dpi=DPI, facecolor="white")

    def axes(self, x: float, y: float, w: float, h: float) -> Axes:
        left = x / self.width
        bottom = 1 - (y + h) / self.height
        return self.figure.add_axes((left, bottom, w / self.width, h / self.height))

    def write(
        self, x: float, y: float, text: str, size: float, color: str = INK, weight: str = "normal", va: str = "top"
    ) -> None:
        at = x / self.width, 1 - y / self.height
        self.figure.text(*at, text, fontsize=size, color=color, weight=weight, va=va, linespacing=1.45, parse_math=False)

    def rule(self, x: float, y: float, w: float) -> None:
        axes = self.axes(x, y, w, 1)
        axes.set_axis_off()
        axes.axhline(0.5, color=LINE, linewidth=0.6)


class View(NamedTuple):
    """Hold the matrices that a figure shows."""

    matrices: dict[str, Tensor]  # title: (n n), or fewer rows where queries share an output
    caption: str
    unit: str
    block: int = 1  # tokens of a row or column


def view(spec: Spec, dims: Dims, length: int) -> View:
    """Compute a matrix of attention weights per head, or one matrix of influence where a mechanism has no weights."""
    dims = replace(dims, max_len=length)
    with torch.random.fork_rng(devices=[]):  # a fixed seed here, and the state of the caller's generator is kept
        torch.manual_seed(0)
        mixer = spec.build(dims).eval()
        if isinstance(mixer, Attention) and length > LONGEST:
            patterned = isinstance(mixer.core, Sparse | Longformer)
            if patterned:
                return _density_view(mixer, length)
        n = sample(mixer, length, LONGEST)
        if isinstance(mixer, Attention) and has_weights(mixer.core, n):
            return _weights(mixer, n)
        n = sample(mixer, length, LONGEST_INFLUENCE)
        narrow = replace(dims, width=4 * dims.heads)  # the Jacobian is (n w) x (n w)
        small = spec.build(narrow).eval()
        x = torch.randn(n, narrow.width)
        matrix = influence(small, x)
        return View({"": matrix[:LONGEST, :LONGEST]}, "Influence of token j on output i", "norm of the derivative")


@torch.no_grad()
def _weights(mixer: Attention, n: int) -> View:
    dims = mixer.dims
    x = _sequence(dims.heads, n, dims.d)
    q, k = sampled(mixer.core, x)
    weights = attention_matrix(mixer.core, q, k, causal=dims.causal)[0]
    weights = weights[:, :LONGEST, :LONGEST]
    matrices = {_head_title(h, dims.heads): weights[h] for h in _shown_heads(dims.heads)}
    return View(matrices, "Attention on a smooth random sequence", "weight")


def _density_view(mixer: Attention, n: int) -> View:
    """Compute the density of a pattern: the share of pairs in each cell of block x block, for any length."""
    pattern = pattern_of(mixer)
    heads = mixer.dims.heads
    block = -(-n // LONGEST)
    assert pattern is not None
    drawn: dict[Pattern, Tensor] = {}
    matrices = {}
    for h in _shown_heads(heads):
        own = pattern.for_head(h, heads).bound(n, n)
        if mixer.dims.causal:
            own = own & Causal()
        if own not in drawn:
            drawn[own] = cells(own, n, block)
        title = _head_title(h, heads)
        matrices[title] = drawn[own]
    return View(matrices, f"Pairs of the pattern, in cells of {block} x {block}", "share of the pairs of a cell", block)


def _head_title(head: int, heads: int) -> str:
    if heads == 1:
        return ""
    return f"head {head + 1}"


def _shown_heads(heads: int) -> list[int]:
    step = (heads - 1) / (MOST_HEADS - 1)
    return sorted({round(x * step) for x in range(MOST_HEADS)})


def _plot_caption(shown: View, known: Cost) -> str:
    first = next(iter(shown.matrices.values()))
    n = shown.block * first.shape[1]
    cut = f" Drawn with {n:,} tokens; the numbers are for {known.length:,}." if n < known.length else ""
    return f"{shown.caption}.{cut}"


def _sequence(heads: int, n: int, d: int) -> Tensor:
    """Draw queries and keys (1 h n d) as a random walk through six directions, so that some tokens are similar."""
    walk = torch.zeros(heads, n, 6)
    step = torch.randn(heads, n, 6)
    walk[:, :1] = step[:, :1]
    for t in range(1, n):
        walk[:, t] = 0.85 * walk[:, t - 1] + 0.53 * step[:, t]
    directions = torch.randn(heads, 6, d)
    scale = d**0.25
    x = walk @ directions / scale * 0.8
    return x[None]


class Scale(NamedTuple):
    """Map weights to colours."""

    darkest: float  # the weight of the darkest colour
    signed: bool

    @property
    def colours(self) -> Colormap:
        """Build a map of even lightness; negative weights, as random features have, in another hue. Zero has no colour."""
        warm_range = torch.linspace(0.04, 0.92, 256)
        cold_range = torch.linspace(0.3, 1, 256)
        warm = colormaps["magma_r"](warm_range.numpy())
        cold = colormaps["GnBu"](cold_range.numpy())
        shades = [*cold[::-1], *warm] if self.signed else list(warm)
        colours = ListedColormap(shades)
        return colours.with_extremes(bad=NOTHING)

    @property
    def low(self) -> float:
        return -1.0 if self.signed else 0.0

    def shades(self, matrix: Tensor) -> Tensor:
        """Scale weights to low ... 1 by the square root, so that small ones are visible; exact zeros become NaN."""
        sizes = (matrix.abs() / self.darkest).clamp_max(1)
        shades = sizes.sqrt() * matrix.sign()
        return shades.masked_fill(matrix == 0, torch.nan)


def scale_of(weights: Tensor) -> Scale:
    """Choose a scale up to the 99.9th percentile, so that an outlier does not pale the rest, and far above the mean."""
    sizes = weights.abs().flatten()
    percentile = int(0.999 * (len(sizes) - 1))
    large = float(sizes.sort().values[percentile])
    mean = float(sizes.mean())
    above_mean = min(16 * mean, 1.0)
    darkest = max(large, above_mean) or 1.0
    negative = (weights < 0).any()
    return Scale(darkest, bool(negative))


def paint(axes: Axes, matrix: Tensor, scale: Scale) -> None:
    """Draw a matrix in the colours of a scale, in a thin frame."""
    shades = scale.shades(matrix).numpy()
    axes.imshow(shades, cmap=scale.colours, vmin=scale.low, vmax=1, interpolation="none", aspect="auto")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=LINE, linewidth=0.6)


def _show(axes: Axes, matrix: Tensor, scale: Scale, title: str, block: int, *, first: bool, last: bool) -> None:
    paint(axes, matrix, scale)
    axes.set_title(title, fontsize=8, color=GREY, loc="left", pad=4)
    rows = _tick_places(matrix.shape[0]) if first else []
    columns = _tick_places(matrix.shape[1]) if last else []
    axes.set_xticks(columns, [_token_label(x * block) for x in columns])
    axes.set_yticks(rows, [_token_label(x * block) for x in rows])
    axes.tick_params(length=0, pad=4, labelsize=7, labelcolor=GREY)
    axes.set_xlabel("key j" if last else "", fontsize=8, color=GREY, labelpad=2)
    axes.set_ylabel("query i" if first else "", fontsize=8, color=GREY, labelpad=2)


def _tick_places(n: int) -> list[int]:
    if n <= 2:
        return list(range(n))
    return [0, n // 2, n - 1]


def _token_label(token: int) -> str:
    return f"{token:,}" if token < 10_000 else f"{token / 1000:.0f}k"


def _head(page: Page, known: Cost) -> None:
    lines = textwrap.wrap(str(known.spec), 110, max_lines=2, placeholder=" …")
    width = 1.6 * len(lines[0])  # a bold letter is about 1.6 pixels wide per point
    size = min(17.0, (page.width - 2 * MARGIN) / width)
    y = 60 if len(lines) == 1 else 40
    text = "\n".join(lines)
    page.write(MARGIN, y, text, size, weight="bold")
    page.write(MARGIN, 136, known.spec.row.summary, 9.5, GREY)


def _room(lines: list[str]) -> int:
    return 58 + 38 * len(lines)


def _panel(page: Page, x: float, panel: list[tuple[str, list[str]]]) -> None:
    """Write labels and values below each other."""
    y = TOP
    for label, lines in panel:
        page.write(x, y, label, 7, GREY)
        text = "\n".join(lines)
        page.write(x, y + 30, text, 9)
        y += _room(lines)
        page.rule(x, y - 14, FACTS)


def plot_legend(page: Page, x: float, bottom: float, scale: Scale, unit: str) -> None:
    """Draw a colour bar with the weights of its colours."""
    page.write(x, bottom - 52, unit, 7, GREY)
    axes = page.axes(x, bottom - 16, FACTS, 16)
    ramp = torch.linspace(scale.low, 1, 512)
    axes.imshow(ramp[None].numpy(), cmap=scale.colours, aspect="auto", extent=(scale.low, 1, 0, 1))
    marks = [mark for mark in (-1.0, -0.5, 0.0, 0.5, 1.0) if mark >= scale.low]
    weights = [math.copysign(mark**2, mark) * scale.darkest for mark in marks]
    axes.set_xticks(marks, [f"{weight:.2g}" for weight in weights])
    axes.tick_params(length=0, pad=5, labelsize=7, labelcolor=GREY)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
