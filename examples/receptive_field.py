"""How far a stack of layers sees: windows add up layer by layer, dilation doubles them, full attention sees all at once.

Every number is the exact derivative of the middle output by an input, so a place that cannot be seen is exactly 0.
python examples/receptive_field.py --out receptive_field.png
"""

import argparse
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from regard import layer
from regard.analysis.probe import influence

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "receptive_field.png")
out = parser.parse_args().out
INK, GREY, LINE = "#16181d", "#6f7580", "#d9dce1"
N, WIDTH, LAYERS, W = 81, 4, 4, 3  # |i - j| < W: a window of 2 W - 1


class Conv(nn.Conv1d):
    def forward(self, x):
        return super().forward(x.mT).mT


STACKS = {
    f"convolution, kernel {2 * W - 1}": lambda depth: Conv(WIDTH, WIDTH, 2 * W - 1, padding=W - 1),
    f"Local({W})": lambda depth: layer(f"Local({W})", width=WIDTH, heads=1),
    f"Dilated({W}, step), step = 1, 2, 4, 8": lambda depth: layer(f"Dilated({W}, {2**depth})", width=WIDTH, heads=1),
    "softmax": lambda depth: layer("softmax", width=WIDTH, heads=1),
}
torch.manual_seed(0)
x, fields = torch.randn(N, WIDTH, dtype=torch.float64), {}
print(f"the inputs that the middle of {N} outputs depends on, to either side, after 1 to {LAYERS} layers")
for name, make in STACKS.items():
    layers = [make(depth).double() for depth in range(LAYERS)]
    rows = torch.stack([influence(nn.Sequential(*layers[: depth + 1]), x)[N // 2] for depth in range(LAYERS)])
    reaches = [int((row > 0).nonzero().flatten().sub(N // 2).abs().max()) for row in rows]
    print(f"{name:36s}" + "".join(f"{reach:5d}" for reach in reaches))
    fields[name] = rows, reaches
assert fields[f"Local({W})"][1] == fields[f"convolution, kernel {2 * W - 1}"][1] == [(W - 1) * k for k in range(1, LAYERS + 1)]

figure = Figure(figsize=(12.8, 6.6), dpi=150, facecolor="white")
figure.text(0.04, 0.93, "How far a stack of layers sees", fontsize=17, weight="bold", color=INK)
said = "Influence of every input on the middle output after 1, 2, 3 and 4 layers; dark is strong, white is exactly zero."
figure.text(0.04, 0.885, said, color=GREY, fontsize=11)
for i, (name, (rows, reaches)) in enumerate(fields.items()):
    axes = figure.add_axes((0.04, 0.7 - 0.203 * i, 0.86, 0.125))
    shades = 0.12 + 0.8 * (rows / rows.amax(1, keepdim=True)).sqrt().masked_fill(rows == 0, torch.nan)
    axes.pcolormesh(torch.arange(N + 1).numpy() - N / 2, range(LAYERS + 1), shades.numpy(), cmap="magma_r", vmin=0, vmax=1)
    axes.set(ylim=(LAYERS, 0), xticks=[-40, -20, 0, 20, 40] if i == 3 else [], yticks=[])
    axes.set_title(name, fontsize=11, color=INK, loc="left", pad=4)
    axes.tick_params(length=0, pad=6, labelsize=9.5, labelcolor=GREY)
    axes.spines[:].set(color=LINE)
    for depth, reach in enumerate(reaches):
        axes.text(N / 2 + 1, depth + 0.5, f"layer {depth + 1}: ± {reach}", va="center", fontsize=9, color=GREY)
axes.set_xlabel("input, from the middle", fontsize=10, color=GREY)
figure.savefig(out)
print(f"drawn into {out}")
