"""Causal attention by kernels is a recurrent network: a state of constant size, one token at a time, the same answers.

python examples/rnn_view.py --out rnn_view.png
"""

import argparse
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

from regard import layer

N, INK, GREY, LINE = 400, "#16181d", "#6f7580", "#d9dce1"
COLOURS = {"softmax": "#d1495b", "Local(64)": "#e0a030", "performer(features=64)": "#3b6fb6", "linear": "#2a9d6f"}
x = torch.randn(1, N, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.no_grad()
def by_hand(mixer):
    """`linear` as the cell of a recurrent network: S <- S + phi(k) v^T, z <- z + phi(k), y = phi(q) S / phi(q).z"""
    q, k, v = (part(x).unflatten(-1, (4, 16))[0] for part in (mixer.q, mixer.k, mixer.v))  # (n h d)
    q, k = (torch.nn.functional.elu(y) + 1 for y in (q, k))
    s, z, out = torch.zeros(4, 16, 16).double(), torch.zeros(4, 16).double(), []
    for t in range(N):
        s, z = s + k[t, :, :, None] * v[t, :, None], z + k[t]
        out.append(torch.einsum("hd,hde->he", q[t], s) / (q[t] * z).sum(-1, keepdim=True))
    return mixer.out(torch.stack(out).flatten(1))


@torch.no_grad()
def stream(spec):
    """State bytes after each token, and how far each answer is from that of the parallel pass."""
    torch.manual_seed(0)
    mixer = layer(spec, width=64, heads=4, causal=True).double()
    whole, state, sizes, errors = mixer(x)[0], mixer.start(1), [], []
    for t in range(N):
        y, state = mixer.extend(state, x[:, t : t + 1])
        sizes.append(state.nbytes)
        errors.append((y[0, 0] - whole[t]).abs().max().item())
    hand = (by_hand(mixer) - whole).abs().max().item() if spec == "linear" else None
    return sizes, errors, hand


def draw(found):
    figure = Figure(figsize=(11, 4.6), dpi=160, facecolor="white")
    left, right = figure.add_axes((0.075, 0.13, 0.38, 0.62)), figure.add_axes((0.57, 0.13, 0.38, 0.62))
    for spec, (sizes, errors, _) in found.items():
        left.plot(range(1, N + 1), [size / 1024 for size in sizes], color=COLOURS[spec], linewidth=2)
        left.text(N + 8, sizes[-1] / 1024, spec.split("(f")[0], color=COLOURS[spec], va="center", fontsize=9)
        right.scatter(range(1, N + 1), [max(e, 1e-18) for e in errors], color=COLOURS[spec], s=3, alpha=0.6, linewidth=0)
    left.set(yscale="log", xlim=(0, N))
    right.axhline(torch.finfo(x.dtype).eps, color=GREY, linewidth=0.8, linestyle=(0, (4, 4)))
    right.text(N + 8, torch.finfo(x.dtype).eps, "$2^{-52}$", va="center", color=GREY, fontsize=9)
    right.set(yscale="log", xlim=(0, N), ylim=(1e-17, 1e-12))
    for axes in (left, right):
        axes.set_xlabel("tokens seen", color=GREY, fontsize=9)
        axes.tick_params(length=0, labelsize=8, labelcolor=GREY)
        axes.minorticks_off()
        axes.grid(axis="y", color=LINE, linewidth=0.5)
        axes.spines[:].set_visible(False)
    figure.text(0.03, 0.915, "Causal attention by kernels is a recurrent network", fontsize=15, weight="bold", color=INK)
    figure.text(0.03, 0.82, "State in KiB: constant for kernels, growing for softmax", color=GREY)
    figure.text(0.53, 0.82, "Token by token against all at once: largest difference", color=GREY)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "rnn_view.png")
    out = parser.parse_args().out
    found = {spec: stream(spec) for spec in COLOURS}
    for spec, (sizes, errors, _) in found.items():
        print(f"{spec:24s} state {sizes[0]:7,} bytes after 1 token, {sizes[-1]:7,} after {N}; off by at most {max(errors):.0e}")
    print(f"linear written by hand as a recurrent cell is off by at most {found['linear'][2]:.0e}")
    assert max(max(errors) for _, errors, _ in found.values()) < 1e-12 and found["linear"][2] < 1e-12
    draw(found).savefig(out)
    print(out)
