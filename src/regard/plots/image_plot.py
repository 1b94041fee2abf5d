"""Draw filters with their feature maps, and a classifier's answer to shifted, scaled and rotated images."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from regard.analysis.image_response import FilterMaps, ResponseRow
from regard.plots.colours import GREY, INK, LINE

ANSWER_COLOUR = "#1d4ed8"


def picture_of(image: Tensor) -> dict[str, Any]:
    """Return arguments of imshow for an image (c h w): colours from 0 to 1 as they are, one channel in gray."""
    if image.shape[0] == 3:
        return {"X": image.permute(1, 2, 0).clamp(0, 1).cpu().numpy()}
    return {"X": image.mean(0).cpu().numpy(), "cmap": "gray", "vmin": 0, "vmax": 1}


def _signed(x: Tensor) -> dict[str, Any]:
    """Return arguments of imshow for numbers (h w) of both signs: blue below 0, red above."""
    most = max(float(x.abs().max()), 1e-12)
    return {"X": x.cpu().numpy(), "cmap": "RdBu_r", "vmin": -most, "vmax": most}


def _bare(axes: Axes, title: str = "") -> None:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=LINE)
    if title:
        axes.set_title(title, fontsize=9, color=GREY, loc="left", pad=3)


def draw_filters(found: FilterMaps, image: Tensor, *, most: int = 8, title: str = "Filters and their feature maps") -> Figure:
    """Draw an image (c h w), and beside it some filters (the mean over channels), each above its feature map."""
    count = min(most, len(found.filters))
    figure = Figure(figsize=(2.6 + 1.35 * count, 3.9), dpi=150, facecolor="white")
    figure.text(0.02, 0.93, title, fontsize=14, weight="bold", color=INK)
    figure.text(
        0.02, 0.865, "Blue: below 0, red: above. A filter slides over the image; its map is large where they agree.", color=GREY
    )
    grid = figure.add_gridspec(2, count + 2, left=0.02, right=0.98, top=0.76, bottom=0.04, hspace=0.22, wspace=0.12)
    axes = figure.add_subplot(grid[:, :2])
    axes.imshow(**picture_of(image))
    _bare(axes, "image")
    for number in range(count):
        for row, (name, numbers) in enumerate((("filter", found.filters[number].mean(0)), ("map", found.maps[number]))):
            axes = figure.add_subplot(grid[row, number + 2])
            axes.imshow(**_signed(numbers))
            _bare(axes, f"{name} {number + 1}")
    return figure


def draw_response(rows: list[ResponseRow], label: str, *, title: str = "Shifted, scaled, rotated") -> Figure:
    """Draw each kind of change: images in a row, and below them the probability of the label."""
    columns = max(len(row.values) for row in rows)
    figure = Figure(figsize=(1.15 * columns + 1.2, 2.75 * len(rows) + 1.1), dpi=150, facecolor="white")
    high = figure.get_figheight()
    figure.text(0.02, 1 - 0.42 / high, title, fontsize=14, weight="bold", color=INK)
    figure.text(
        0.02, 1 - 0.75 / high, f"Probability of the label {label} for one image; the middle one is not changed.", color=GREY
    )
    outer = figure.add_gridspec(len(rows), 1, left=0.08, right=0.98, top=1 - 1.2 / high, bottom=0.4 / high, hspace=0.32)
    for place, row in enumerate(rows):
        inner = outer[place].subgridspec(2, len(row.values), height_ratios=(1, 1), hspace=0.08, wspace=0.06)
        for number, image in enumerate(row.images):
            axes = figure.add_subplot(inner[0, number])
            axes.imshow(**picture_of(image))
            _bare(axes, row.name if number == 0 else "")
        _draw_probabilities(figure.add_subplot(inner[1, :]), row)
    return figure


def _draw_probabilities(axes: Axes, row: ResponseRow) -> None:
    """Draw one bar below every image, with its value and the probability."""
    heights = row.probabilities.cpu().tolist()
    places = range(len(heights))
    axes.bar(places, heights, width=0.62, color=ANSWER_COLOUR)
    for place, share in zip(places, heights, strict=True):
        inside = share > 0.86
        height = share - 0.11 if inside else share + 0.03
        axes.text(place, height, f"{share:.2f}", ha="center", fontsize=8, color="white" if inside else INK)
    axes.set(xlim=(-0.5, len(heights) - 0.5), ylim=(0, 1), yticks=[0, 0.5, 1])
    axes.set_xticks(places, [f"{value:g}" for value in row.values])
    axes.tick_params(labelsize=8, colors=GREY, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
