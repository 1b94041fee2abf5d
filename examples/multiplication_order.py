"""Without the softmax, attention is a product of three matrices, and the order of multiplication decides what it costs.

(q k^T) v needs (d + e) n^2 multiplications, q (k^T v) needs 2 d e n, and both are the same. They meet at n = 2 d e / (d + e).
python examples/multiplication_order.py --out multiplication_order.png
"""

import argparse
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "multiplication_order.png")
out = parser.parse_args().out
INK, GREY, LINE = "#16181d", "#6f7580", "#d9dce1"
D = E = 64
LENGTHS = [2**p for p in range(3, 17)]
ORDERS = {"(q kᵀ) v": lambda q, k, v: (q @ k.mT) @ v, "q (kᵀ v)": lambda q, k, v: q @ (k.mT @ v)}
FORMULAS = {"(q kᵀ) v": lambda n: (D + E) * n**2, "q (kᵀ v)": lambda n: 2 * D * E * n}


def counted(order, n: int) -> int:
    """Multiplications that PyTorch would do: a FLOP is a multiplication or an addition, and it counts both."""
    with FlopCounterMode(display=False) as counter:
        order(*(torch.empty(n, size, device="meta") for size in (D, D, E)))
    return counter.get_total_flops() // 2


q, k, v = torch.randn(3, 1000, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
first, second = (order(q, k, v) for order in ORDERS.values())
print(f"n = 1,000, d = e = {D}: the results differ by {(first - second).abs().max() / first.abs().max():.0e}, relatively")
meet = 2 * D * E // (D + E)
counts = {name: [counted(order, n) for n in LENGTHS] for name, order in ORDERS.items()}
print(f"\n{'n':>7} {'(q kᵀ) v':>18} {'q (kᵀ v)':>16} {'ratio':>9}")
for n, many, few in zip(LENGTHS, *counts.values(), strict=True):
    assert [many, few] == [formula(n) for formula in FORMULAS.values()]  # not about as many: exactly
    print(f"{n:7,} {many:18,} {few:16,} {many / few:9,.3g}")
print(f"\ncounted = formula at every length; both need as many at n = 2de / (d + e) = {meet}")

figure = Figure(figsize=(9.6, 5.4), dpi=150, facecolor="white")
figure.text(0.09, 0.915, "The order of multiplication", fontsize=17, weight="bold", color=INK)
figure.text(0.09, 0.86, f"Multiplications for the same result, d = e = {D}: counted (dots) and by formula (lines).", color=GREY)
axes = figure.add_axes((0.09, 0.13, 0.74, 0.68))
for (name, formula), label, colour in zip(FORMULAS.items(), ("(d + e) n²", "2 d e n"), ("#d1495b", "#2b6cb0"), strict=True):
    axes.plot(LENGTHS, [formula(n) for n in LENGTHS], color=colour, linewidth=1.6)
    axes.plot(LENGTHS, counts[name], "o", color=colour, markersize=5)
    axes.text(LENGTHS[-1] * 1.5, counts[name][-1], f"{name}\n{label}", color=colour, va="center", fontsize=13, linespacing=1.5)
axes.set(xscale="log", yscale="log", xlim=(6, 8.5e4), ylim=(3e3, 2e12))
axes.set_xticks(LENGTHS[::3], [f"{n:,}" for n in LENGTHS[::3]])
axes.axvline(meet, color=LINE, linewidth=1, zorder=0)
axes.text(meet * 1.12, 6e3, f"as many at n = 2de / (d + e) = {meet}", color=GREY, fontsize=11)
axes.set_xlabel("tokens n", color=GREY, fontsize=11)
axes.tick_params(which="both", length=0, pad=6, labelsize=10, labelcolor=GREY)
axes.minorticks_off()
axes.spines[:].set(color=LINE)
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(out)
print(f"drawn into {out}")
