"""A figure of a mechanism for a slide: who looks at whom in each head, and what that costs."""

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
from regard.spec import Spec

__all__ = ["Page", "Scale", "View", "attention_matrix", "draw", "influence", "paint", "picture", "scale_of", "view"]

DPI, LONGEST, LONGEST_INFLUENCE, MOST_HEADS = 200, 256, 128, 4
INK, GREY, LINE, NOTHING = "#16181d", "#6f7580", "#d9dce1", "#f3f4f6"
MARGIN, GAP, TOP, FACTS, LEGEND, BOTTOM = 100, 70, 230, 780, 90, 180  # pixels
SIDES = {1: 1040, 2: 720, 3: 600, 4: 500}  # of a matrix, in pixels, about, by the number of them


def draw(spec: Spec | str | Pattern, *, length: int = 64, causal: bool = False, heads: int = 4, width: int = 256) -> Figure:
    """The figure of `regard show`. Save it with figure.savefig(path)."""
    return picture(cost(spec, length, causal=causal, heads=heads, width=width))


def picture(known: Cost) -> Figure:
    """Laid out in whole pixels, so that every cell of a matrix is as large and as sharp as the next."""
    seen = view(known.spec, known.dims, known.length)
    every = torch.stack(list(seen.matrices.values()))
    count, _, n = every.shape
    columns, side = (2 if count == 4 else count), n * max(1, round(SIDES[count] / n))
    facts_at, high = MARGIN + columns * (side + GAP) + GAP, math.ceil(count / columns) * (side + GAP) - GAP
    panel = [(label, textwrap.wrap(value, 44)) for label, value in known.lines()]
    high = max(high, sum(_room(lines) for _, lines in panel) + LEGEND)
    page, scale = Page(facts_at + FACTS + MARGIN, TOP + high + BOTTOM), scale_of(every)
    _head(page, known)
    for index, (title, matrix) in enumerate(seen.matrices.items()):
        row, column = divmod(index, columns)
        axes = page.axes(MARGIN + column * (side + GAP), TOP + row * (side + GAP), side, side)
        _show(axes, matrix, scale, title, seen.block, first=column == 0, last=row == (count - 1) // columns)
    _panel(page, facts_at, panel)
    _plot_legend(page, facts_at, TOP + high, scale, seen.unit)
    page.write(MARGIN, TOP + high + 110, _plot_caption(seen, known), 7.5, GREY)
    return page.figure


class Page:
    """A figure measured in pixels from its top left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")

    def axes(self, x: float, y: float, w: float, h: float) -> Axes:
        return self.figure.add_axes((x / self.width, 1 - (y + h) / self.height, w / self.width, h / self.height))

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
    matrices: dict[str, Tensor]  # title: (n n), or fewer rows where queries share an answer
    what: str
    unit: str
    block: int = 1  # tokens of a row or column


def view(spec: Spec, dims: Dims, length: int) -> View:
    """A matrix per head where there are weights to see, or else one of influence."""
    dims = replace(dims, max_len=length)
    with torch.random.fork_rng(devices=[]):  # the same picture every time, and nobody else's numbers change
        torch.manual_seed(0)
        mixer = spec.build(dims).eval()
        if length > LONGEST and isinstance(mixer, Attention) and isinstance(mixer.core, Sparse | Longformer):
            return _density_view(mixer, length)
        n = sample(mixer, length, LONGEST)
        if isinstance(mixer, Attention) and has_weights(mixer.core, n):
            return _weights(mixer, n)
        n = sample(mixer, length, LONGEST_INFLUENCE)
        narrow = replace(dims, width=4 * dims.heads)  # the derivative is n w x n w
        matrix = influence(spec.build(narrow).eval(), torch.randn(n, narrow.width))
        return View({"": matrix[:LONGEST, :LONGEST]}, "Influence of token j on output i", "norm of the derivative")


@torch.no_grad()
def _weights(mixer: Attention, n: int) -> View:
    heads, dims = mixer.dims.heads, mixer.dims
    q, k = sampled(mixer.core, _sequence(heads, n, dims.d))
    weights = attention_matrix(mixer.core, q, k, causal=dims.causal)[0, :, :LONGEST, :LONGEST]
    matrices = {f"head {h + 1}" if heads > 1 else "": weights[h] for h in _shown_heads(heads)}
    return View(matrices, "Attention on a smooth random sequence", "weight")


def _density_view(mixer: Attention, n: int) -> View:
    """Which pairs a pattern has, however long it is: the share of them in each cell of block x block."""
    pattern, heads, block = pattern_of(mixer), mixer.dims.heads, -(-n // LONGEST)
    assert pattern is not None
    drawn: dict[Pattern, Tensor] = {}
    matrices = {}
    for h in _shown_heads(heads):
        own = pattern.for_head(h, heads).bound(n, n)
        own = own & Causal() if mixer.dims.causal else own
        if own not in drawn:
            drawn[own] = cells(own, n, block)
        matrices[f"head {h + 1}" if heads > 1 else ""] = drawn[own]
    return View(matrices, f"Pairs that are seen, in cells of {block} x {block}", "share of the pairs of a cell", block)


def _shown_heads(heads: int) -> list[int]:
    return sorted({round(x * (heads - 1) / (MOST_HEADS - 1)) for x in range(MOST_HEADS)})


def _plot_caption(seen: View, known: Cost) -> str:
    n = seen.block * next(iter(seen.matrices.values())).shape[1]
    cut = f" Drawn with {n:,} tokens; the numbers are for {known.length:,}." if n < known.length else ""
    return f"{seen.what}.{cut}"


def _sequence(heads: int, n: int, d: int) -> Tensor:
    """Queries and keys (1 h n d) that wander through a few directions, so that some tokens are alike."""
    wander = torch.zeros(heads, n, 6)
    step = torch.randn(heads, n, 6)
    for t in range(n):
        wander[:, t] = step[:, t] if t == 0 else 0.85 * wander[:, t - 1] + 0.53 * step[:, t]
    return (wander @ torch.randn(heads, 6, d) / d**0.25 * 0.8)[None]


class Scale(NamedTuple):
    most: float  # the weight of the darkest colour
    signed: bool

    @property
    def colours(self) -> Colormap:
        """Even steps of lightness; negative weights, which random features have, in another hue. Exactly zero: no colour."""
        warm = colormaps["magma_r"](torch.linspace(0.04, 0.92, 256).numpy())
        cold = colormaps["GnBu"](torch.linspace(0.3, 1, 256).numpy())
        return ListedColormap([*cold[::-1], *warm] if self.signed else list(warm)).with_extremes(bad=NOTHING)

    @property
    def low(self) -> float:
        return -1.0 if self.signed else 0.0

    def shades(self, matrix: Tensor) -> Tensor:
        """Between low and 1, by the root, so that small weights show; NaN for nothing at all."""
        shades = (matrix.abs() / self.most).clamp_max(1).sqrt() * matrix.sign()
        return shades.masked_fill(matrix == 0, torch.nan)


def scale_of(weights: Tensor) -> Scale:
    """Up to nearly the largest, so that one outlier does not pale the rest, but far above the mean: equal weights are pale."""
    sizes = weights.abs().flatten()
    large = float(sizes.sort().values[int(0.999 * (len(sizes) - 1))])
    return Scale(max(large, min(16 * float(sizes.mean()), 1.0)) or 1.0, bool((weights < 0).any()))


def paint(axes: Axes, matrix: Tensor, scale: Scale) -> None:
    """A matrix in the colours of a scale, in a thin frame."""
    shades = scale.shades(matrix).numpy()
    axes.imshow(shades, cmap=scale.colours, vmin=scale.low, vmax=1, interpolation="none", aspect="auto")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=LINE, linewidth=0.6)


def _show(axes: Axes, matrix: Tensor, scale: Scale, title: str, block: int, *, first: bool, last: bool) -> None:
    paint(axes, matrix, scale)
    axes.set_title(title, fontsize=8, color=GREY, loc="left", pad=4)
    rows, columns = ([0, n // 2, n - 1] if n > 2 else list(range(n)) for n in matrix.shape)
    axes.set_xticks(columns if last else [], [_token_label(x * block) for x in columns] if last else [])
    axes.set_yticks(rows if first else [], [_token_label(x * block) for x in rows] if first else [])
    axes.tick_params(length=0, pad=4, labelsize=7, labelcolor=GREY)
    axes.set_xlabel("key j" if last else "", fontsize=8, color=GREY, labelpad=2)
    axes.set_ylabel("query i" if first else "", fontsize=8, color=GREY, labelpad=2)


def _token_label(token: int) -> str:
    return f"{token:,}" if token < 10_000 else f"{token / 1000:.0f}k"


def _head(page: Page, known: Cost) -> None:
    lines = textwrap.wrap(str(known.spec), 110, max_lines=2, placeholder=" …")
    size = min(17.0, (page.width - 2 * MARGIN) / (1.6 * len(lines[0])))  # a bold letter is about 1.6 pixels wide per point
    page.write(MARGIN, 60 if len(lines) == 1 else 40, "\n".join(lines), size, weight="bold")
    page.write(MARGIN, 136, known.spec.row.summary, 9.5, GREY)


def _room(lines: list[str]) -> int:
    return 58 + 38 * len(lines)


def _panel(page: Page, x: float, panel: list[tuple[str, list[str]]]) -> None:
    """Label and value, one under the other, with air between."""
    y = TOP
    for label, lines in panel:
        page.write(x, y, label, 7, GREY)
        page.write(x, y + 30, "\n".join(lines), 9)
        y += _room(lines)
        page.rule(x, y - 14, FACTS)


def _plot_legend(page: Page, x: float, bottom: float, scale: Scale, unit: str) -> None:
    """The colours, with the numbers they stand for."""
    page.write(x, bottom - 52, unit, 7, GREY)
    axes = page.axes(x, bottom - 16, FACTS, 16)
    ramp = torch.linspace(scale.low, 1, 512)
    axes.imshow(ramp[None].numpy(), cmap=scale.colours, aspect="auto", extent=(scale.low, 1, 0, 1))
    marks = [mark for mark in (-1.0, -0.5, 0.0, 0.5, 1.0) if mark >= scale.low]
    axes.set_xticks(marks, [f"{math.copysign(mark**2, mark) * scale.most:.2g}" for mark in marks])
    axes.tick_params(length=0, pad=5, labelsize=7, labelcolor=GREY)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
