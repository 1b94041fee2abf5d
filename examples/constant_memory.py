"""Stream a long sequence token by token: the state stays as small as the pattern allows, and nothing changes in the result.

python examples/constant_memory.py --out constant_memory.png
"""

import argparse
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

from regard import layer
from regard.plots.mechanism_plot import GREY, INK, LINE

PROMPT, LENGTH = 1000, 3000
SPECS = {"softmax": "#d1495b", "Local(64) | Global(first=4)": "#2b6cb0", "linear": "#2a9d6f"}


def streamed(spec, x, prompt):
    """The bytes of the state after the prompt and after every token behind it."""
    mixer = layer(spec, width=64, heads=4, causal=True)
    with torch.no_grad():
        whole, state = mixer(x), mixer.start(1)
        _, state = mixer.extend(state, x[:, :prompt])  # the prompt at once
        sizes = [state.nbytes]
        for t in range(prompt, x.shape[1]):
            y, state = mixer.extend(state, x[:, t : t + 1])
            sizes.append(state.nbytes)
    error = (y - whole[:, -1:]).abs().max().item()
    assert error < 1e-5
    print(
        f"{spec:28s} state {sizes[0] / 1024:7.1f} KiB after the prompt, {sizes[-1] / 1024:7.1f} KiB at the end; error {error:.1e}"
    )
    return sizes


def draw(found, prompt, length):
    figure = Figure(figsize=(9.6, 5.0), dpi=150, facecolor="white")
    figure.text(0.09, 0.905, "What a layer remembers while it streams", fontsize=17, weight="bold", color=INK)
    figure.text(
        0.09,
        0.845,
        f"Size of the state, spare room included, token by token behind a prompt of {prompt:,}; width 64, 4 heads.",
        color=GREY,
    )
    axes = figure.add_axes((0.09, 0.13, 0.66, 0.66))
    for (spec, sizes), colour in zip(found.items(), SPECS.values(), strict=True):
        kept = [size / 1024 for size in sizes]
        axes.plot(range(prompt, length + 1), kept, color=colour, linewidth=1.6)
        axes.text(
            length + (length - prompt) / 50,
            kept[-1],
            f"{spec}\n{kept[-1]:,.0f} KiB",
            color=colour,
            va="center",
            fontsize=11,
            linespacing=1.4,
        )
    axes.set(yscale="log", xlim=(prompt, length))
    axes.set_xlabel("tokens", color=GREY, fontsize=11)
    axes.set_ylabel("KiB", color=GREY, fontsize=11)
    axes.tick_params(which="both", length=0, pad=6, labelsize=10, labelcolor=GREY)
    axes.spines[:].set(color=LINE)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "constant_memory.png")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens that are read at once")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens in all")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(1, args.length, 64)
    draw({spec: streamed(spec, x, args.prompt) for spec in SPECS}, args.prompt, args.length).savefig(args.out)
    print(f"drawn into {args.out}")
