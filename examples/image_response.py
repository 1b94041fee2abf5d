"""A CNN with pooling over the whole image answers a shifted image as before, a scaled or rotated one otherwise.

It learns upright shapes of one size, near the middle, in half a minute; or take a trained run and an image file:

python examples/image_response.py --out response.png --filters filters.png
python examples/image_response.py --run runs/cifar10-softmax-1 --image photo.jpg
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from regard import load
from regard.analysis.image_response import filter_maps, first_convolution, image_response
from regard.blocks import conv_stages
from regard.models import ConvTokens, ImageReader, PerSequence
from regard.plots.image_plot import draw_filters, draw_response

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "image_response.png")
parser.add_argument("--filters", type=Path, default=Path(tempfile.gettempdir()) / "image_filters.png")
parser.add_argument("--run", type=Path, help="a run of cifar10 or cifar10_gray, in place of the shapes")
parser.add_argument("--image", help="an image file for the run")
parser.add_argument("--steps", type=int, default=150, help="updates on shapes")
options = parser.parse_args()
SIDE, SHAPES = 32, ("disc", "square", "triangle", "cross")


def shapes(labels: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Draw shapes (b) with their middles at these pixels, (b 1 32 32), with a soft edge."""
    at = torch.arange(SIDE, dtype=torch.float32)
    y, x = at[:, None] - row[:, None, None], at - column[:, None, None]
    y, x = torch.broadcast_tensors(y, x)
    inside = torch.stack(
        [
            6 - (y.square() + x.square()).sqrt(),
            5.5 - torch.maximum(y.abs(), x.abs()),
            torch.minimum(5 - y, y / 2 - x.abs() + 4),
            torch.minimum(7 - torch.maximum(y.abs(), x.abs()), 1.6 - torch.minimum(y.abs(), x.abs())),
        ]
    )
    chosen = inside[labels, torch.arange(len(labels))]
    return (chosen + 0.5).clamp(0, 1)[:, None]


def drawn(count: int) -> tuple[Tensor, Tensor]:
    """Draw shapes near the middle on a noisy ground."""
    labels = torch.randint(len(SHAPES), (count,))
    row, column = (16 + torch.randint(-3, 4, (count,)) for _ in range(2))
    images = 0.15 + 0.7 * shapes(labels, row, column)
    return images + 0.05 * torch.randn_like(images), labels


if options.run is not None:
    if options.image is None:
        parser.error("--run needs an image: --image photo.jpg")
    from regard.data.colour_images import read_image

    run = load(options.run)
    task, model = run.task, run.model
    pixels = read_image(options.image, task.side, task.channels == 1)
    image, names = torch.tensor(pixels) / 255, task.labels

    def answer(images: Tensor) -> Tensor:
        return task.pixel_scores(model, images)

    label = int(answer(image[None]).argmax())
else:
    torch.manual_seed(0)
    model = ImageReader(
        ConvTokens(1, conv_stages(1, first=12, stages=3, blocks=1, kernel=5), 32), PerSequence(32, 4, pool="mean")
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(options.steps):
        images, labels = drawn(32)
        loss = nn.functional.cross_entropy(model(images - 0.3), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    images, labels = drawn(500)
    with torch.no_grad():
        right = (model(images - 0.3).argmax(-1) == labels).float().mean()
    print(f"{options.steps} updates on upright shapes of one size: {100 * right:.1f} % of 500 new ones are right")
    names, label = SHAPES, 2
    image = 0.15 + 0.7 * shapes(torch.tensor([label]), torch.tensor([16]), torch.tensor([16]))[0]

    def answer(images: Tensor) -> Tensor:
        return model(images - 0.3)


rows = image_response(answer, image, label)
for row in rows:
    shares = "  ".join(f"{value:g}: {share:.2f}" for value, share in zip(row.values, row.probabilities.tolist(), strict=True))
    print(f"{row.name}, the probability of {names[label]}: {shares}")
kind = "A trained run" if options.run is not None else "A CNN that learned upright shapes of one size"
draw_response(rows, names[label], title=f"{kind}, on shifted, scaled and rotated images").savefig(options.out)
maps = filter_maps(first_convolution(model), image)
draw_filters(maps, image, title="Filters of the first convolution and their feature maps").savefig(options.filters)
print(f"drawn into {options.out} and {options.filters}")
