"""Does a change of the code change a number? Ten short runs with fixed seeds, in this checkout and in another one.

python benchmarks/same_losses.py ../older              five tasks, two mechanisms each, into results/same_losses.json
python benchmarks/same_losses.py ../older --steps 5    fewer updates, printed

Every loss and every validation score of the two metric logs must be the same to the last digit: exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "results" / "same_losses.json"
TASKS = ("reverse", "numbers", "saw", "polarity", "copy")
MIXERS = ("softmax", "Local(4)")
SMALL = {"width": 32, "heads": 4, "depth": 2, "ffn": 64, "batch_tokens": 512, "dropout": 0.0, "seed": 7}
NUMBERS = ("loss", "grad_norm", "lr", "score", "train", "val")  # of a line of the log; times differ


def losses(checkout: Path, task: str, mixer: str, steps: int) -> list[Any]:
    """What one run of one checkout writes into its log, without times."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        pairs = {**SMALL, "steps": steps, "validate_every": 5, "save_every": steps}
        settings = [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "regard", "train", task, "--mixer", mixer, *settings]
        env = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, "--out", str(out)], env=env, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{checkout}: regard train {task} --mixer {mixer} failed\n{done.stderr}")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", *NUMBERS) if key in line} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    runs, differ = [], []
    for task in TASKS:
        for mixer in MIXERS:
            here, there = (losses(x.resolve(), task, mixer, asked.steps) for x in (ROOT, asked.older))
            same = here == there
            differ += [] if same else [f"{task} with {mixer}"]
            print(f"{task:10} {mixer:10} {len(here)} lines, {'the same' if same else 'NOT the same'}", flush=True)
            runs.append({"task": task, "mixer": mixer, "lines": len(here), "same": same, "last": here[-1]})
    if asked.steps == parser.get_default("steps"):
        commits = {
            name: subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=path, text=True).strip()
            for name, path in (("here", ROOT), ("there", asked.older))
        }
        text = json.dumps({"commits": commits, "settings": {**SMALL, "steps": asked.steps}, "runs": runs}, indent=1)
        RESULT.with_suffix(".writing").write_text(text + "\n")
        RESULT.with_suffix(".writing").replace(RESULT)
    if differ:
        raise SystemExit(f"{len(differ)} of {len(runs)} runs differ: {', '.join(differ)}")


if __name__ == "__main__":
    main()
