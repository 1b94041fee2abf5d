"""Attention along the edges of a graph is a graph network: it equals the masked dense form, and looks only where edges are.

python examples/graph_view.py --out graph_view.png
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from regard import Edges, layer
from regard.mixers.graph_attention import edge_weights

N, QUERY, INK, GREY, LINE = 14, 3, "#16181d", "#6f7580", "#d9dce1"
torch.manual_seed(2)
chords = [(3, 6), (3, 8), (3, 10), (3, 12), (0, 6), (5, 11), (1, 9)]  # across a ring, where each node also sees itself
graph = Edges(torch.tensor([(i, (i + 1) % N) for i in range(N)] + chords).T, nodes=N, both=True, loops=True)
mixer = layer(f"gat(pattern={graph}, v2=True)", width=32, heads=4).double()
x = (2 * torch.randn(1, N, 32, dtype=torch.float64)).requires_grad_()


def masked(x):
    """All pairs are scored and those without an edge struck out: what the layer means, in n x n form."""
    q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (mixer.q, mixer.k, mixer.v))
    pairs = torch.nn.functional.leaky_relu(q[:, :, :, None] + k[:, :, None], mixer.core.slope)
    seen = graph(0, torch.arange(N)[:, None], torch.arange(N))
    weights = (pairs * mixer.core.a[:, None, None]).sum(-1).masked_fill(~seen, -torch.inf).softmax(-1)
    return mixer.out((weights @ v).transpose(1, 2).flatten(2)), weights


edges, along = edge_weights(mixer, x)
outputs, weights = masked(x)
both = {"outputs": (mixer(x), outputs), "weights": (along, weights[0][:, edges[1], edges[0]].T)}
both["gradients"] = tuple(torch.autograd.grad(y.square().sum(), x)[0] for y in both["outputs"])
differences = {name: (a - b).abs().max().item() for name, (a, b) in both.items()}


def draw():
    """Left the graph, with what one node looks at; right the same numbers as a matrix."""
    figure, colours = Figure(figsize=(11, 5.4), dpi=160, facecolor="white"), colormaps["magma_r"]
    left, right, key = (
        figure.add_axes(x) for x in ((0.02, 0.06, 0.44, 0.78), (0.54, 0.1, 0.36, 0.733), (0.92, 0.1, 0.012, 0.733))
    )
    at, matrix = [(math.sin(2 * math.pi * i / N), math.cos(2 * math.pi * i / N)) for i in range(N)], torch.full((N, N), torch.nan)
    matrix[edges[1], edges[0]] = along[:, 0].detach().float()
    top = along[:, 0].max().item()
    for j, i in edges.T.tolist():
        left.plot(*zip(at[i], at[j], strict=True), color=LINE, linewidth=1.2, zorder=1)
    for j, (here, share) in enumerate(zip(at, (matrix[QUERY] / top).tolist(), strict=True)):
        face = "white" if math.isnan(share) else colours(0.1 + 0.85 * share)
        left.scatter(*here, s=430, color=face, edgecolor=INK, linewidth=2.4 if j == QUERY else 0.6, zorder=3)
        left.text(*here, str(j), ha="center", va="center", fontsize=9, color="white" if share > 0.5 else INK, zorder=4)
        if share >= 0 and j != QUERY:
            arrow = {"arrowstyle": "-|>", "shrinkA": 13, "shrinkB": 14, "color": face, "linewidth": 1 + 4 * share}
            left.annotate("", at[QUERY], here, arrowprops={**arrow, "mutation_scale": 13})
    left.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
    left.set_axis_off()
    shown = right.imshow(matrix.numpy(), cmap=colours, vmin=-0.1 * top, vmax=1.05 * top)
    right.add_patch(Rectangle((-0.5, QUERY - 0.5), N, 1, fill=False, edgecolor=INK, linewidth=1.6, clip_on=False, zorder=3))
    right.set(xticks=range(N), yticks=range(N), facecolor="#f3f4f6")
    right.set_xlabel("key j (source)", color=GREY)
    right.set_ylabel("query i (target)", color=GREY)
    figure.colorbar(shown, cax=key).outline.set_visible(False)
    key.set_ylim(0, top)
    for axes in (right, key):
        axes.tick_params(length=0, labelsize=8, labelcolor=GREY)
        axes.spines[:].set(color=LINE)
    figure.text(0.03, 0.93, "Attention along the edges of a graph", fontsize=15, color=INK, weight="bold")
    figure.text(0.03, 0.885, f"What node {QUERY} takes from its neighbours", color=GREY)
    figure.text(0.54, 0.885, "The same weights as a matrix: no edge, no weight", color=GREY)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "graph_view.png")
    out = parser.parse_args().out
    print(f"{N} nodes: {edges.shape[1]} of {N**2} pairs are looked at, and the weights of each node sum to 1")
    for name, difference in differences.items():
        print(f"{name} of the layer and of the masked dense form differ by at most {difference:.0e}")
    assert max(differences.values()) < 1e-12
    draw().savefig(out)
    print(out)
