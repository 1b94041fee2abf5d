"""All patterns and all mechanisms on one sheet, family by family: who looks at whom, and how the cost grows."""

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
    Pattern,
    PerHead,
    Random,
    Rows,
    Stride,
    Tail,
    Truncated,
)
from regard.plots.mechanism_plot import GREY, INK, LINE, NOTHING, Page, Scale, paint, scale_of, view
from regard.spec import Spec
from regard.text import growth

ACROSS, SIDE, GAP, MARGIN, TOP, BOTTOM = 8, 240, 44, 64, 190, 140  # cells in a row; the rest in pixels
WORDS, HEADING, BETWEEN = 84, 88, 44  # pixels over a matrix, over the words of a family's first row, and under a row
TITLE_LETTERS = 22  # letters in the title of a cell
_GRAPH = [[*range(40), *(i * i % 40 for i in range(40))], [*(i * i % 40 for i in range(40)), *range(40)]]
SAMPLES: dict[str, tuple[Pattern, str]] = {
    "Local(4)": (Local(4), "|i - j| < 4"),
    "Truncated(8, 2)": (Truncated(8, 2), "8 back, 2 ahead"),
    "Dilated(3, 4)": (Dilated(3, 4), "a window with holes"),
    "Stride(6)": (Stride(6), "every 6th"),
    "Blocks(8)": (Blocks(8), "the same block"),
    "Tail(8, 2)": (Tail(8, 2), "the last 2 of a block"),
    "Causal()": (Causal(), "nothing later"),
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
    """A title, a line of words, and one matrix, or four where the heads differ."""

    title: str
    words: str
    matrices: list[Tensor]
    scale: Scale | None = None  # None: pairs, in black and white
    mark: str = ""


def sheet(
    specs: Iterable[Spec | str | Pattern] | None = None, *, length: int = 40, causal: bool = False, patterns: bool = True
) -> Figure:
    """One figure of many mechanisms: all of the catalogue unless given, in their families. Save it with figure.savefig(path)."""
    dims = Dims(width=256, heads=4, causal=causal, max_len=length)
    families: dict[str, list[_Cell]] = {"patterns": [_pattern_cell(*entry) for entry in SAMPLES.items()]} if patterns else {}
    for spec in _all(causal) if specs is None else map(Spec.of, specs):
        families.setdefault(spec.row.family, []).append(_mechanism(spec, dims, length))
    lines = _lines({family: len(cells) for family, cells in families.items()})
    heights = [HEADING * any(run.first for run in line) + WORDS + SIDE + BETWEEN for line in lines]
    page = Page(2 * MARGIN + ACROSS * (SIDE + GAP) - GAP, TOP + sum(heights) + BOTTOM)
    page.write(MARGIN, 108, "Who looks at whom", 24, weight="bold", va="baseline")
    page.write(MARGIN, 160, _gallery_caption(length, causal), 10, GREY, va="baseline")
    y, left = TOP, {family: iter(cells) for family, cells in families.items()}
    for line, height in zip(lines, heights, strict=True):
        for family, start, cells, first in line:
            if first:
                _heading(page, family, _x(start), y, cells)
            for column in range(start, start + cells):
                _draw_cell(page, next(left[family]), _x(column), y + height - BETWEEN - SIDE)
        y += height
    page.write(MARGIN, y, _gallery_legend(families), 9, GREY)
    return page.figure


def _all(causal: bool) -> list[Spec]:
    """The first example of every row that can be drawn like this."""
    return [Spec(row.name, **row.examples[0].options) for row in CATALOGUE.values() if not causal or Can.CAUSAL in row.can]


def _pattern_cell(title: str, entry: tuple[Pattern, str]) -> _Cell:
    pattern, words = entry
    at = torch.arange(40)
    heads = [pattern.for_head(h, 4) for h in range(4)]
    found = [p.bound(40, 40)(0, at[:, None], at) for p in heads]
    return _Cell(title, words, found if len(set(heads)) > 1 else found[:1])


def _mechanism(spec: Spec, dims: Dims, length: int) -> _Cell:
    seen = view(spec, dims, length)
    with torch.device("meta"):  # only to ask it, so that no dice are thrown
        pattern = pattern_of(spec.build(dims))
    matrices = list(seen.matrices.values())
    differ = pattern is not None and len({pattern.for_head(h, dims.heads) for h in range(dims.heads)}) > 1
    shown = matrices if differ and len(matrices) == 4 else matrices[:1]
    mark = "" if seen.unit == "weight" else "∂"
    return _Cell(_title(spec), _cost(spec, dims, length), shown, scale_of(torch.stack(shown)), mark)


def _title(spec: Spec) -> str:
    """Its name, where the catalogue's first example says the rest."""
    if Spec(spec.name, **spec.row.examples[0].options) == spec:
        return spec.name
    text = str(spec.options["pattern"] if spec.name == "sparse" else spec)
    return text if len(text) <= TITLE_LETTERS else text[: TITLE_LETTERS - 1] + "…"


def _cost(spec: Spec, dims: Dims, length: int) -> str:
    """As the catalogue says it, where it speaks of these options; else as measured."""
    time: float | None
    memory: float | None
    for example in spec.row.examples:
        if Spec(spec.name, **example.options) == spec:
            time, memory = example.cost, example.memory
            break
    else:
        known = cost(spec, length, causal=dims.causal)
        found = known.work.growth, known.state.growth if known.state else None
        time, memory = (x if x is None else round(x, 1) for x in found)
    parts = [f"time {growth(time, 'n')}"] * (time is not None) + [f"state {growth(memory, 't')}"] * (memory is not None)
    return ", ".join(parts)


class _FamilyCells(NamedTuple):
    """Cells of one family side by side."""

    family: str
    start: int  # column
    cells: int
    first: bool  # the family begins here


def _lines(sizes: dict[str, int]) -> list[list[_FamilyCells]]:
    """Families in lines of ACROSS cells: each begins in the first line with room for all of it, or in a line of its own."""
    lines: list[list[_FamilyCells]] = []
    for family, size in sizes.items():
        used = [sum(run.cells for run in line) for line in lines]
        fits = next((line for line, full in zip(lines, used, strict=True) if full + size <= ACROSS), None)
        if fits is not None:
            fits.append(_FamilyCells(family, sum(run.cells for run in fits), size, True))
            continue
        for done in range(0, size, ACROSS):
            lines.append([_FamilyCells(family, 0, min(ACROSS, size - done), done == 0)])
    return lines


def _x(column: int) -> int:
    return MARGIN + column * (SIDE + GAP)


def _heading(page: Page, family: str, x: int, y: int, cells: int) -> None:
    page.write(x, y + 54, family.replace("_", " "), 13, weight="bold", va="baseline")
    page.rule(x, y + HEADING - 14, cells * (SIDE + GAP) - GAP)


def _draw_cell(page: Page, cell: _Cell, x: int, y: int) -> None:
    size = min(9.0, 148 / len(cell.title))  # points: a long name takes what room there is
    page.write(x, y - 53, cell.title, size, weight="bold", va="baseline")
    page.write(x, y - 15, cell.words, 7.5, GREY, va="baseline")
    if cell.mark:
        page.write(x + SIDE - 20, y - 53, cell.mark, 9.5, GREY, va="baseline")
    half = 1 if len(cell.matrices) == 1 else 2
    for index, matrix in enumerate(cell.matrices):
        row, column = divmod(index, half)
        axes = page.axes(x + column * SIDE / half, y + row * SIDE / half, SIDE / half, SIDE / half)
        if cell.scale is None:
            axes.imshow(matrix.numpy(), cmap=ListedColormap([NOTHING, INK]), vmin=0, vmax=1, interpolation="none", aspect="auto")
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
    """Two lines: the colours, and the marks that are there."""
    cells = [cell for family in families.values() for cell in family]
    first = "Dark: much weight. Grey: none at all."
    first += "  Green and blue: negative weights." * any(cell.scale is not None and cell.scale.signed for cell in cells)
    second = "Time of a pass over n tokens, streaming state after t tokens."
    first += "  Four squares: heads that differ." * any(len(cell.matrices) > 1 for cell in cells)
    second += "  ∂: no weights to see, but how much token j moves output i." * any(cell.mark != "" for cell in cells)
    return f"{first}\n{second}"
