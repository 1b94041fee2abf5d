"""Alignment failures of speech synthesis, with and without guidance, for three readers and over seeds: `regard train tones`.

A model is one block of the encoder and one of the decoder, and learns texts whose letters are chords. Each row is one run, scored
on 100 texts that it has not learned from, all generated freely: failures by attention (skips, repeats, no stop; docs/speech.md),
the error rate of the letters found in its frames, and the distance of frames beside two floors.

python benchmarks/synthesis.py --seeds 3        into results/synthesis.json, in which rows of earlier calls stay unless run again
python benchmarks/synthesis.py --seeds 5 --device cuda --jobs 10
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, Progress, save
from regard import load
from regard.tasks import config, make_task
from regard.training.fit import fit

READERS = ("plain", "location", "monotonic")
GUIDES = (0.0, 1.0)
MODEL: dict[str, Any] = {
    "width": 64, "heads": 2, "depth": 1, "decoder_depth": 1, "ffn": 128, "lr": 4e-3, "warmup": 50, "steps": 600,
}  # fmt: skip
Key = tuple[str, float, int, int]


def run(reader: str, guide: float, seed: int, changes: dict[str, Any], device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    often = {"validate_every": changes["steps"] // 3, "save_every": changes["steps"]}
    task = make_task(config("tones").replace({**changes, **often, "reader": reader, "guide": guide, "seed": seed}))
    task.read()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fit(task, Path(folder) / "run", accelerator=device, quiet=True)
        seconds = time.perf_counter() - start
        scores = load(Path(folder) / "run", device=device).evaluate("test")
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [{"step": line["step"], **line["val"]} for line in lines if "val" in line]
    return {
        "reader": reader,
        "guide": guide,
        "seed": seed,
        "steps": changes["steps"],
        "seconds": round(seconds, 1),
        "scores": scores,
        "val": curve,
    }


def _key(row: dict[str, Any]) -> Key:
    return row["reader"], row["guide"], row["seed"], row["steps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=MODEL["steps"])
    parser.add_argument("--readers", nargs="*", default=READERS, choices=READERS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once: small models leave a GPU idle most of the time")
    args = parser.parse_args()
    changes = {**MODEL, "steps": args.steps}
    path, rows = RESULTS / "synthesis.json", dict[Key, dict[str, Any]]()
    if path.exists():
        rows = {_key(row): row for row in json.loads(path.read_text())["rows"] if row["steps"] == args.steps}
    asked = [(reader, guide, seed) for seed in range(1, args.seeds + 1) for reader in args.readers for guide in GUIDES]
    progress = Progress(len(asked))
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, *one, changes, args.device) for one in asked]):
            row = done.result()
            rows[_key(row)] = row
            found, what = row["scores"], f"{row['reader']}, guide {row['guide']:g}, seed {row['seed']}"
            progress.step(f"{what}: {found['failures']:.0f} % fail, CER {found['cer']:.0f} %")
            save("synthesis", {**changes, "task": "tones", "jobs": args.jobs}, sorted(rows.values(), key=_order))
    print(path)


def _order(row: dict[str, Any]) -> tuple[int, float, int]:
    return READERS.index(row["reader"]), row["guide"], row["seed"]


if __name__ == "__main__":
    main()
