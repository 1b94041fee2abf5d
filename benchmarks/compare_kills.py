"""Kill a running `regard compare` ten times with signal 9, at random moments: what is lost, and how does the grid end?

Every start goes on with the records that are there. A record that was whole at a kill must be there at the end with the same
validation score; what is lost are cells in flight, at most one a job. The scores of the end are compared with those of a grid
that was not disturbed, and no worker may outlive the command.

    python benchmarks/compare_kills.py [--kills 10]        into results/compare_kills.json (some minutes on two cores)
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Progress, save
from regard.compare.cell_record import CellRecord
from regard.compare.cell_store import CellStore

TASK = "recall(length=16, vocab=64, pairs=4, train=512, test=64)"
MIXERS = "softmax,linear,Local(8),identity,retention,conv"
OPTIONS = [
    "--tasks",
    TASK,
    "--mixers",
    MIXERS,
    "--lr",
    "1e-3,3e-3,1e-2,3e-2",
    "--seeds",
    "3",
    "--budget",
    "150",
    "--set",
    "batch=32",
    "--no-costs",
]
JOBS, SEED = 2, 0
COMMAND = "from regard.cli import app; app()"
PATIENCE = 120.0  # seconds for a new record
WORKERS_END = 20.0  # seconds within which workers notice that their command is gone


def start(folder: Path) -> subprocess.Popen:
    """Start the command in a session of its own, by which its workers are found."""
    command = [sys.executable, "-c", COMMAND, "compare", *OPTIONS, "--jobs", str(JOBS), "--device", "cpu", "--out", str(folder)]
    silent = subprocess.DEVNULL
    return subprocess.Popen(command, start_new_session=True, stdin=silent, stdout=silent, stderr=silent)


def whole_records(folder: Path) -> dict[str, CellRecord]:
    return {record.key: record for record in CellStore(folder).records()}


def session_members(leader: int) -> list[int]:
    """Return the processes of a session that are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended
            continue
        if int(session) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def killed(folder: Path, dice: random.Random) -> dict[str, Any]:
    """Start, kill behind a random number of new records and a random moment, and say what was there then."""
    before, wanted, process = len(whole_records(folder)), dice.randrange(3), start(folder)
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < PATIENCE:
        if len(list((folder / "cells").glob("*.json"))) >= before + wanted:
            break
        time.sleep(0.01)
    time.sleep(dice.uniform(0, 2))
    process.kill()
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError("the command ended by itself before it was killed: it failed, or the grid is too small")
    seconds, end = time.monotonic() - begun, time.monotonic() + WORKERS_END
    while (left := session_members(process.pid)) and time.monotonic() < end:
        time.sleep(0.1)
    for one in left:
        os.kill(one, signal.SIGKILL)
    return {"after_seconds": round(seconds, 2), "records_before": before, "workers_left": len(left)}


def finished(folder: Path) -> dict[str, CellRecord]:
    if start(folder).wait():
        raise RuntimeError(f"the grid in {folder} did not go on to its end")
    return whole_records(folder)


def scores(records: dict[str, CellRecord]) -> dict[str, tuple[Any, ...]]:
    return {key: (record.status, record.val, record.test, record.final) for key, record in records.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    args = parser.parse_args()
    dice, rows, progress = random.Random(SEED), [], Progress(args.kills + 2)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "killed"
        kept: dict[str, CellRecord] = {}
        for number in range(args.kills):
            row = {"kill": number + 1, **killed(folder, dice)}
            store = CellStore(folder)
            found = {record.key: record for record in store.records()}
            lost = [key for key, record in kept.items() if key not in found or found[key].val != record.val]
            rows.append(row | {"records": len(found), "damaged": len(store.damaged), "lost_records": len(lost)})
            kept = found
            progress.step(str(rows[-1]))
        end = finished(folder)
        lost = [key for key, record in kept.items() if key not in end or end[key].val != record.val]
        progress.step("the end of the grid that was killed")
        alone = finished(Path(work) / "alone")
        progress.step("the grid that was not")
    same = scores(end) == scores(alone)
    rows.append({"kill": None, "records": len(end), "lost_records": len(lost), "same_scores": same})
    settings = {"task": TASK, "mixers": MIXERS, "options": OPTIONS, "jobs": JOBS, "kills": args.kills, "seed": SEED}
    print(f"{len(end)} cells, {sum(row['lost_records'] for row in rows)} records lost, scores as in the undisturbed grid: {same}")
    print(save("compare_kills", settings | {"signal": "SIGKILL", "device": "cpu"}, rows))


if __name__ == "__main__":
    main()
