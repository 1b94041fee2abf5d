"""The presets for a CPU, trained and scored through the command line: python benchmarks/cpu_presets.py [--only TASK ...]

Every row is a run of `regard train TASK --preset cpu`, with the minutes it took (validations included) and its scores on test,
or on validation where there is no test, beside the floors of results/floors.json. Runs go one after the other, on as many threads
as --threads: the machine should do nothing else. Needs REGARD_DATA. A call that was stopped goes on where it was, with the same
--work; rows are written into results/cpu_presets.json one by one. With --set, for a trial, --out must name another file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, Progress
from regard.bench.machine import made_with, write_record
from regard.tasks import TASKS

MAIN = [sys.executable, "-m", "regard"]
PRESET = "cpu"
SPLITS = {"shakespeare": "val"}  # the others have a test


def trained(task: str, folder: Path, threads: int, changes: list[str]) -> dict[str, Any]:
    """A run, made or gone on with, and its scores."""
    sets = [word for change in changes for word in ("--set", change)]
    where = ["--out", str(folder), "--device", "cpu", "--threads", str(threads)]
    subprocess.run([*MAIN, "train", task, "--preset", PRESET, *sets, *where], check=True, stdout=sys.stderr)
    split = SPLITS.get(task, "test")
    scored = [*MAIN, "evaluate", str(folder), "--split", split, "--json", "--device", "cpu", "--threads", str(threads)]
    scores = json.loads(subprocess.run(scored, check=True, stdout=subprocess.PIPE, text=True).stdout)["scores"]
    result, about, config = (json.loads((folder / f"{name}.json").read_text()) for name in ("result", "run", "config"))
    return {
        "task": task,
        "split": split,
        "minutes": result["seconds"] / 60,
        "updates": result["steps"],
        "parameters": about["parameters"],
        "threads": about["threads"],
        "commit": about["commit"],
        "scores": scores,
        "floors": floors_of(task, split),
        "settings": config,
    }


def floors_of(task: str, split: str) -> list[dict[str, Any]]:
    """The floors of a task: what is reached without a network."""
    path = RESULTS / "floors.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [{"floor": row["floor"], "scores": row["scores"]} for row in rows if (row["task"], row["split"]) == (task, split)]


def main() -> None:
    known = [name for name, entry in TASKS.items() if PRESET in entry.presets]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    parser.add_argument("--work", type=Path, default=Path("runs/cpu_presets"), help="the folder of the runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="for a trial")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_presets.json")
    given = parser.parse_args()
    if given.changes and given.out == RESULTS / "cpu_presets.json":
        parser.error("--set makes other runs than the presets: name another file by --out")
    kept = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    rows, failed = {row["task"]: {"commit": kept["made_with"]["commit"], **row} for row in kept["rows"]}, []
    progress = Progress(len(given.only))
    for task in given.only:
        try:
            rows[task] = trained(task, given.work / task, given.threads, given.changes)
        except subprocess.CalledProcessError as error:  # the others are trained all the same
            failed.append(task)
            progress.step(f"{task} failed with exit code {error.returncode}")
            continue
        settings = {"preset": PRESET, "threads": given.threads, "changes": given.changes}
        ordered = [rows[name] for name in known if name in rows]
        write_record(given.out, {"benchmark": "cpu_presets", "settings": settings, "made_with": made_with(), "rows": ordered})
        best = TASKS[task].best[0]
        progress.step(f"{task}: {rows[task]['minutes']:.1f} minutes, {best} {rows[task]['scores'][best]:.2f}")
    if failed:
        sys.exit(f"not trained: {', '.join(failed)}")


if __name__ == "__main__":
    main()
