"""Tox21, toxicity of 7,823 molecules in twelve assays, split by scaffold: `regard train tox21`, over a few seeds.

The graph transformer with a bias for bonds and paths, and the same without any bias of pairs (`--rows no_pairs`), which sees a
molecule as a set of atoms. Weights of the best validation are tested once. Beside it: the floor by fingerprints. Published for
scaffold splits: 70 to 79, by tuning; numbers of random splits (83 to 85) are of another problem. Needs RDKit.

REGARD_DATA=... python benchmarks/tox21.py --seeds 5                                        into results/tox21.json
REGARD_DATA=... python benchmarks/tox21.py --seeds 2 --set width=48 --set depth=2 --set steps=300      a small budget
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Progress, save
from regard import load
from regard.tasks import config, make_task
from regard.tasks.molecule_labels import MoleculeLabelsTask
from regard.training.fit import fit

ROWS: dict[str, dict[str, Any]] = {"pairs": {}, "no_pairs": {"paths": 0, "bonds": False}}


def run(row: str, seed: int, changes: list[str], read: MoleculeLabelsTask | None) -> tuple[dict[str, Any], MoleculeLabelsTask]:
    """Train and test one row; molecules that were read before are taken from there."""
    task = make_task(config("tox21").replace({**ROWS[row], "seed": seed}).set(changes))
    assert isinstance(task, MoleculeLabelsTask)
    if read is None:
        task.read()
    else:
        task.names, task.splits, task.floors = read.names, read.splits, read.floors
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = fit(task, Path(folder) / "run", quiet=True)
        seconds = time.perf_counter() - start
        trained = load(Path(folder) / "run")
        val, test = (task.score(trained.model, split) for split in ("val", "test"))
    found = {"row": row, "seed": seed, "updates": result.steps, "chosen_at": result.best_step, "seconds": round(seconds, 1)}
    found |= {"val": val["roc_auc"], "test": test["roc_auc"], "floor": test["floor"]}
    return found | {"settings": task.config.to_json()}, task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    progress, rows, read = Progress(args.seeds * len(args.rows)), [], None
    for seed in range(1, args.seeds + 1):
        for row in args.rows:
            found, read = run(row, seed, args.changes, read)
            rows.append(found)
            progress.step(f"{row}, seed {seed}: {found['test']:.1f} on test")
            save("tox21", {"seeds": args.seeds, "changes": args.changes}, rows)
    print("results/tox21.json")


if __name__ == "__main__":
    main()
