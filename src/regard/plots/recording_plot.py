"""Draw where the decoder of a trained recogniser reads a recording: characters against seconds, for every layer and head."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from regard.plots.attention_plot import draw_attention, text_fonts
from regard.plots.colours import GREY, LINE
from regard.plots.mechanism_plot import MARGIN, Page, Scale, paint, plot_legend, scale_of
from regard.tasks.recording_attention import RecordingAttention
from regard.tasks.text_attention import LayerAttention

WINDOW_PIXELS, COLUMN_LIMITS = 2, (420, 900)  # of 10 ms, of a column
CHARACTER_PIXELS, SHORTEST_ROW, TALLEST_ROW = 30, 90, 1100  # of a character, of the matrix of a layer
RECORDING_HEAD, MEL_HEIGHT, COLUMN_GAP, ROW_GAP, LEFT = 250, 240, 40, 46, 150  # pixels


def draw_recording_attention(found: RecordingAttention, title: str = "") -> Figure:
    """Draw what `run.attention` found for a recording: its energies, and below them a row for each layer of the decoder.

    Columns are heads and their mean. Of a recogniser without a decoder the encoder is drawn, as of a text. Save it with
    savefig(path).
    """
    layers = found.alignments
    if not layers:
        return draw_attention(found, title)
    with text_fonts():
        return _drawn_recording(found, title, layers)


def _drawn_recording(found: RecordingAttention, title: str, layers: list[LayerAttention]) -> Figure:
    heads = max(len(layer.weights) for layer in layers)
    columns = heads + (heads > 1)
    wide = min(max(COLUMN_LIMITS[0], WINDOW_PIXELS * len(found.mel)), COLUMN_LIMITS[1])
    high = min(max(SHORTEST_ROW, CHARACTER_PIXELS * len(layers[0].queries)), TALLEST_ROW)
    left, top = MARGIN + LEFT, RECORDING_HEAD + MEL_HEIGHT + ROW_GAP
    rows = top + len(layers) * (high + ROW_GAP)
    page = Page(max(1500, left + columns * (wide + COLUMN_GAP) + MARGIN), rows + 240)
    page.write(MARGIN, 56, Path(found.text).name[: page.width // 24], 15, weight="bold")
    page.write(MARGIN, 126, "\n".join(line for line in (f"answer: {found.answer or '(empty)'}", title) if line), 9.5, GREY)
    scale = scale_of(torch.cat([layer.weights.flatten() for layer in layers]))
    titles = [f"head {h}" for h in range(1, heads + 1)] if heads > 1 else [""]
    for column in range(columns):
        x = left + column * (wide + COLUMN_GAP)
        _draw_energies(page.axes(x, RECORDING_HEAD, wide, MEL_HEIGHT), found, [*titles, "mean of heads"][column], column == 0)
        for row, layer in enumerate(layers):
            axes = page.axes(x, top + row * (high + ROW_GAP), wide, high)
            matrix = layer.weights.mean(0) if column == heads else layer.weights[column]
            _draw_alignment(axes, matrix, layer, found, scale, first=column == 0, last=row == len(layers) - 1)
    plot_legend(page, MARGIN, rows + 140, scale, "weight")
    others = len(found.layers) - len(layers)
    beyond = [*found.missing, *([f"the self-attention of {others} layers, which --json has"] if others else [])]
    if beyond:
        page.write(MARGIN, rows + 190, "not drawn: " + "; ".join(beyond)[: page.width // 12], 7.5, GREY)
    return page.figure


def _draw_energies(axes: Axes, found: RecordingAttention, title: str, first: bool) -> None:
    """Draw the log energies of the recording over the same seconds as the matrices below."""
    seconds = len(found.mel) / 100
    axes.imshow(
        found.mel.mT.cpu().numpy(), origin="lower", aspect="auto", cmap="Greys", extent=(0, seconds, 0, found.mel.shape[1])
    )
    axes.set(xlim=(0, seconds), xticks=[], yticks=[])
    axes.set_title(title, fontsize=8, color=GREY, loc="left", pad=4)
    axes.set_ylabel("mel filters" if first else "", fontsize=8, color=GREY, labelpad=6)
    axes.spines[:].set(color=LINE, linewidth=0.6)


def _draw_alignment(
    axes: Axes, matrix: Tensor, layer: LayerAttention, found: RecordingAttention, scale: Scale, *, first: bool, last: bool
) -> None:
    """Draw the weights of one head: a row for each character of the answer, a column for each token of the encoder."""
    count, tokens = matrix.shape
    paint(axes, matrix, scale)
    axes.images[0].set_extent((0, tokens * found.token_seconds, count - 0.5, -0.5))
    axes.set(xlim=(0, len(found.mel) / 100), ylim=(count - 0.5, -0.5))
    if first:
        every = max(1, -(-count * 20 // TALLEST_ROW))
        names = [label.replace(" ", "␣") for label in layer.queries]
        axes.set_yticks(range(0, count, every), names[::every])
        axes.set_ylabel(f"{layer.name}\n{layer.mechanism}", fontsize=8, color=GREY, labelpad=6)
    if last:
        seconds = len(found.mel) / 100
        axes.set_xticks([x for x in MaxNLocator(5).tick_values(0, seconds) if 0 <= x <= seconds])
        axes.set_xlabel("seconds", fontsize=8, color=GREY, labelpad=2)
    axes.tick_params(length=0, pad=4, labelsize=7)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
