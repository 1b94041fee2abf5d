"""Draw all patterns and mechanisms on one sheet, family by family: attention matrices, and how cost grows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from regard.analysis.cost import cost, pattern_of
from regard.catalogue import CATALOGUE
from regard.mixers.base import Can, Dims
from regard.patterns import (
    Blocks,
    Causal,
    Columns,
    Dilated,
    Edges,
    Everything,
    Global,
    Local,
    Neighbourhood,
    Pattern,
    PerHead,
    Random,
    Rows,
    Stride,
    Tail,
    Truncated,
)
from regard.plots.colours import GREY, INK, LINE, NOTHING
from regard.plots.mechanism_plot import Page, Scale, paint, scale_of, view
from regard.spec import Spec
from regard.text import growth

ACROSS = 8  # cells in a row
CELL_SIDE, CELL_GAP, SHEET_MARGIN, SHEET_TOP, SHEET_BOTTOM = 240, 44, 64, 190, 140  # pixels
CELL_WORDS, HEADING, BETWEEN = 84, 88, 44  # pixels above a matrix, above the words of a family's first row, and below a row
TITLE_LETTERS = 22  # letters in the title of a cell
_SQUARES = [i * i % 40 for i in range(40)]
_GRAPH = [[*range(40), *_SQUARES], [*_SQUARES, *range(40)]]
SAMPLES: dict[str, tuple[Pattern, str]] = {
    "Local(4)": (Local(4), "|i - j| < 4"),
    "Truncated(8, 2)": (Truncated(8, 2), "8 back, 2 ahead"),
    "Dilated(3, 4)": (Dilated(3, 4), "a window with holes"),
    "Stride(6)": (Stride(6), "every 6th"),
    "Blocks(8)": (Blocks(8), "the same block"),
    "Neighbourhood(8, 1)": (Neighbourhood(8, 1), "near on a grid of 8"),
    "Tail(8, 2)": (Tail(8, 2), "the last 2 of a block"),
    "Causal()": (Causal(), "no later keys"),
    "Everything()": (Everything(), "all pairs"),
    "Global(first=2)": (Global(first=2), "see all, seen by all"),
    "Rows(at=[20])": (Rows(at=(20,)), "see all"),
    "Columns(at=[20])": (Columns(at=(20,)), "seen by all"),
    "Random(2, 4)": (Random(2, 4), "blocks, drawn once"),
    "Edges([...])": (Edges(_GRAPH, nodes=40, loops=True), "of a graph"),
    "Local | Global": (Local(4) | Global(first=2), "either"),
    "Stride & Causal": (Stride(6) & Causal(), "both"),
    "PerHead([...])": (PerHead([Local(4), Dilated(3, 4), Blocks(8), Stride(6)]), "one in each head"),
}


class _Cell(NamedTuple):
    """Hold a title, a line of words, and one matrix, or four where the heads differ."""

    title: str
    words: str
    matrices: list[Tensor]
    scale: Scale | None = None  # None: pairs, in black and white
    mark: str = ""


def sheet(
    specs: Iterable[Spec | str | Pattern] | None = None, *, length: int = 40, causal: bool = False, patterns: bool = True
) -> Figure:
    """Draw many mechanisms in one figure: the whole catalogue unless given, by family. Save it with figure.savefig(path)."""
    dims = Dims(width=256, heads=4, causal=causal, max_len=length)
    families: dict[str, list[_Cell]] = {}
    if patterns:
        families["patterns"] = [_pattern_cell(*entry) for entry in SAMPLES.items()]
    every = _all(causal) if specs is None else map(Spec.of, specs)
    for spec in every:
        family_cells = families.setdefault(spec.row.family, [])
        family_cells.append(_mechanism(spec, dims, length))
    sizes = {family: len(cells) for family, cells in families.items()}
    lines = _lines(sizes)
    heights = [_line_height(line) for line in lines]
    page_width = _x(ACROSS) - CELL_GAP + SHEET_MARGIN
    page_height = SHEET_TOP + sum(heights) + SHEET_BOTTOM
    page = Page(page_width, page_height)
    page.write(SHEET_MARGIN, 98, "Attention patterns and mechanisms", 24, weight="bold", va="baseline")
    caption = _gallery_caption(length, causal)
    page.write(SHEET_MARGIN, 160, caption, 10, GREY, va="baseline")
    y = SHEET_TOP
    remaining = {family: iter(cells) for family, cells in families.items()}
    for line, height in zip(lines, heights, strict=True):
        cell_y = y + height - BETWEEN - CELL_SIDE
        for family, start, cells, first in line:
            if first:
                _heading(page, family, _x(start), y, cells)
            for column in range(start, start + cells):
                cell = next(remaining[family])
                _draw_cell(page, cell, _x(column), cell_y)
        y += height
    legend = _gallery_legend(families)
    page.write(SHEET_MARGIN, y, legend, 9, GREY)
    return page.figure


def _all(causal: bool) -> list[Spec]:
    """Return the first example of every row of the catalogue, or of every causal one."""
    rows = [row for row in CATALOGUE.values() if not causal or Can.CAUSAL in row.can]
    return [Spec(row.name, **row.examples[0].options) for row in rows]


def _pattern_cell(title: str, entry: tuple[Pattern, str]) -> _Cell:
    pattern, words = entry
    at = torch.arange(40)
    heads = [pattern.for_head(h, 4) for h in range(4)]
    bound = [p.bound(40, 40) for p in heads]
    found = [p(0, at[:, None], at) for p in bound]
    if len(set(heads)) == 1:
        found = found[:1]
    return _Cell(title, words, found)


def _mechanism(spec: Spec, dims: Dims, length: int) -> _Cell:
    seen = view(spec, dims, length)
    with torch.device("meta"):  # only for its pattern, so that no random numbers are drawn
        mixer = spec.build(dims)
        pattern = pattern_of(mixer)
    shown = list(seen.matrices.values())
    own: set[Pattern] = set()
    if pattern is not None:
        own = {pattern.for_head(h, dims.heads) for h in range(dims.heads)}
    differ = len(own) > 1 and len(shown) == 4
    if not differ:
        shown = shown[:1]
    mark = "" if seen.unit == "weight" else "∂"
    label = _cost_label(spec, dims, length)
    scale = scale_of(torch.stack(shown))
    return _Cell(_title(spec), label, shown, scale, mark)


def _title(spec: Spec) -> str:
    """Return the title of a mechanism: its name alone where its options are those of the catalogue's first example."""
    usual = Spec(spec.name, **spec.row.examples[0].options)
    if spec == usual:
        return spec.name
    shown = spec.options["pattern"] if spec.name == "sparse" else spec
    text = str(shown)
    if len(text) <= TITLE_LETTERS:
        return text
    return text[: TITLE_LETTERS - 1] + "…"


def _cost_label(spec: Spec, dims: Dims, length: int) -> str:
    """Describe growth of time and state: that of the catalogue where it lists these options; else as measured."""
    time, memory = _growth(spec, dims, length)
    parts = []
    if time is not None:
        parts.append(f"time {growth(time, 'n')}")
    if memory is not None:
        parts.append(f"state {growth(memory, 't')}")
    return ", ".join(parts)


def _growth(spec: Spec, dims: Dims, length: int) -> tuple[float | None, float | None]:
    """Return exponents of time and of the streaming state."""
    for example in spec.row.examples:
        if Spec(spec.name, **example.options) == spec:
            return example.cost, example.memory
    measured = cost(spec, length, causal=dims.causal)
    time = measured.work.growth
    memory = measured.state.growth if measured.state else None
    return _rounded(time), _rounded(memory)


def _rounded(exponent: float | None) -> float | None:
    if exponent is None:
        return None
    return round(exponent, 1)


class _FamilyCells(NamedTuple):
    """Describe adjacent cells of one family."""

    family: str
    start: int  # column
    cells: int
    first: bool  # the family begins here


def _lines(sizes: dict[str, int]) -> list[list[_FamilyCells]]:
    """Arrange families in lines of ACROSS cells: each in the first line with room for all of it, or from a new line on."""
    lines: list[list[_FamilyCells]] = []
    for family, size in sizes.items():
        used = [sum(run.cells for run in line) for line in lines]
        fitting = [line for line, full in zip(lines, used, strict=True) if full + size <= ACROSS]
        if fitting:
            line = fitting[0]
            start = sum(run.cells for run in line)
            line.append(_FamilyCells(family, start, size, True))
            continue
        for done in range(0, size, ACROSS):
            count = min(ACROSS, size - done)
            lines.append([_FamilyCells(family, 0, count, done == 0)])
    return lines


def _line_height(line: list[_FamilyCells]) -> int:
    heading = HEADING if any(run.first for run in line) else 0
    return heading + CELL_WORDS + CELL_SIDE + BETWEEN


def _x(column: int) -> int:
    return SHEET_MARGIN + column * (CELL_SIDE + CELL_GAP)


def _heading(page: Page, family: str, x: int, y: int, cells: int) -> None:
    title = family.replace("_", " ")
    page.write(x, y + 54, title, 13, weight="bold", va="baseline")
    width = cells * (CELL_SIDE + CELL_GAP) - CELL_GAP
    page.rule(x, y + HEADING - 14, width)


def _draw_cell(page: Page, cell: _Cell, x: int, y: int) -> None:
    size = min(9.0, 148 / len(cell.title))  # points: a long name is set smaller
    page.write(x, y - 53, cell.title, size, weight="bold", va="baseline")
    page.write(x, y - 15, cell.words, 7.5, GREY, va="baseline")
    if cell.mark:
        page.write(x + CELL_SIDE - 20, y - 53, cell.mark, 9.5, GREY, va="baseline")
    half = 1 if len(cell.matrices) == 1 else 2
    side = CELL_SIDE / half
    for index, matrix in enumerate(cell.matrices):
        row, column = divmod(index, half)
        axes = page.axes(x + column * side, y + row * side, side, side)
        if cell.scale is None:
            colours = ListedColormap([NOTHING, INK])
            axes.imshow(matrix.numpy(), cmap=colours, vmin=0, vmax=1, interpolation="none", aspect="auto")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(color=LINE, linewidth=0.6)
        else:
            paint(axes, matrix, cell.scale)
        if half == 2:
            axes.spines[:].set(color="white", linewidth=1.2)


def _gallery_caption(length: int, causal: bool) -> str:
    form = " of the past alone" if causal else ""
    return f"Query i down, key j across: the attention{form} of one head on a smooth random sequence of {length} tokens."


def _gallery_legend(families: dict[str, list[_Cell]]) -> str:
    """Explain in two lines the colours and the marks that occur."""
    cells = [cell for family in families.values() for cell in family]
    first = "Dark: large weight. Grey: exactly zero."
    if any(cell.scale is not None and cell.scale.signed for cell in cells):
        first += "  Green and blue: negative weights."
    if any(len(cell.matrices) > 1 for cell in cells):
        first += "  Four squares: heads that differ."
    second = "Time of a pass over n tokens, streaming state after t tokens."
    if any(cell.mark != "" for cell in cells):
        second += "  ∂: no attention weights; shown is the influence of token j on output i."
    return f"{first}\n{second}"
