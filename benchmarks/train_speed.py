"""Tokens a second of `regard train --set precision=bf16-mixed` on a GPU, by mechanism, on text that is made up.

    PYTHONPATH=src python benchmarks/train_speed.py [--limit 40]                 results/train_speed.json, or into $OUT
    PYTHONPATH=src python benchmarks/train_speed.py --small                      a tiny model on a CPU, to try the script

Forms: eager, and graphs, where every pass is captured as a CUDA graph (`--set graphs=true`).
Updates are counted from the first line of the log (the 50th) to its last one, optimiser and data included, validation not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import common

MIXERS = ("softmax", "Local(256)", "linear", "retention", "gla")
FORMS = ("eager", "graphs")
SEED, WORDS, CHARACTERS = 0, 2000, 400_000
SETTINGS = {"width": 512, "heads": 8, "depth": 6, "ffn": 2048, "window": 4096, "max_len": 4096, "stride": 64}
SETTINGS |= {
    "batch_tokens": 32768,
    "dropout": 0.0,
    "weight_dropout": 0.0,
    "positions": "sinusoidal",
    "precision": "bf16-mixed",
    "steps": 150,
}
SMALL = {"width": 32, "heads": 4, "depth": 1, "ffn": 32, "window": 512, "max_len": 512, "batch_tokens": 1024, "steps": 100}


def made_up_text() -> str:
    """Draw words of a fixed list, the first ones most often, so that there is something to learn."""
    dice = random.Random(SEED)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))) for _ in range(WORDS)]
    chosen = dice.choices(words, [1 / rank for rank in range(1, WORDS + 1)], k=CHARACTERS // 4)
    return " ".join(chosen)[:CHARACTERS]


def train(mixer: str, form: str, settings: dict[str, Any], data: Path, seconds: float) -> dict[str, Any]:
    """Run `regard train` in a process of its own, and read its log."""
    row: dict[str, Any] = {"mixer": mixer, "form": form}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        pairs = settings | {"validate_every": settings["steps"], "save_every": settings["steps"], "graphs": form == "graphs"}
        words = [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "regard", "train", "shakespeare", "--mixer", mixer, *words]
        done = subprocess.run(
            [*command, "--data", str(data), "--out", str(out)], capture_output=True, text=True, check=False, timeout=seconds
        )
        if done.returncode:  # the last lines, which may point into a spec
            return row | {"reason": " ".join(done.stderr.split("\n")[-4:]).strip()}
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    spent = last["time"] - first["time"]
    rate = settings["batch_tokens"] * (last["step"] - first["step"]) / spent
    return row | {"tokens_per_second": rate, "updates": last["step"], "loss": [first["loss"], last["loss"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all of it")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    settings = SETTINGS | (SMALL if args.small else {})
    end = time.monotonic() + args.limit
    rows: list[dict[str, Any]] = []
    if folder := os.environ.get("OUT"):
        common.RESULTS = Path(folder)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "tinyshakespeare"
        data.mkdir()
        (data / "input.txt").write_text(made_up_text())
        for form, mixer in product(["eager"] if args.small else args.forms, MIXERS):
            if (left := end - time.monotonic()) < 1:
                break
            try:
                rows.append(train(mixer, form, settings, data, left))
            except subprocess.TimeoutExpired:
                break
            print(json.dumps(rows[-1]), flush=True)
            if not args.small:
                common.save("train_speed", settings, rows)


if __name__ == "__main__":
    main()
