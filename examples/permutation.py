"""Attention does not know the order of its tokens: shuffle them, and the same answers come out, shuffled. Unless it is told.

python examples/permutation.py --out permutation.png
"""

import argparse
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

from regard import CATALOGUE, Spec
from regard.mixers.base import Dims

N, WIDTH, INK, GREY, LINE = 48, 32, "#16181d", "#6f7580", "#d9dce1"
LEAST = 1e-16  # where exact equality is drawn


def sinusoid(n, width):
    """Sine and cosine of the position at wavelengths from 2 pi to 10,000 x 2 pi."""
    angle = torch.arange(n, dtype=torch.float64)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


@torch.no_grad()
def deviation(mixer, x, where):
    """The largest |f(shuffled x) - shuffled f(x)|, relative to f(x); `where` is added to the tokens at their places."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    y, other = mixer(x + where)[:, order], mixer(x[:, order] + where)
    return ((y - other).abs().max() / y.abs().max()).item()


def deviations():
    """Of every mechanism that gives as many answers as it has tokens: (without positions, with them)."""
    x, found = torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64), {}
    for name, row in CATALOGUE.items():
        torch.manual_seed(0)
        mixer = Spec(name, **row.examples[0].options).build(Dims(WIDTH, 4, max_len=N)).double().eval()
        if mixer.rate == 1:
            found[name] = deviation(mixer, x, torch.zeros(N, WIDTH).double()), deviation(mixer, x, sinusoid(N, WIDTH))
    return dict(sorted(found.items(), key=lambda item: item[1][0] > 1e-9))


def draw(found):
    high = 0.24 * len(found)
    figure = Figure(figsize=(9, high + 1.9), dpi=160, facecolor="white")
    axes = figure.add_axes((0.2, 0.75 / (high + 1.9), 0.75, high / (high + 1.9)))
    for y, (without, told) in enumerate(found.values()):
        axes.plot([max(without, LEAST), told], [y, y], color=LINE, linewidth=1.4, zorder=1)
        axes.scatter(told, y, s=34, color="white", edgecolor="#3b6fb6", linewidth=1.5, zorder=2)
        axes.scatter(max(without, LEAST), y, s=34, color="#d1495b" if without > 1e-9 else "#2a9d6f", zorder=3)
    blind = sum(without <= 1e-9 for without, _ in found.values())
    axes.axhline(blind - 0.5, color=GREY, linewidth=0.7, linestyle=(0, (4, 4)))
    axes.set(xscale="log", xlim=(LEAST / 3, 10), ylim=(len(found) - 0.4, -0.6), yticks=range(len(found)), yticklabels=list(found))
    axes.set_xticks([LEAST, 1e-12, 1e-8, 1e-4, 1], ["0", "$10^{-12}$", "$10^{-8}$", "$10^{-4}$", "1"])
    axes.set_xlabel("largest relative difference between shuffling before and after", color=GREY, fontsize=9)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=INK)
    axes.grid(axis="x", color=LINE, linewidth=0.5)
    axes.spines[:].set_visible(False)
    figure.text(0.03, 1 - 0.42 / (high + 1.9), "Who knows the order of the tokens?", fontsize=15, weight="bold", color=INK)
    legend = (
        ("●", "#2a9d6f", "blind to it"),
        ("●", "#d1495b", "has an order of its own"),
        ("○", "#3b6fb6", "with positions added to the tokens"),
    )
    for place, (mark, colour, text) in zip((0.03, 0.16, 0.4), legend, strict=True):
        figure.text(place, 1 - 0.78 / (high + 1.9), mark, color=colour, fontsize=11)
        figure.text(place + 0.022, 1 - 0.78 / (high + 1.9), text, color=GREY, fontsize=9.5)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "permutation.png")
    out = parser.parse_args().out
    found = deviations()
    print(f"{'shuffled before or after':24s} {'no':>10s} {'with':>10s} positions: the largest relative difference")
    for name, (without, told) in found.items():
        print(f"{name:24s} {without:10.0e} {told:10.0e}   {'blind to order' if without < 1e-9 else 'has an order of its own'}")
    draw(found).savefig(out)
    print(out)
