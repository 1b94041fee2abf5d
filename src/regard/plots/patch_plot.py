"""Draw the attention of a trained model on an image: a map over the picture for every layer and head."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from regard.plots.attention_plot import text_fonts
from regard.plots.colours import GREY, INK, LINE
from regard.plots.mechanism_plot import MARGIN, Page
from regard.tasks.image_attention import ImageAttention
from regard.tasks.text_attention import LayerAttention

PHOTO_SIDE, MAPS_WIDTH, NARROWEST_PAGE, LARGEST_MAP, SMALLEST_MAP, MAP_GAP = 460, 2100, 2150, 300, 150, 22  # pixels
PATCH_HEAD, SECTION, NAME, PATCH_BAR = 240, 150, 150, 540  # above all, above a section, of the name of a layer, of the bar
MOST_TICKS = 16  # rows and columns that have numbers
PALE = 0.5  # how much of the picture remains below the maps
WARM, COLD = colormaps["YlOrRd"], colormaps["GnBu"]


class _Section(NamedTuple):
    """Maps of one kind, (h rows columns) of each layer, and the cell that they are of."""

    title: str
    note: str
    maps: list[Tensor]
    cell: tuple[int, int] | None = None


def draw_image_attention(found: ImageAttention, title: str = "", patch: tuple[int, int] | None = None) -> Figure:
    """Draw what `run.attention` found for an image: layers from top to bottom, heads from left to right.

    Every section has maps over the patches: what each of them receives from all queries; what the class token gives to each,
    where there is one; and what one `patch` (row, column), counted from 1, gives to each. Save it with savefig(path).
    """
    layers = found.on_grid
    if not layers:
        raise ValueError("; ".join(found.missing) or "this model has no layer with attention weights over its patches")
    with text_fonts():
        return _drawn_maps(found, title, layers, patch)


def _drawn_maps(found: ImageAttention, title: str, layers: list[LayerAttention], patch: tuple[int, int] | None) -> Figure:
    sections = _sections(found, layers, patch)
    heads = max(len(layer.weights) for layer in layers)
    columns = heads + (heads > 1)
    side = max(SMALLEST_MAP, min(LARGEST_MAP, MAPS_WIDTH // columns))
    left, step = MARGIN + PHOTO_SIDE + NAME, side + MAP_GAP
    width = max(NARROWEST_PAGE, left + columns * step + MARGIN)
    beyond = [*found.missing, *(f"{x.name}: its keys are groups of patches" for x in found.layers if x not in layers)]
    lines = textwrap.wrap("; ".join(beyond), 42, max_lines=8, placeholder=" …") if beyond else []
    page = Page(width, PATCH_HEAD + max(len(sections) * (SECTION + len(layers) * step), PHOTO_SIDE + 120 + 40 * len(lines)) + 60)
    page.write(MARGIN, 56, Path(found.text).name[: width // 24], 15, weight="bold")
    page.write(MARGIN, 126, "\n".join(line for line in (f"answer: {found.answer}", title) if line), 9.5, GREY)
    _draw_photo(page, found, patch)
    if lines:
        page.write(MARGIN, PATCH_HEAD + PHOTO_SIDE + 90, "\n".join(["not shown:", *lines]), 7.5, GREY)
    y, base = PATCH_HEAD, _pale(found.picture)
    for section in sections:
        every = torch.cat([maps.flatten() for maps in section.maps])
        most = max(2.0, float(every.abs().quantile(0.999)))
        page.write(left, y, section.title, 11, weight="bold")
        page.write(left, y + 42, section.note, 8, GREY)
        _draw_scale(page, width - MARGIN - PATCH_BAR, y + 34, most, signed=bool((every < 0).any()))
        for row, (layer, maps) in enumerate(zip(layers, section.maps, strict=True)):
            top = y + SECTION + row * step
            titles = [f"head {h}" for h in range(1, len(maps) + 1)] if len(maps) > 1 else [""]
            for column, one in enumerate([*maps, maps.mean(0)] if len(maps) > 1 else maps):
                axes = page.axes(left + column * step, top, side, side)
                _draw_map(axes, base, one, found, most, section.cell)
                if row == 0:
                    axes.set_title([*titles, "mean of heads"][column], fontsize=8, color=GREY, loc="left", pad=4)
                if column == 0:
                    name = f"{layer.name}\n{textwrap.shorten(layer.mechanism, 22, placeholder=' …')}"
                    axes.set_ylabel(name, fontsize=7.5, color=GREY)
        y += SECTION + len(layers) * step
    return page.figure


def _sections(found: ImageAttention, layers: list[LayerAttention], patch: tuple[int, int] | None) -> list[_Section]:
    whole = [layer for layer in layers if len(layer.queries) == len(layer.keys)]
    sections = [_Section("What each patch receives", "the mean over all queries", [found.received(layer) for layer in layers])]
    if found.front and len(whole) == len(layers):
        note = "the answer is read from it" if found.front == 1 else "the first token"
        sections.append(_Section("What the class token reads", note, [found.given(layer, 0) for layer in layers]))
    if patch is not None:
        query = found.query_of(*patch)
        if len(whole) < len(layers):
            raise ValueError("queries are groups of patches here: leave the patch out")
        title = f"What the patch in row {patch[0]}, column {patch[1]} reads"
        sections.append(_Section(title, "it has a frame", [found.given(layer, query) for layer in layers], patch))
    return sections


def _pale(picture: np.ndarray) -> np.ndarray:
    """Return a picture in light levels of gray, (side side 3) from 0 to 1."""
    levels = picture @ np.array([0.299, 0.587, 0.114]) / 255
    return np.repeat((1 - PALE * (1 - levels))[..., None], 3, -1)


def _shades(maps: Tensor, most: float) -> np.ndarray:
    """Return colours with opacity of multiples of a share: none for 0, yellow to red above, blue below."""
    size = (maps.abs() / most).clamp_max(1).numpy()
    colours = np.where((maps.numpy() < 0)[..., None], COLD(0.35 + 0.65 * size), WARM(0.12 + 0.88 * size))
    colours[..., 3] = np.minimum(1.0, 1.15 * size**0.8) * 0.85
    return colours


def _draw_map(
    axes: Axes, base: np.ndarray, one: Tensor, found: ImageAttention, most: float, cell: tuple[int, int] | None
) -> None:
    """Draw one map over the picture, and a frame around the cell that it is of."""
    high, wide = found.covered
    axes.imshow(base, extent=(0, 1, 1, 0), interpolation="bilinear")
    axes.imshow(_shades(one, most), extent=(0, wide, high, 0), interpolation="none")
    if cell is not None:
        _frame(axes, found, cell)
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
    axes.spines[:].set(color=LINE, linewidth=0.6)


def _frame(axes: Axes, found: ImageAttention, cell: tuple[int, int]) -> None:
    high, wide = found.covered[0] / found.rows, found.covered[1] / found.columns
    corner = ((cell[1] - 1) * wide, (cell[0] - 1) * high)
    for colour, line in (("white", 2.6), (INK, 1.1)):
        axes.add_patch(Rectangle(corner, wide, high, fill=False, edgecolor=colour, linewidth=line))


def _draw_photo(page: Page, found: ImageAttention, patch: tuple[int, int] | None) -> None:
    """Draw the picture with its patches, whose rows and columns are counted."""
    page.write(MARGIN, PATCH_HEAD, "The picture", 11, weight="bold")
    page.write(MARGIN, PATCH_HEAD + 42, f"{found.rows} x {found.columns} patches", 8, GREY)
    axes = page.axes(MARGIN + 40, PATCH_HEAD + 90, PHOTO_SIDE - 60, PHOTO_SIDE - 60)
    axes.imshow(found.picture, extent=(0, 1, 1, 0), interpolation="bilinear")
    steps = [size / count for size, count in zip(found.covered, (found.rows, found.columns), strict=True)]
    for draw, step, count in zip((axes.axhline, axes.axvline), steps, (found.rows, found.columns), strict=True):
        for number in range(1, count):
            draw(number * step, color="#9aa0a8", linewidth=0.4, alpha=0.8)
    if patch is not None:
        _frame(axes, found, patch)
    for put, step, count in zip((axes.set_yticks, axes.set_xticks), steps, (found.rows, found.columns), strict=True):
        every = -(-count // MOST_TICKS)
        shown = [n for n in range(0, count, every) if (n + 0.5) * step < 1]
        put([(n + 0.5) * step for n in shown], [str(n + 1) for n in shown])
    axes.set(xlim=(0, 1), ylim=(1, 0))
    axes.tick_params(length=0, pad=3, labelsize=6, labelcolor=GREY)
    axes.set_xlabel("column", fontsize=7.5, color=GREY, labelpad=2)
    axes.set_ylabel("row", fontsize=7.5, color=GREY, labelpad=2)
    axes.spines[:].set(color=LINE, linewidth=0.6)


def _draw_scale(page: Page, x: float, y: float, most: float, *, signed: bool) -> None:
    """Draw a colour bar of multiples of a share."""
    page.write(x, y - 30, "weight, times the number of tokens (1: an equal share)", 7, GREY)
    axes = page.axes(x, y, PATCH_BAR, 16)
    low = -most if signed else 0.0
    axes.imshow(_shades(torch.linspace(low, most, 256)[None], most), aspect="auto", extent=(low, most, 0, 1))
    marks = [low, 0.0, most] if signed else [0.0, most / 2, most] if most > 16 else [0.0, 1.0, most]
    axes.set_xticks(marks, [f"{mark:.2g}" for mark in marks])
    axes.set_yticks([])
    axes.tick_params(length=0, pad=4, labelsize=7, labelcolor=GREY)
    axes.spines[:].set(color=LINE, linewidth=0.6)
