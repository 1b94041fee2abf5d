"""Swap the attention of a model and see what it costs: one line per mechanism, everything else the same.

python examples/swap.py --out swap.png
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure

from regard import layer
from regard.plots.mechanism_plot import GREY, INK, LINE

N, WIDTH, HEADS = 2048, 128, 4
SPECS = ("softmax", "Local(64)", "Local(64) | Global(first=2)", "bigbird", "linear", "performer(features=128)")
TASK = f"{N:,} tokens, width {WIDTH}, {HEADS} heads, forward + backward on this machine"


def milliseconds(spec, x):
    mixer = layer(spec, width=WIDTH, heads=HEADS)
    mixer(x).sum().backward()  # warm up
    start = time.perf_counter()
    mixer(x).sum().backward()
    return 1000 * (time.perf_counter() - start)


def draw(found):
    figure = Figure(figsize=(9.6, 4.4), dpi=150, facecolor="white")
    figure.text(0.03, 0.895, "The same layer with another attention", fontsize=17, weight="bold", color=INK)
    figure.text(0.03, 0.825, f"Milliseconds. {TASK}.", color=GREY)
    axes = figure.add_axes((0.27, 0.06, 0.65, 0.7))
    axes.barh(range(len(found)), found.values(), height=0.6, color=["#d1495b"] + ["#2b6cb0"] * (len(found) - 1))
    for y, taken in enumerate(found.values()):
        axes.text(taken + 0.01 * max(found.values()), y, f"{taken:.1f}", va="center", color=INK, fontsize=11)
    axes.set_yticks(range(len(found)), found)
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.tick_params(length=0, pad=8, labelsize=11, labelcolor=INK)
    axes.spines[:].set_visible(False)
    axes.spines["left"].set(visible=True, color=LINE)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "swap.png")
    out = parser.parse_args().out
    x, found = torch.randn(1, N, WIDTH), {}
    print(TASK)
    for spec in SPECS:
        found[spec] = milliseconds(spec, x)
        print(f"{spec:32s} {found[spec]:7.1f} ms   {found['softmax'] / found[spec]:5.1f} x the speed of softmax")
    draw(found).savefig(out)
    print(f"drawn into {out}")
