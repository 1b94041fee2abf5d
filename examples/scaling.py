"""Why scores are divided by sqrt(d): without it their variance is d, softmax picks one key, and nothing is left to learn from.

python examples/scaling.py --out scaling.png
"""

import argparse
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "scaling.png")
out = parser.parse_args().out
INK, GREY, LINE = "#16181d", "#6f7580", "#d9dce1"
QUERIES, KEYS, DIMS = 1000, 256, [2**p for p in range(2, 11)]
FORMS = {"q·k": lambda d: 1.0, "q·k / √d": lambda d: d**-0.5}
FACTS = ("variance of scores", "entropy, in bits", "largest weight", "gradient |da/ds|")


def facts(scale: float, d: int) -> list[float]:
    """What softmax makes of the scores of random queries and keys, for the median query."""
    random = torch.Generator().manual_seed(d)
    q, k = (torch.randn(size, d, generator=random, dtype=torch.float64) for size in (QUERIES, KEYS))
    s = q @ k.T * scale
    a = s.softmax(-1)
    entropy = -(a * a.clamp_min(1e-300).log2()).sum(-1)
    square = a.square().sum(-1)
    gradient = (square - 2 * (a**3).sum(-1) + square.square()).clamp_min(0).sqrt()  # of da/ds = diag(a) - a a^T
    return [s.var().item(), *(x.median().item() for x in (entropy, a.max(-1).values, gradient))]


found = {name: [facts(scale(d), d) for d in DIMS] for name, scale in FORMS.items()}
for name, rows in found.items():
    print(f"\nsoftmax({name}) over {KEYS} keys, queries and keys of unit variance")
    print(f"{'d':>6}" + "".join(f"{fact:>22}" for fact in FACTS))
    for d, row in zip(DIMS, rows, strict=True):
        print(f"{d:6}" + "".join(f"{x:22.3g}" for x in row))

figure = Figure(figsize=(12.8, 5.0), dpi=150, facecolor="white")
figure.text(0.05, 0.905, "Why scores are divided by √d", fontsize=17, weight="bold", color=INK)
said = f"Without it the variance of scores is d, one of {KEYS} keys takes all the weight, and the gradient of softmax dies."
figure.text(0.05, 0.845, said, color=GREY, fontsize=11)
for i, fact in enumerate((0, 2, 3)):
    axes = figure.add_axes((0.05 + 0.325 * i, 0.14, 0.23, 0.58))
    for (name, rows), colour in zip(found.items(), ("#d1495b", "#2b6cb0"), strict=True):
        axes.plot(DIMS, [row[fact] for row in rows], "o-", color=colour, markersize=5, linewidth=1.6)
        axes.text(DIMS[-1] * 1.25, rows[-1][fact], name, color=colour, fontsize=11, va="center")
    axes.set(xscale="log", yscale="linear" if fact == 2 else "log")
    axes.set_xticks(DIMS[::2], [f"{d:,}" for d in DIMS[::2]])
    axes.set_title(FACTS[fact], fontsize=11.5, color=INK, loc="left", pad=12)
    axes.set_xlabel("d", color=GREY, fontsize=11)
    axes.tick_params(which="both", length=0, pad=6, labelsize=9.5, labelcolor=GREY)
    axes.minorticks_off()
    axes.spines[:].set(color=LINE)
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(out)
print(f"\ndrawn into {out}")
