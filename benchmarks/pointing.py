"""Pointer networks on generated sets, sorted numbers and convex hulls: python benchmarks/pointing.py --work DIR [--seeds 1 2 3]

Trains each task as its settings are, chosen on validation by the run itself, and scores it once on test, greedily and by beams.
Writes results/pointing.json; runs that are in DIR already go on or are taken as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import save
from tasks import Row, found, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder for the runs")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    named = ((task, seed) for task in ("sorting", "hull") for seed in asked.seeds)
    rows = [Row(f"{task} {seed}", "point", task, [f"seed={seed}"], scored=([], ["beam=5"])) for task, seed in named]
    asked.work.mkdir(parents=True, exist_ok=True)
    run(rows, asked.work.resolve(), asked.device, 1, float("inf"), False)
    lines = [line for row in rows if (line := found(asked.work.resolve(), row))]
    for line in lines:
        shown = " · ".join(f"{name} {value:.1f}" for name, value in line["scores"][0]["scores"].items())
        print(f"{line['name']}: {shown}, {line['steps']} updates in {line['seconds']:.0f} s")
    print(save("pointing", {"seeds": asked.seeds}, lines))


if __name__ == "__main__":
    main()
