"""CIFAR-10 in colour: how accuracy grows with the training images, and eight mechanisms over the same patches.

    REGARD_DATA=... LIMIT=1500 python benchmarks/images.py                    into results/images.json
    python benchmarks/images.py --only curve --seeds 1 --models vit hybrid    one part of it, some models
    python benchmarks/images.py --join FILE ...                               files of several processes, into results/images.json
    python benchmarks/images.py --tiny                                        a few updates of tiny models, elsewhere

Parts: `best` trains a CNN, a ViT and a CCT (a ViT behind two convolutions) on all images, `curve` a CNN, a ViT and a hybrid on
1 % to 100 % of them, `mechanisms` eight mechanisms over 64 patches. Every cell is a setting of `regard train cifar10`; the
learning rate is that of its preset, weights are those that did best on validation, and test is scored once. Floors are
computed on the same images.

A cell that is in the results is not trained again, so a run that ends at LIMIT seconds goes on where it was. Cells are sorted so
that the most telling come first. The images are on the device, and a step is captured as a CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import RESULTS
from epoch_order import EpochOrder
from regard import tasks
from regard.arena.trivial_floors import ridge
from regard.bench.machine import made_with, write_record
from regard.data.batch import Batch
from regard.data.colour_images import image_floors, some_images
from regard.data.gray_images import LabelledImages
from regard.tasks.image_labels import ImageTask
from regard.training.learner import Learner
from regard.training.loop import matmul_precision

SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
MECHANISMS = ("softmax", "linear", "Neighbourhood(8, 1)", "Local(16)", "linformer", "performer", "fnet", "mlp_mixer")
FAMILIES: dict[str, str | None] = {"cnn": "cnn", "vit": None, "hybrid": "hybrid", "cct": "cct"}  # and the preset of each
BEST = {"cnn": 20_000, "vit": 35_000, "cct": 35_000}  # updates of those that are trained longest
CURVE = ("cnn", "vit", "hybrid")
CHECKS = 12  # validations of a cell
AHEAD = 32  # updates that are launched before they are waited for, at most: a stopped process leaves no more on the card
TINY = {"width": 16, "heads": 2, "ffn": 16, "steps": 3, "batch_tokens": 8, "warmup": 1, "precision": "32"}
SMALL_VIT = {"width": 192, "heads": 3, "depth": 6, "ffn": 384, "lr": 1e-3}  # a wider one needs a lower rate


@dataclass(frozen=True)
class ImageCell:
    """One model to train."""

    part: str
    model: str
    share: float
    seed: int
    steps: int
    mixer: str = "softmax"

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def planned(seeds: int, only: str | None, models: list[str], scale: float) -> list[ImageCell]:
    """List all cells, the most telling first: all images, then the curve, then mechanisms; further seeds at the end."""
    cells: list[ImageCell] = []
    for seed in range(1, seeds + 1):
        if seed == 1:
            cells += [ImageCell("best", name, 1.0, seed, steps) for name, steps in BEST.items()]
        for share in SHARES:
            steps = max(1500, round(9000 * share**0.5))
            cells += [ImageCell("curve", name, share, seed, steps) for name in CURVE]
        cells += [ImageCell("mechanisms", "vit", 1.0, seed, 6000, mixer) for mixer in MECHANISMS]
    chosen = [cell for cell in cells if only in (None, cell.part) and cell.model in models]
    return [ImageCell(**(asdict(cell) | {"steps": max(1, round(cell.steps * scale))})) for cell in chosen]


def settings_of(cell: ImageCell, tiny: bool) -> dict[str, Any]:
    """Return the changes of the task's settings."""
    changes: dict[str, Any] = {
        "seed": cell.seed,
        "fraction": cell.share,
        "steps": cell.steps,
        "warmup": min(500, cell.steps // 10),
    }
    if cell.part == "mechanisms":
        plain = cell.mixer in ("fnet", "mlp_mixer")  # which have an order of their own
        changes |= {**SMALL_VIT, "mixer": cell.mixer, "positions": "none" if plain else "learned_2d"}
    elif cell.part == "curve" and cell.model == "vit":
        changes |= SMALL_VIT
    if not torch.cuda.is_available():
        changes["precision"] = "32"
    if tiny:
        changes |= TINY | ({"depth": 1} if cell.model != "cnn" else {})
        changes |= {"stem": "cnn(channels=4, stages=2, blocks=1)"} if cell.model in ("cnn", "hybrid") else {}
    return changes


class DeviceImages:
    """The images of one split on the device, and batches of them as a function of seed and step."""

    def __init__(self, part: list[Any], device: torch.device) -> None:
        self.images = torch.stack([torch.from_numpy(image) for image, _ in part]).to(device)
        self.labels = torch.tensor([label for _, label in part], device=device)
        self.order = EpochOrder(len(self.labels), device)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Return the batch of a step."""
        rows = self.order.rows(step, size, seed)
        return Batch(self.images[rows], None, self.labels[rows])


@torch.no_grad()
def accuracy(task: ImageTask, model: torch.nn.Module, data: DeviceImages, learner: Learner) -> float:
    """Score a split, in the precision of training."""
    model.eval()
    right = torch.zeros((), dtype=torch.long, device=data.labels.device)
    with learner.autocast():
        for images, labels in zip(data.images.split(1000), data.labels.split(1000), strict=True):
            right += (task.pixel_scores(model, images.float() / 255).argmax(-1) == labels).sum()
    model.train()
    return 100 * int(right) / max(1, len(data.labels))


class Trainer:
    """Trains cells on images that are read once."""

    def __init__(self, tiny: bool, deadline: float) -> None:
        self.tiny, self.deadline = tiny, deadline
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cudnn.benchmark = True  # shapes are always the same
        made = tasks.make_task(tasks.config("cifar10"))
        made.read()
        assert isinstance(made, ImageTask)
        self.whole = {name: rows[:: 200 if tiny else 1] for name, rows in made.splits.items()}
        self.held = {name: DeviceImages(self.whole[name], self.device) for name in ("val", "test")}
        self.labels = made.labels
        self.data = made.describe_data()[-1]  # the original pixels, or a copy in JPEG files

    def floors(self) -> dict[str, float]:
        """Score what needs no network on test: one label, the nearest mean, ridge regression of pixels."""
        train, test = (_arrays(self.whole[name]) for name in ("train", "test"))
        x, y = (torch.from_numpy(part.images).flatten(1).float() / 255 for part in (train, test))
        targets = [torch.from_numpy(part.labels).long() for part in (train, test)]
        found = ridge(x, targets[0], y, targets[1], penalty=0.1)
        return {**image_floors(train, test), "pixels, ridge regression": 100 * found}

    def train(self, cell: ImageCell) -> dict[str, Any]:
        """Train one cell, with captured steps on a GPU unless a step cannot be captured, which is printed; returns its row."""
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return self._trained(cell, graphs=self.device.type == "cuda")
        except ValueError as error:
            if "graphs=false" not in str(error):
                raise
            print(f"{cell.model} {cell.mixer} goes on without CUDA graphs: {error}", flush=True)
            return self._trained(cell, graphs=False)

    def _trained(self, cell: ImageCell, graphs: bool) -> dict[str, Any]:
        preset = FAMILIES[cell.model]
        config = tasks.config("cifar10", preset).replace(settings_of(cell, self.tiny))
        task = tasks.make_task(config)
        assert isinstance(task, ImageTask)
        task.labels = self.labels
        torch.manual_seed(cell.seed)
        data = DeviceImages(_share_of(self.whole["train"], cell.share), self.device)
        learner = Learner(task.model(), task.loss, config.replace({"graphs": graphs}), self.device.type)
        start, model = time.monotonic(), learner.model
        best: tuple[float, dict[str, Tensor]] = (-1.0, {})
        with matmul_precision(config.precision):
            learner.begin()
            for step in range(config.steps):
                learner.update([data.batch(step, config.batch_tokens, cell.seed)])
                learner.pending = learner.pending[-1:]
                if step % AHEAD == 0 and self.device.type == "cuda":
                    torch.cuda.synchronize()
                if (step + 1) % max(1, config.steps // CHECKS) == 0 or step + 1 == config.steps:
                    means = learner.measured(lambda: "nothing is saved")  # which raises where training diverges
                    with learner.evaluated():
                        score = accuracy(task, model, self.held["val"], learner)
                        if score > best[0]:
                            best = score, {name: x.detach().clone() for name, x in model.state_dict().items()}
                    name, spent = f"{cell.model} {cell.mixer} {100 * cell.share:g} %", time.monotonic() - start
                    now = f"val {score:.2f}, loss {means['loss']:.3f}, norm {means['norm']:.2f}, {spent:.0f} s"
                    print(f"  {name}, update {step + 1} of {config.steps}: {now}", flush=True)
                    self._check(start, step + 1, config.steps)
            model.load_state_dict(best[1])
            test = accuracy(task, model, self.held["test"], learner)
        return {
            **asdict(cell),
            "train_images": len(data.labels),
            "graphs": graphs,
            "parameters": sum(p.numel() for p in model.parameters()),
            "val": best[0],
            "test": test,
            "seconds": round(time.monotonic() - start, 1),
            "config": config.to_json(),
        }

    def _check(self, start: float, done: int, steps: int) -> None:
        """Stop a cell that cannot end in time, so that the rest of the time is free for a shorter one."""
        spent = time.monotonic() - start
        if time.monotonic() + spent / done * (steps - done) > self.deadline:
            raise TimeoutError(f"stopped at update {done} of {steps}: it needs {spent / done * steps:.0f} s")


def _arrays(rows: list[Any]) -> LabelledImages:
    return LabelledImages(np.stack([image for image, _ in rows]), np.array([label for _, label in rows], np.uint8))


def _share_of(rows: list[Any], share: float) -> list[Any]:
    """Take a share of every class: the same images as the setting `fraction`."""
    part = some_images(_arrays(rows), share)
    return list(zip(part.images, part.labels.tolist(), strict=True))


def kept(path: Path) -> dict[str, Any]:
    """Read the results so far."""
    return json.loads(path.read_text()) if path.is_file() else {"benchmark": "images", "settings": {}, "floors": {}, "rows": []}


def open_cells(cells: list[ImageCell], rows: list[dict[str, Any]]) -> Iterator[ImageCell]:
    done = {_cell(row).key for row in rows}
    return (cell for cell in cells if cell.key not in done)


def _cell(row: dict[str, Any]) -> ImageCell:
    return ImageCell(**{name: row[name] for name in ImageCell.__dataclass_fields__})


def join(paths: list[Path]) -> None:
    """Write the rows of several files on the same images; a later file replaces cells of an earlier one."""
    records = [kept(RESULTS / "images.json"), *(json.loads(path.read_text()) for path in paths)]
    filled = [record for record in records if record["rows"]]
    if len({record["settings"]["data"] for record in filled}) > 1:
        sys.exit("these files are on different images: " + ", ".join(str(path) for path in paths))
    cells = {_cell(row).key: row for record in filled for row in record["rows"]}
    commits = dict.fromkeys(name for record in filled for name in record["made_with"]["commit"].split(", "))
    last = filled[-1]
    joined = {
        "settings": {name: value for name, value in last["settings"].items() if name != "scale"},
        "made_with": last["made_with"] | {"commit": ", ".join(commits)},
        "rows": sorted(cells.values(), key=lambda row: row["part"]),
    }
    write_record(RESULTS / "images.json", last | joined)
    print(f"{len(cells)} cells are in {RESULTS / 'images.json'}; the tables: make tables", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=("best", "curve", "mechanisms"))
    parser.add_argument("--models", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--scale", type=float, default=1.0, help="of the updates of all cells")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.join:
        return join(options.join)
    name = Path(tempfile.gettempdir()) / "images_tiny.json" if options.tiny else RESULTS / "images.json"
    path, deadline = options.out or name, time.monotonic() + float(os.environ.get("LIMIT", "1e9"))
    record, trainer = kept(path), Trainer(options.tiny, deadline)
    if record["rows"] and record["settings"]["data"] != trainer.data:
        sys.exit(f"{path} is on {record['settings']['data']}, and this is {trainer.data}: choose another file by --out")
    if not record["floors"]:
        record["floors"] = trainer.floors()
    record["settings"] = {
        "data": trainer.data,
        "shares": SHARES,
        "scale": options.scale,
        "tiny": options.tiny,
    }
    cells = planned(options.seeds, options.only, options.models, options.scale)
    for cell in open_cells(cells, record["rows"]):
        if time.monotonic() > deadline - 5:
            print("LIMIT reached; run it again to go on", flush=True)
            break
        try:
            row = trainer.train(cell)
        except Exception as error:  # noqa: BLE001 - one cell must not end the others
            print(f"FAILED {cell.part} {cell.model} {cell.mixer} {cell.share:g}: {type(error).__name__}: {error}", flush=True)
            continue
        record["rows"].append(row)
        record["made_with"] = made_with()
        write_record(path, record)
        print(
            f"{cell.part:10} {cell.model:7} {cell.mixer:20} {100 * cell.share:5.1f} % seed {cell.seed}: "
            f"val {row['val']:.2f} test {row['test']:.2f} in {row['seconds']:.0f} s",
            flush=True,
        )
    print(f"{len(record['rows'])} cells are in {path}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
