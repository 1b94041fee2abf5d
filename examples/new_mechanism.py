"""A mechanism of your own in one class: push and read are enough, causal and streaming follow from them.

python examples/new_mechanism.py --out new_mechanism.png
"""

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from regard import Attention, Can, Core, Dims, per_query_head
from regard.analysis.probe import attention_matrix
from regard.plots.mechanism_plot import GREY, INK, paint, scale_of


class Mean(NamedTuple):
    total: torch.Tensor  # (b g 1 e)
    count: torch.Tensor  # (b 1 1 1)


class Average(Core):
    """Every query gets the mean of all values: attention that pays none. A_ij = 1 / m. Cost: n."""

    can = Can.CAUSAL | Can.CROSS | Can.PADDING | Can.STREAM
    positional = False  # the positions of queries change nothing
    ignores = ("q", "k")  # a layer makes no maps for them

    def empty(self, k, v):
        return Mean(v.new_zeros(*v.shape[:2], 1, v.shape[-1]), v.new_zeros(len(v), 1, 1, 1))

    def push(self, memory, k, v, places):
        real = torch.ones_like(places.at, dtype=torch.bool) if places.valid is None else places.valid
        real, v = real[:, None, None].to(v.dtype), v.masked_fill(~real[:, None, :, None], 0)
        return Mean(memory.total + real @ v, memory.count + real.sum(-1, keepdim=True))

    def read(self, memory, q, places):
        mean = memory.total / memory.count.clamp(min=1)
        return per_query_head(mean, q).expand(-1, -1, q.shape[2], -1)  # grouped heads: the memory keeps g of them


def streams_as_it_is():
    dims = Dims(width=32, heads=4, causal=True)
    mixer = Attention(dims, Average(dims))
    x = torch.randn(2, 20, 32)
    y = mixer(x)
    state, steps = mixer.start(2), []
    for token in x.split(1, 1):
        step, state = mixer.extend(state, token)
        steps.append(step)
    same = torch.allclose(torch.cat(steps, 1), y, atol=1e-6)
    print("streaming equals the whole pass:", same)
    print("state bytes, whatever the length:", state.nbytes)
    assert same


def draw(n=24):
    """What every query takes of every key, found by the identity as values: both forms, from the same two methods."""
    figure = Figure(figsize=(9.6, 5.2), dpi=150, facecolor="white")
    figure.text(0.05, 0.915, "A mechanism of your own", fontsize=17, weight="bold", color=INK)
    figure.text(0.05, 0.86, "Average: two methods, push and read. Causal and streaming follow from them.", color=GREY)
    q = torch.zeros(1, 1, n, 8)
    found = {causal: attention_matrix(Average(Dims(8, 1, causal=causal)), q, q, causal=causal)[0, 0] for causal in (False, True)}
    scale = scale_of(torch.stack(list(found.values())))
    for i, (causal, weights) in enumerate(found.items()):
        axes = figure.add_axes((0.05 + 0.47 * i, 0.05, 0.42, 0.7))
        paint(axes, weights, scale)
        name = "causal: the mean of what came before" if causal else "all tokens: the mean of all"
        axes.set_title(name, fontsize=11.5, color=INK, loc="left", pad=8)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "new_mechanism.png")
    out = parser.parse_args().out
    streams_as_it_is()
    draw().savefig(out)
    print(f"drawn into {out}")
