"""Draw an utterance: its log-mel energies, and below them where the decoder was in the text."""

from __future__ import annotations

from matplotlib.figure import Figure
from torch import Tensor

from regard.plots.colours import GREY, INK, LINE

MOST_LABELS = 60  # characters that all have labels


def draw_utterance(mel: Tensor, weights: Tensor, text: str, *, reduction: int = 1, title: str = "", note: str = "") -> Figure:
    """Draw energies (t f), one window every 10 ms, and weights (m n) of characters, `reduction` windows a step."""
    labels = [*(sign if sign != " " else "␣" for sign in text), "end"][: weights.shape[1]]
    figure = Figure(figsize=(9.5, 7.2), dpi=150, facecolor="white")
    figure.text(0.085, 0.95, title or text, fontsize=14, weight="bold", color=INK, parse_math=False)
    figure.text(
        0.085, 0.918, note or "Above: log energies. Below: how much of each character a step takes.", color=GREY, fontsize=9
    )
    above, below = figure.subplots(2, 1, gridspec_kw={"left": 0.085, "right": 0.895, "top": 0.885, "bottom": 0.08, "hspace": 0.2})
    seconds, steps = len(mel) / 100, len(weights) * reduction / 100
    above.imshow(mel.mT.cpu().numpy(), origin="lower", aspect="auto", cmap="magma", extent=(0, seconds, 0, mel.shape[1]))
    above.set_ylabel("mel filter", color=GREY, fontsize=9)
    picture = below.imshow(
        weights.mT.cpu().numpy(),
        aspect="auto",
        cmap="Blues",
        vmin=0,
        extent=(0, steps, len(labels) - 0.5, -0.5),
        interpolation="none",
    )
    every = -(-len(labels) // MOST_LABELS)
    below.set_yticks(range(0, len(labels), every), labels[::every])
    below.set_ylabel("character", color=GREY, fontsize=9)
    below.set_xlabel("seconds", color=GREY, fontsize=9)
    bar = figure.colorbar(picture, cax=figure.add_axes((0.915, 0.08, 0.018, 0.365)))
    bar.set_label("weight", color=GREY, fontsize=9)
    bar.ax.tick_params(labelsize=8, colors=GREY, length=2)
    bar.outline.set_visible(False)
    for axes in (above, below):
        axes.tick_params(labelsize=8, colors=GREY, length=2)
        axes.spines[:].set_color(LINE)
    for label in below.get_yticklabels():
        label.set_parse_math(False)
    return figure
