"""GANs with attention over a feature map, with a convolution of as many weights there, and without either: SAGAN.

    REGARD_DATA=... python benchmarks/gan.py --seeds 3 --limit 110   CIFAR-10 (JPEG copy), into results/gan.json; again to go on
    python benchmarks/gan.py --data-set digits --channels 16         scikit-learn's digits, enlarged to 32 x 32
    python benchmarks/gan.py --tiny                                  a few updates of tiny models, elsewhere

Samples are scored by the Frechet distance to the training images in the features of a small classifier that is trained here, on
the same images. It is not FID, which needs the Inception network, and its numbers can be compared within one results file only.
Beside it: two halves of the training images (no generator can expect less), the test images, and noise.

All cells have the same images in the same order for one seed, and are scored by as many samples. A cell that is in the results is
not trained again; one that --limit seconds end is kept beside the results and goes on from there. --sheet draws samples.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common import RESULTS
from regard.analysis.frechet import frechet_distance
from regard.bench.machine import made_with, write_record
from regard.blocks.conv_block import conv_stages
from regard.data.colour_images import pillow_image, read_colour_images
from regard.data.digit_scenes import read_digits, split_digits
from regard.data.locate import find
from regard.models.gan import GAN_SIDE, MAP_LAYERS, ImageCritic, ImageGenerator
from regard.training.adversarial import AdversarialRates, Adversaries

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHEET = (8, 12)  # rows and columns of samples


class Data(NamedTuple):
    """Images from -1 to 1 as bytes on the device, with labels."""

    train: Tensor  # uint8 (n c 32 32)
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def read_data(name: str, folder: Path | None) -> Data:
    if name == "cifar10":
        parts = read_colour_images(find("cifar10_jpeg", folder))
        given = [(parts[part].images, parts[part].labels) for part in ("train", "test")]
    else:
        split = split_digits(read_digits(folder))
        given = [(enlarged(split[part].pictures), split[part].labels) for part in ("train", "test")]
    tensors = [torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE) for pair in given for x in pair]
    return Data(tensors[0], tensors[1].long(), tensors[2], tensors[3].long())


def enlarged(pictures: np.ndarray) -> np.ndarray:
    """Enlarge digits (n, 8, 8) from 0 to 16 to bytes (n, 1, 32, 32)."""
    small = torch.from_numpy(pictures)[:, None].float() * (255 / 16)
    return functional.interpolate(small, (GAN_SIDE, GAN_SIDE), mode="bilinear").round().byte().numpy()


def pixels(images: Tensor) -> Tensor:
    """Return bytes as numbers from -1 to 1."""
    return images.float() / 127.5 - 1


class Features(nn.Module):
    """A small classifier, whose pooled feature map is the space of the distance."""

    def __init__(self, colours: int, first: int) -> None:
        super().__init__()
        self.net = conv_stages(colours, first=first, stages=3, blocks=1)
        self.head = nn.Linear(self.net.channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images).mean((2, 3))


def train_features(data: Data, first: int, steps: int) -> Features:
    """Train the classifier: AdamW, one cycle of the learning rate, crops and flips of colour images."""
    torch.manual_seed(0)
    model = Features(data.train.shape[1], first).to(DEVICE).train()
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    plan = torch.optim.lr_scheduler.OneCycleLR(adam, 4e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(data.train), (128,)).to(DEVICE)
        images = pixels(data.train[rows])
        if images.shape[1] == 3:
            images = images.flip(3) if torch.rand(()) < 0.5 else images
            top, left = torch.randint(9, (2,)).tolist()
            images = functional.pad(images, (4, 4, 4, 4))[..., top : top + GAN_SIDE, left : left + GAN_SIDE]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = functional.cross_entropy(model.head(model(images)).float(), data.train_labels[rows])
        adam.zero_grad()
        loss.backward()
        adam.step()
        plan.step()
    return model.eval()


@torch.no_grad()
def features_of(model: Features, images: Tensor) -> Tensor:
    """Return features (n d) of images from -1 to 1."""
    return torch.cat([model(part.to(DEVICE)).float() for part in images.split(500)]).cpu()


@torch.no_grad()
def accuracy(model: Features, data: Data) -> float:
    scores = torch.cat([model.head(model(pixels(part))) for part in data.test.split(500)])
    return 100 * float((scores.argmax(1) == data.test_labels).float().mean())


class Trainer:
    """Trains cells until a deadline, and keeps the one that it has not finished."""

    def __init__(self, args: argparse.Namespace, path: Path, record: dict[str, Any]) -> None:
        self.args, self.deadline = args, time.monotonic() + args.limit
        self.state_path, self.features_path = path.with_suffix(".state.pt"), path.with_suffix(".features.pt")
        self.data = read_data(args.data_set, args.data)
        self.features = self._features(record)
        self.real = features_of(self.features, pixels(self.data.train))

    def _features(self, record: dict[str, Any]) -> Features:
        """Train the classifier and compute the floors, or load it: one classifier for all cells of a file."""
        first = self.args.feature_channels
        if self.features_path.is_file() and record["floors"]:
            model = Features(self.data.train.shape[1], first).to(DEVICE).eval()
            model.load_state_dict(torch.load(self.features_path, map_location=DEVICE, weights_only=True))
            return model
        if record["rows"]:
            raise SystemExit(f"{self.features_path} is gone, and other features give other distances: move the results away")
        model = train_features(self.data, first, self.args.feature_steps)
        torch.save(model.state_dict(), self.features_path)
        record["floors"] = self._floors(model)
        return model

    def _floors(self, model: Features) -> dict[str, float]:
        real = features_of(model, pixels(self.data.train))
        order = torch.randperm(len(real), generator=torch.Generator().manual_seed(0))
        one, two = real[order[: len(real) // 2]], real[order[len(real) // 2 :]]
        noise = torch.rand(len(self.data.test), *self.data.test.shape[1:], generator=torch.Generator().manual_seed(0)) * 2 - 1
        return {
            "accuracy of the classifier": accuracy(model, self.data),
            "halves of the training images": frechet_distance(one, two),
            "test images": frechet_distance(real, features_of(model, pixels(self.data.test))),
            "noise": frechet_distance(real, features_of(model, noise)),
        }

    def networks(self, cell: dict[str, Any]) -> Adversaries:
        args, colours = self.args, self.data.train.shape[1]
        torch.manual_seed(cell["seed"])
        options = {"channels": args.channels, "kind": cell["layer"], "mixer": args.mixer, "at": args.at}
        nets = ImageGenerator(colours, **options), ImageCritic(colours, **options)
        return Adversaries(*nets, AdversarialRates(batch=args.batch), DEVICE)

    def distance(self, pair: Adversaries) -> float:
        return frechet_distance(self.real, features_of(self.features, pair.samples(self.args.samples)))

    def train(self, cell: dict[str, Any]) -> dict[str, Any] | None:
        """Train a cell and score it; None: the time is over, and it is kept."""
        args, pair, key = self.args, self.networks(cell), json.dumps([cell, self.args.steps], sort_keys=True)
        curve, spent = self._put(pair, key)
        start = time.monotonic()
        dice = torch.Generator()
        while pair.step < args.steps:
            dice.manual_seed(cell["seed"] * 1_000_003 + pair.step)
            rows = torch.randint(len(self.data.train), (args.batch,), generator=dice).to(DEVICE)
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
                pair.update(pixels(self.data.train[rows]))
            if pair.step % max(1, args.steps // 4) == 0:
                curve.append([pair.step, self.distance(pair)])
            if time.monotonic() > self.deadline and pair.step < args.steps:
                state = {"key": key, "curve": curve, "spent": spent + time.monotonic() - start, **pair.state()}
                torch.save(state, self.state_path)
                print(f"{key} is kept at update {pair.step}: run it again to go on", flush=True)
                return None
        if args.sheet:
            draw_sheet(pair.samples(SHEET[0] * SHEET[1]), args.sheet / f"gan_{cell['layer']}_{cell['seed']}.png")
        self.state_path.unlink(missing_ok=True)
        sizes = {name: sum(p.numel() for p in getattr(pair, name).parameters()) for name in ("generator", "critic")}
        gains = {name: float(torch.as_tensor(getattr(getattr(pair, name).layer, "gain", 0.0)).detach()) for name in sizes}
        seconds = round(spent + time.monotonic() - start, 1)
        return {**cell, "steps": args.steps, "parameters": sizes, "gains": gains, "curve": curve, "distance": self.distance(pair),
                "seconds": seconds}  # fmt: skip

    def _put(self, pair: Adversaries, key: str) -> tuple[list[Any], float]:
        """Go on from a kept cell, if it is this one."""
        if not self.state_path.is_file():
            return [], 0.0
        state = torch.load(self.state_path, map_location=DEVICE, weights_only=True)
        if state["key"] != key:
            return [], 0.0
        pair.put_state(state)
        return state["curve"], state["spent"]


def draw_sheet(images: Tensor, path: Path) -> None:
    """Write samples (n c 32 32) from -1 to 1 into one picture."""
    rows, columns = SHEET
    shown = ((images[: rows * columns].clamp(-1, 1) + 1) * 127.5).round().byte()
    grid = shown.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).numpy()
    picture = pillow_image().fromarray(grid[..., 0] if grid.shape[2] == 1 else grid)
    picture.resize((2 * picture.width, 2 * picture.height), 0).save(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-set", choices=("cifar10", "digits"), default="cifar10")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--feature-steps", type=int, default=3000)
    parser.add_argument("--feature-channels", type=int, default=64, help="of the first stage of the classifier")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--mixer", default="softmax")
    parser.add_argument("--at", type=int, default=16, help="side of the feature map: 16 or 32")
    parser.add_argument("--layers", nargs="+", choices=MAP_LAYERS, default=list(MAP_LAYERS))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sheet", type=Path, help="a folder for pictures of samples")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        tiny = {
            "data_set": "digits",
            "steps": 4,
            "feature_steps": 4,
            "feature_channels": 8,
            "channels": 4,
            "batch": 4,
            "samples": 96,
        }
        args = argparse.Namespace(**(vars(args) | tiny))
    return args


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.sheet:
        args.sheet.mkdir(parents=True, exist_ok=True)
    path = args.out or (Path(tempfile.gettempdir()) / "gan_tiny.json" if args.tiny else RESULTS / "gan.json")
    empty = {"benchmark": "gan", "settings": {}, "floors": {}, "rows": []}
    record = json.loads(path.read_text()) if path.is_file() else empty
    trainer = Trainer(args, path, record)
    names = ("data_set", "steps", "feature_steps", "feature_channels", "channels", "batch", "samples", "mixer", "at", "tiny")
    record["settings"] = {name: getattr(args, name) for name in names}
    write_record(path, record | {"made_with": made_with()})
    done = {(row["layer"], row["seed"]) for row in record["rows"]}
    cells = [{"layer": layer, "seed": seed} for seed in range(1, args.seeds + 1) for layer in args.layers]
    for cell in cells:
        if (cell["layer"], cell["seed"]) in done or time.monotonic() > trainer.deadline:
            continue
        row = trainer.train(cell)
        if row is None:
            break
        record["rows"].append(row)
        record["made_with"] = made_with()
        write_record(path, record)
        print(f"{cell['layer']:12} seed {cell['seed']}: distance {row['distance']:.3f} in {row['seconds']:.0f} s", flush=True)
    print(f"{len(record['rows'])} cells are in {path}", flush=True)


if __name__ == "__main__":
    main()
