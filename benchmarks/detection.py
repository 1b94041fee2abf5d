"""Digits in scenes by object queries (attention) and by a dense head of as many weights (convolutions): `regard train detect`.

Rows: queries that are learned vectors (DETR), queries that begin as the likeliest cells of the encoder, and the dense head.

    python benchmarks/detection.py --seeds 3 --limit 110             into results/detection.json; again to go on
    python benchmarks/detection.py --preset cpu --steps 3000         small models, on a CPU
    python benchmarks/detection.py --tiny                            a few updates of tiny models, elsewhere

Both heads have the same stem, scenes, losses, number of updates and order of scenes. The learning rate of each is the
better one of --rates on validation, by the first seed. Weights are those of the last update. How sure a detection must be to be
counted is chosen on validation for each model: heads differ in how sure they are, because they have more or fewer slots without
an object. A cell that is in the results is not trained again, and one that --limit
seconds end is kept in a file beside the results and goes on from there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from common import RESULTS
from epoch_order import EpochOrder
from regard import tasks
from regard.bench.machine import made_with, write_record
from regard.data.batch import Batch
from regard.tasks.detection import DetectionTask
from regard.training.learner import Learner
from regard.training.loop import matmul_precision

HEADS: dict[str, dict[str, Any]] = {
    "queries": {"head": "queries", "begin": "learned"},
    "cells": {"head": "queries", "begin": "cells"},
    "dense": {"head": "dense"},
}
SURE = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # scores from which on a detection counts
TINY = {
    "width": 16, "heads": 2, "depth": 1, "ffn": 16, "steps": 4, "batch_tokens": 4, "warmup": 1, "scenes": 40, "held_out": 12,
    "canvas": 32, "stem": "conv(layers=3, stride=2, pool='none', norm='group')",
}  # fmt: skip


class SceneStore:
    """Scenes on the device, made once for all cells; batches are a function of seed and step."""

    def __init__(self, task: DetectionTask, device: str) -> None:
        rows = task.splits["train"]
        parts = [task.batch(rows[start : start + 1000]).to(device) for start in range(0, len(rows), 1000)]
        self.images = torch.cat([part.source for part in parts])
        self.labels = torch.cat([part.target for part in parts if part.target is not None])
        self.extra = {name: torch.cat([part.extra[name] for part in parts]) for name in parts[0].extra}
        self.order = EpochOrder(len(self.labels), self.labels.device)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        rows = self.order.rows(step, size, seed)
        return Batch(self.images[rows], None, self.labels[rows], None, {name: x[rows] for name, x in self.extra.items()})


class Trainer:
    """Trains cells until a deadline, and keeps the one that it has not finished."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        self.args, self.device = args, "cuda" if torch.cuda.is_available() else "cpu"
        self.deadline = time.monotonic() + args.limit
        self.state_path = path.with_suffix(".state.pt")
        self.stores: dict[str, SceneStore] = {}
        self.made: dict[str, DetectionTask] = {}

    def task(self, cell: dict[str, Any]) -> DetectionTask:
        changes: dict[str, Any] = {**HEADS[cell["head"]], "seed": cell["seed"], "lr": cell["lr"]}
        if self.device == "cuda":
            changes["precision"] = "bf16-mixed"
        changes |= {"steps": self.args.steps} if self.args.steps else {}
        changes |= {"scenes": self.args.scenes} if self.args.scenes else {}
        changes |= TINY if self.args.tiny else {}
        found = tasks.make_task(tasks.config("detect", self.args.preset).replace(changes))
        assert isinstance(found, DetectionTask)
        return found

    def train(self, cell: dict[str, Any]) -> dict[str, Any] | None:
        """Train a cell and score it; None: the time is over, and it is kept."""
        task, key = self.task(cell), json.dumps(cell, sort_keys=True)
        task.read(self.args.data)
        kind = task.config.head  # which the batches depend on
        if kind not in self.stores:
            self.stores = {kind: SceneStore(task, self.device)}
        config, store = task.config, self.stores[kind]
        torch.manual_seed(cell["seed"])
        learner = Learner(task.model(), task.loss, config, self.device)
        learner.begin()
        spent = self._put(learner, key)
        start = time.monotonic()
        with matmul_precision(config.precision):
            while learner.step < config.steps:
                learner.update([store.batch(learner.step, config.batch_tokens, cell["seed"])])
                if learner.step % 50 == 0:
                    learner.measured(lambda: "nothing is saved")  # which raises where training diverges
                if time.monotonic() > self.deadline:
                    self._keep(learner, key, spent + time.monotonic() - start)
                    return None
            model = learner.model
            with learner.autocast():
                val, test, sure = scored(task, model)
        seconds = round(spent + time.monotonic() - start, 1)
        self.state_path.unlink(missing_ok=True)
        size = sum(p.numel() for p in model.parameters())
        return {**cell, "steps": config.steps, "parameters": size, "sure": sure, "val": val, "test": test, "seconds": seconds}

    def _keep(self, learner: Learner, key: str, spent: float) -> None:
        state = {"key": key, "step": learner.step, "spent": spent, "model": learner.model.state_dict()}
        torch.save(state | {"optimizer": learner.optimizer.state_dict()}, self.state_path)
        print(f"{key} is kept at update {learner.step}: run it again to go on", flush=True)

    def _put(self, learner: Learner, key: str) -> float:
        """Go on from a kept cell, if it is this one; returns the seconds that it has taken."""
        if not self.state_path.is_file():
            return 0.0
        state = torch.load(self.state_path, map_location=self.device, weights_only=True)
        if state["key"] != key:
            return 0.0
        learner.model.load_state_dict(state["model"])
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.step = state["step"]
        return state["spent"]


def scored(task: DetectionTask, model: torch.nn.Module) -> tuple[dict[str, float], dict[str, float], float]:
    """Score validation and test by the threshold that counts best on validation, the middle one of equals; returns it too."""
    found = {}
    for sure in SURE:
        task.config = task.config.replace({"sure": sure})
        found[sure] = task.score(model, "val")
    most = max(scores["count"] for scores in found.values())
    equal = [sure for sure in SURE if found[sure]["count"] == most]
    sure = equal[len(equal) // 2]
    task.config = task.config.replace({"sure": sure})
    return found[sure], task.score(model, "test"), sure


def next_cell(record: dict[str, Any], args: argparse.Namespace) -> dict[str, Any] | None:
    """Find the next cell: all rates of the first seed, then the better rate of each head for the others."""
    done = {(row["head"], row["seed"], row["lr"]): row for row in record["rows"]}
    for seed in range(1, args.seeds + 1):
        for head in HEADS:
            rates = args.rates if seed == 1 else [best_rate(record["rows"], head)]
            for rate in rates:
                if (head, seed, rate) not in done:
                    return {"head": head, "seed": seed, "lr": rate}
    return None


def best_rate(rows: list[dict[str, Any]], head: str) -> float:
    """Return the learning rate of the best validation of the first seed."""
    own = [row for row in rows if row["head"] == head and row["seed"] == 1]
    return max(own, key=lambda row: row["val"]["map50"])["lr"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of digits/digits.csv, where scikit-learn is not installed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--scenes", type=int)
    parser.add_argument("--preset", choices=("cpu",))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    path = args.out or (Path(tempfile.gettempdir()) / "detection_tiny.json" if args.tiny else RESULTS / "detection.json")
    empty = {"benchmark": "detection", "settings": {}, "floors": {}, "rows": []}
    record = json.loads(path.read_text()) if path.is_file() else empty
    trainer = Trainer(args, path)
    while (cell := next_cell(record, args)) is not None and time.monotonic() < trainer.deadline:
        if not record["floors"]:
            task = trainer.task(cell)
            task.read(args.data)
            record["floors"], record["settings"] = task.floors("test"), {"preset": args.preset, "config": task.config.to_json()}
        row = trainer.train(cell)
        if row is None:
            break
        record["rows"].append(row)
        record["made_with"] = made_with()
        write_record(path, record)
        scores = " ".join(f"{name} {row['test'][name]:.2f}" for name in ("map50", "map", "count"))
        print(f"{cell['head']:8} seed {cell['seed']} lr {cell['lr']:g}: {scores} in {row['seconds']:.0f} s", flush=True)
    print(f"{len(record['rows'])} cells are in {path}", flush=True)


if __name__ == "__main__":
    main()
