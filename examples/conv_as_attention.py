"""A convolution is attention: nine heads that each look at one neighbour compute what a 3 x 3 kernel computes.

python examples/conv_as_attention.py --out conv_as_attention.png
"""

import argparse
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from regard.analysis.equivalents import conv_as_attention
from regard.analysis.probe import attention_matrix

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "conv_as_attention.png")
out = parser.parse_args().out
N, INK, GREY, LINE = 32, "#16181d", "#6f7580", "#d9dce1"
at = torch.arange(N, dtype=torch.float64)
far = ((at[:, None] - 13).square() + (at - 16).square()).sqrt()
image = ((11 - far).clamp(0, 1) - (6 - far).clamp(0, 1) + 0.5 * (at[:, None] > 26))[None, None]  # a ring over a horizon
conv = nn.Conv2d(1, 1, 3, padding=1, bias=False).double()
conv.weight.data.copy_(torch.tensor([[-1.0, -2, -1], [0, 0, 0], [1, 2, 1]]))  # Sobel: what changes from top to bottom
attention = conv_as_attention(conv)
image.requires_grad_()
outputs = [layer(image) for layer in (conv, attention)]
gradients = [torch.autograd.grad(y.square().sum(), image)[0] for y in outputs]
heads = attention_matrix(attention.core, *attention.places(5, 5), causal=False)[0, :, 12].detach()  # the middle of 5 x 5
print(f"{len(heads)} heads, softmax over all {(N + 2) ** 2:,} pixels: an image of {N} x {N} and the ring around it")
for name, (a, b) in {"outputs": outputs, "gradients": gradients}.items():
    print(f"{name} of the convolution and of attention differ by at most {(a - b).abs().max():.0e}")
print(f"a head gives the pixel it means a weight of 1, all the others {heads[0].sort().values[:-1].sum():.0e} together")
assert all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in (outputs, gradients))

figure, shown = Figure(figsize=(12.8, 5.4), dpi=150, facecolor="white"), {}
figure.text(0.03, 0.915, "A 3x3 convolution is attention with nine heads", fontsize=17, weight="bold", color=INK)
said = "Each head looks at one neighbour ■ of the query □; its output projection is one number of the kernel."
figure.text(0.03, 0.86, said, color=GREY)
for h, (weights, number) in enumerate(zip(heads, conv.weight.flatten().tolist(), strict=True)):
    axes = figure.add_axes((0.03 + 0.104 * (h % 3), 0.565 - 0.256 * (h // 3), 0.087, 0.206))
    axes.pcolormesh(weights.view(7, 7).flip(0).numpy(), cmap="Greys", vmin=0, vmax=1.15, edgecolors=LINE, linewidth=0.4)
    axes.add_patch(Rectangle((3, 3), 1, 1, fill=False, edgecolor="#d1495b", linewidth=1.8))
    shown[f"head {h + 1}, times {number:.0f}"] = axes
most = outputs[0].abs().max().item()
for i, (title, picture) in enumerate({"image": image, "convolution": outputs[0], "attention": outputs[1]}.items()):
    axes = figure.add_axes((0.375 + 0.207 * i, 0.2, 0.188, 0.188 * 12.8 / 5.4))
    axes.imshow(
        picture[0, 0].detach().numpy(), **({"cmap": "Greys"} if i == 0 else {"cmap": "RdBu_r", "vmin": -most, "vmax": most})
    )
    shown[title] = axes
for title, axes in shown.items():
    axes.set_title(title, fontsize=9.5, color=GREY, loc="left", pad=4)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=LINE)
figure.text(0.789, 0.14, f"differs by at most {(outputs[0] - outputs[1]).abs().max():.0e}", fontsize=9.5, color=INK)
figure.savefig(out)
print(f"drawn into {out}")
