"""A figure of a mechanism for a slide: who looks at whom in each head, and what that costs."""

from __future__ import annotations

import math
import textwrap

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from regard.facts import Facts, facts
from regard.mixers.attention import Attention
from regard.mixers.base import Dims
from regard.mixers.patterns import Pattern
from regard.probe import attention_matrix, has_weights, influence
from regard.spec import Spec

__all__ = ["attention_matrix", "draw", "influence", "picture"]

DPI, LONGEST, LONGEST_INFLUENCE, MOST_HEADS = 200, 256, 96, 4
INK, GREY, LINE, NOTHING = "#16181d", "#6f7580", "#d9dce1", "#f3f4f6"
MARGIN, GAP, TOP, FACTS, LEGEND, BOTTOM = 100, 70, 230, 780, 40, 180  # pixels
SIDES = {1: 1040, 2: 720, 3: 600, 4: 500}  # of a matrix, in pixels, about, by the number of them


def draw(spec: Spec | str | Pattern, *, length: int = 64, causal: bool = False, heads: int = 4, width: int = 256) -> Figure:
    """The figure of `regard show`. Save it with figure.savefig(path)."""
    return picture(facts(spec, length, causal=causal, heads=heads, width=width))


def picture(known: Facts) -> Figure:
    """Laid out in whole pixels, so that every cell of a matrix is as large and as sharp as the next."""
    matrices, caption = _matrices(known)
    count, n = len(matrices), len(next(iter(matrices.values())))
    columns, side = (2 if count == 4 else count), n * max(1, round(SIDES[count] / n))
    facts_at, high = MARGIN + columns * (side + GAP) + GAP, math.ceil(count / columns) * (side + GAP) - GAP
    panel = [(label, textwrap.wrap(value, 44)) for label, value in known.lines()]
    high = max(high, sum(_room(lines) for _, lines in panel) + LEGEND)
    page = _Page(facts_at + FACTS + MARGIN, TOP + high + BOTTOM)
    _head(page, known)
    most = _most(torch.stack(list(matrices.values())))
    for index, (title, matrix) in enumerate(matrices.items()):
        row, column = divmod(index, columns)
        axes = page.axes(MARGIN + column * (side + GAP), TOP + row * (side + GAP), side, side)
        _show(axes, matrix, most, title, first=column == 0, last=row == (count - 1) // columns)
    _panel(page, facts_at, panel)
    signed = any(bool((matrix < 0).any()) for matrix in matrices.values())
    _legend(page, facts_at, TOP + high, most, signed)
    page.write(MARGIN, TOP + high + 110, caption, 7.5, GREY)
    return page.figure


class _Page:
    """A figure measured in pixels from its top left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")

    def axes(self, x: float, y: float, w: float, h: float) -> Axes:
        return self.figure.add_axes((x / self.width, 1 - (y + h) / self.height, w / self.width, h / self.height))

    def write(self, x: float, y: float, text: str, size: float, color: str = INK, weight: str = "normal") -> None:
        at = x / self.width, 1 - y / self.height
        self.figure.text(*at, text, fontsize=size, color=color, weight=weight, va="top", linespacing=1.45, parse_math=False)

    def rule(self, x: float, y: float, w: float) -> None:
        axes = self.axes(x, y, w, 1)
        axes.set_axis_off()
        axes.axhline(0.5, color=LINE, linewidth=0.6)


def _matrices(known: Facts) -> tuple[dict[str, Tensor], str]:
    """A matrix per head by the identity probe, or one of influence where the weights cannot be had; and what they show."""
    dims = Dims(width=known.width, heads=known.heads, causal=known.causal)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mixer = known.spec.build(dims).eval()
        if isinstance(mixer, Attention) and has_weights(mixer.core):
            n = min(known.length, LONGEST)
            q = k = _sequence(known.heads, n, dims.d).repeat(1, 1, 1, mixer.core.streams)
            weights = attention_matrix(mixer.core, q, k, causal=known.causal)[0].detach()
            shown = sorted({round(h * (known.heads - 1) / max(1, MOST_HEADS - 1)) for h in range(MOST_HEADS)})
            matrices = {f"head {h + 1}" if known.heads > 1 else "": weights[h] for h in shown if h < known.heads}
            what = "Attention weights on a smooth random sequence"
        else:
            n = min(known.length, LONGEST_INFLUENCE)
            matrices = {"": _influence(known, n)}
            what = "Influence of token j on output i, the norm of its derivative"
    cut = f" Drawn at {n:,} tokens; the numbers are for {known.length:,}." if n < known.length else ""
    return matrices, f"{what}, n = {n}.{cut}"


def _influence(known: Facts, n: int) -> Tensor:
    dims = Dims(width=4 * known.heads, heads=known.heads, causal=known.causal)  # narrow: the derivative is n w x n w
    return influence(known.spec.build(dims).eval(), torch.randn(n, dims.width))


def _sequence(heads: int, n: int, d: int) -> Tensor:
    """Queries and keys (1 h n d) that wander through a few directions, so that some tokens are alike."""
    wander = torch.zeros(heads, n, 6)
    step = torch.randn(heads, n, 6)
    for t in range(n):
        wander[:, t] = step[:, t] if t == 0 else 0.85 * wander[:, t - 1] + 0.53 * step[:, t]
    return (wander @ torch.randn(heads, 6, d) / d**0.25 * 0.8)[None]


def _most(weights: Tensor) -> float:
    """The weight of the darkest colour: nearly the largest, so that one outlier does not pale the rest.

    Never close to the mean: where all weights are about equal they should look equal, not heavy.
    """
    sizes = weights.abs().flatten()
    return max(float(sizes.sort().values[int(0.999 * (len(sizes) - 1))]), 16 * float(sizes.mean())) or 1.0


def _colours(signed: bool) -> Colormap:
    """Even steps of lightness; negative weights, which random features have, in another hue. Exactly zero: no colour."""
    dark = colormaps["magma_r"](torch.linspace(0.04, 0.92, 256).numpy())
    cold = colormaps["viridis_r"](torch.linspace(0.35, 0.8, 256).numpy())
    colours = ListedColormap([*cold[::-1], *dark] if signed else list(dark))
    colours.set_bad(NOTHING)
    return colours


def _show(axes: Axes, matrix: Tensor, most: float, title: str, *, first: bool, last: bool) -> None:
    n, signed = len(matrix), bool((matrix < 0).any())
    shades = (matrix.abs() / most).clamp_max(1).sqrt() * matrix.sign()  # the root, so that small weights show
    shades = shades.masked_fill(matrix == 0, torch.nan)
    axes.imshow(shades.numpy(), cmap=_colours(signed), vmin=-1 if signed else 0, vmax=1, interpolation="none", aspect="auto")
    axes.set_title(title, fontsize=8, color=GREY, loc="left", pad=4)
    ticks = [0, n // 2, n - 1] if n > 2 else list(range(n))
    axes.set_xticks(ticks if last else [])
    axes.set_yticks(ticks if first else [])
    axes.tick_params(length=0, pad=4, labelsize=7, labelcolor=GREY)
    axes.set_xlabel("key j" if last else "", fontsize=8, color=GREY, labelpad=2)
    axes.set_ylabel("query i" if first else "", fontsize=8, color=GREY, labelpad=2)
    for spine in axes.spines.values():
        spine.set(color=LINE, linewidth=0.6)


def _head(page: _Page, known: Facts) -> None:
    lines = textwrap.wrap(str(known.spec), 100, max_lines=2, placeholder=" …")
    size = next((size for most, size in ((52, 17), (72, 13), (100, 10)) if len(lines[0]) <= most), 10)
    page.write(MARGIN, 60 if len(lines) == 1 else 40, "\n".join(lines), size, weight="bold")
    page.write(MARGIN, 136, known.spec.row.summary, 9.5, GREY)


def _room(lines: list[str]) -> int:
    return 58 + 38 * len(lines)


def _panel(page: _Page, x: float, panel: list[tuple[str, list[str]]]) -> None:
    """Label and value, one under the other, with air between."""
    y = TOP
    for label, lines in panel:
        page.write(x, y, label, 7, GREY)
        page.write(x, y + 30, "\n".join(lines), 9)
        y += _room(lines)
        page.rule(x, y - 14, FACTS)


def _legend(page: _Page, x: float, bottom: float, most: float, signed: bool) -> None:
    """The colours, with the weights they stand for."""
    axes = page.axes(x, bottom - 16, FACTS, 16)
    ramp = torch.linspace(-1 if signed else 0, 1, 512)
    axes.imshow(ramp[None].numpy(), cmap=_colours(signed), aspect="auto", extent=(float(ramp[0]), 1, 0, 1))
    marks = [-1.0, -0.5, 0.0, 0.5, 1.0] if signed else [0.0, 0.5, 1.0]
    axes.set_xticks(marks, [f"{math.copysign(mark**2, mark) * most:.2g}" for mark in marks])
    axes.tick_params(length=0, pad=5, labelsize=7, labelcolor=GREY)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
