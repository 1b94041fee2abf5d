"""Draw the attention of a trained model on a text: a matrix for every layer and head, with the tokens at its sides."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import groupby

import torch
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from torch import Tensor

from regard.plots.colours import GREY
from regard.plots.mechanism_plot import DPI, MARGIN, Page, Scale, paint, plot_legend, scale_of
from regard.tasks.text_attention import LayerAttention, TextAttention

MATRIX_SIDE, SMALLEST_TOKEN, LARGEST_TOKEN = 620, 18, 60  # pixels: of a matrix, of a token with a label, of any token
LABELLED, NARROWEST = 64, 150  # tokens that all have labels; pixels of a column
MATRIX_GAP, ABOVE, SECTION_HEAD, SECTION_GAP, BELOW = 30, 210, 110, 70, 180  # pixels between matrices, above and below
LONGEST_LABEL = 16  # characters
FONTS = (  # for signs that the first font lacks, where they are installed
    *(
        "Noto Sans CJK SC",
        "Noto Sans CJK JP",
        "Noto Sans CJK KR",
        "Source Han Sans SC",
        "WenQuanYi Zen Hei",
        "WenQuanYi Micro Hei",
    ),
    *("PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
    *("Noto Sans Devanagari", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Thai", "Noto Sans Symbols2", "Arial Unicode MS"),
)
ATTENTION_KINDS = {
    "self": "self-attention",
    "cross": "cross-attention to the source",
    "pointer": "weights of the words that are copied",
}
VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


def draw_attention(found: TextAttention, title: str = "") -> Figure:
    """Draw what `run.attention` found: layers from top to bottom, heads from left to right. Save it with savefig(path)."""
    if not found.layers:
        raise ValueError("; ".join(found.missing) or "this model has no layer with attention weights")
    with text_fonts():
        return _drawn(found, title)


def text_fonts() -> AbstractContextManager[None]:
    """Draw with the fonts that are here for signs of all scripts, inside this context."""
    there = {font.name for font in fontManager.ttflist}
    return rc_context({"font.family": [*rcParams["font.family"], *(name for name in FONTS if name in there)]})


def _drawn(found: TextAttention, title: str) -> Figure:
    sections = [list(group) for _, group in groupby(sorted(found.layers, key=_section), key=_section)]
    plans = [_Plan(layers) for layers in sections]
    width = max(1500, *(plan.width for plan in plans)) + 2 * MARGIN
    lines = _head_lines(found, title, width)
    top = ABOVE + 42 * (len(lines) - 1)
    page = Page(width, top + sum(plan.height for plan in plans) + BELOW)
    page.write(MARGIN, 60, lines[0], 15, weight="bold")
    page.write(MARGIN, 130, "\n".join(lines[1:]), 9.5, GREY)
    scale = scale_of(torch.cat([layer.weights.flatten() for layer in found.layers]))
    for plan in plans:
        plan.draw(page, top, scale)
        top += plan.height
    plot_legend(page, MARGIN, top + 80, scale, "weight")
    if found.missing:
        page.write(MARGIN, top + 130, "not shown: " + "; ".join(found.missing)[: width // 12], 7.5, GREY)
    return page.figure


def _section(layer: LayerAttention) -> tuple[int, str]:
    """Order sections: self-attention of each stack, then what is read of the source, then what is copied."""
    order = list(ATTENTION_KINDS).index(layer.kind)
    stack = layer.name.rpartition(" ")[0] or layer.name
    return (order + (stack != "encoder"), stack)


def _head_lines(found: TextAttention, title: str, width: int) -> list[str]:
    first = textwrap.wrap(found.text, max(30, width // 30), max_lines=1, placeholder=" …")
    answer = f"answer: {textwrap.shorten(found.answer, width // 20, placeholder=' …')}" if found.answer else ""
    return [line for line in (*first, answer, title) if line]


class _Plan:
    """Where the matrices of a section lie: one row for each layer, one column for each head."""

    def __init__(self, layers: list[LayerAttention]) -> None:
        self.layers = layers
        n = max(len(layer.queries) for layer in layers)
        m = max(len(layer.keys) for layer in layers)
        self.heads = max(len(layer.weights) for layer in layers)
        self.mean = layers[0].kind == "cross" and self.heads > 1
        across, down = _token_pixels(m), _token_pixels(n)
        self.cell = min(across, 3 * down), min(down, 3 * across)  # pixels of a token
        self.step = max(m * self.cell[0], NARROWEST) + MATRIX_GAP
        self.row = n * self.cell[1] + MATRIX_GAP
        self.font = min(8.0, 0.68 * max(*self.cell, SMALLEST_TOKEN) * 72 / DPI)
        letter = self.font * DPI / 72 * 0.64
        self.left = round(letter * _longest(layer.queries for layer in layers)) + 60
        self.below = round(letter * _longest(layer.keys for layer in layers)) + 30
        self.width = self.left + (self.heads + self.mean) * self.step
        self.height = SECTION_HEAD + len(layers) * self.row + self.below + SECTION_GAP

    def draw(self, page: Page, top: float, scale: Scale) -> None:
        """Draw the section below `top`."""
        stack, kind = self.layers[0].name.rpartition(" ")[0], ATTENTION_KINDS[self.layers[0].kind]
        mechanisms = ", ".join(dict.fromkeys(layer.mechanism for layer in self.layers))
        name = f"{stack}: {kind}" if stack in ("encoder", "decoder") else kind
        page.write(MARGIN, top, f"{name}, {mechanisms}", 11, weight="bold")
        y = top + SECTION_HEAD
        for row, layer in enumerate(self.layers):
            matrices = list(layer.weights)
            titles = [f"head {h}" for h in range(1, len(matrices) + 1)] if len(matrices) > 1 else [""]
            if self.mean:
                matrices, titles = [*matrices, layer.weights.mean(0)], [*titles, "mean of heads"]
            for column, matrix in enumerate(matrices):
                x = MARGIN + self.left + column * self.step
                axes = page.axes(x, y, matrix.shape[1] * self.cell[0], matrix.shape[0] * self.cell[1])
                paint(axes, matrix, scale)
                if row == 0:
                    axes.set_title(titles[column], fontsize=8, color=GREY, loc="left", pad=4)
                self._label(axes, matrix, layer, first=column == 0, last=row == len(self.layers) - 1)
            y += self.row

    def _label(self, axes: Axes, matrix: Tensor, layer: LayerAttention, *, first: bool, last: bool) -> None:
        """Write the tokens at the left of the first matrix and below the last one; of many tokens, some."""
        across, down = (math.ceil(SMALLEST_TOKEN / pixels) for pixels in self.cell)
        rows = range(0, matrix.shape[0], down) if first else range(0)
        columns = range(0, matrix.shape[1], across) if last else range(0)
        axes.set_yticks(rows, [_label(layer.queries[i]) for i in rows])
        axes.set_xticks(columns, [_label(layer.keys[j]) for j in columns], rotation=90)
        axes.tick_params(length=0, pad=4, labelsize=self.font)
        for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            text.set_parse_math(False)  # a dollar is a token like others
        if first:
            axes.set_ylabel(layer.name, fontsize=8, color=GREY, labelpad=6)


def _token_pixels(count: int) -> int:
    """Choose the size of a token: with room for its label, if there are few."""
    fits = MATRIX_SIDE // max(count, 1)
    return min(LARGEST_TOKEN, max(SMALLEST_TOKEN, fits)) if count <= LABELLED else max(1, fits)


def _label(token: str) -> str:
    """Make a token visible: its spaces as signs, cut where it is long."""
    word = token[1:] if token[:1] == " " and token.strip() else token  # the space in front of a subword
    text = word if len(word) <= LONGEST_LABEL else f"{word[: LONGEST_LABEL - 1]}…"
    return text.translate(VISIBLE)


def _longest(lists: Iterable[list[str]]) -> int:
    return max((len(_label(label)) for labels in lists for label in labels), default=0)
