"""Kill a training run with signal 9 again and again, while it trains and while it saves: does it end with the same bits?

python benchmarks/faults.py            into results/faults.json (a few minutes on two cores)
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from common import ROOT, Progress, only_words, save
from regard.training import atomic_files, checkpoints
from regard.training.metrics_log import TIMES, read_metrics

sys.path.insert(0, str(ROOT / "tests"))
RUNS, KILLS, SEED = 3, 8, 0
SETTINGS = {"steps": 120, "save_every": 5, "validate_every": 10, "average": 3}


def train(out: Path, die_at: int) -> None:
    """A process's whole life; it may end in the middle of the n-th file that its checkpoints write."""
    from regard.training.fit import fit
    from small_task import Small, small

    torch.set_num_threads(1)
    written, real = 0, atomic_files.write_synced

    def write(path: Path, data: bytes) -> None:
        nonlocal written
        written += path.parent.name.startswith(checkpoints.WRITING)
        if written == die_at:
            path.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, data)

    if die_at:
        atomic_files.write_synced = write
    fit(Small(small(**SETTINGS)), out, accelerator="cpu", quiet=True)


def start(out: Path, die_at: int = 0) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, str(out), str(die_at)])


def killed_in_training(out: Path, dice: random.Random) -> bool:
    """By us, a random moment behind a random number of checkpoints. Whether it was still alive."""
    process, seen = start(out), len(list(saves(out)))
    enough, moment = seen + dice.randrange(1, 4), dice.uniform(0, 0.2)
    while process.poll() is None and len(list(saves(out))) < enough:
        time.sleep(0.001)
    time.sleep(moment)
    process.kill()
    return process.wait() == -signal.SIGKILL


def killed_in_saving(out: Path, dice: random.Random) -> bool:
    """By itself, with half of a file written."""
    return start(out, dice.randrange(1, 13)).wait() == -signal.SIGKILL


def saves(out: Path) -> range:
    return range((checkpoints.steps(out) or [0])[-1] // SETTINGS["save_every"])


def remembered(out: Path) -> dict:
    """What must be the same, bit for bit."""
    told = [{name: x for name, x in line.items() if name not in TIMES} for line in read_metrics(out / "metrics.jsonl")]
    last = checkpoints.latest(out)
    assert last is not None
    paths = {
        "chosen_weights": out / checkpoints.WEIGHTS,
        "last_weights": last / checkpoints.WEIGHTS,
        "optimizer": last / checkpoints.OPTIMIZER,
    }
    return {"metrics": told, **{name: atomic_files.digest(path.read_bytes()) for name, path in paths.items()}}


def disturbed(out: Path, dice: random.Random, progress: Progress) -> list[dict]:
    """The kills of one run, training and saving in turn, and then its end."""
    kills = []
    for number in range(KILLS):
        kind, kill = (("training", killed_in_training), ("saving", killed_in_saving))[number % 2]
        if not kill(out, dice):
            raise RuntimeError(f"the run in {out} ended by itself before kill {number + 1}: it failed, or should be longer")
        half = len(list((out / "checkpoints").glob(checkpoints.WRITING + "*")))
        kills.append({"while": kind, "last_saved_step": (checkpoints.steps(out) or [0])[-1], "half_written_folders": half})
        progress.step(f"killed while {kind}, behind step {kills[-1]['last_saved_step']}")
    if start(out).wait() != 0:
        raise RuntimeError(f"the run in {out} did not go on to its end")
    return kills


def main() -> None:
    dice, rows, progress = random.Random(SEED), [], Progress(RUNS * KILLS)
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "undisturbed"
        if start(alone).wait():
            raise RuntimeError("the undisturbed run failed")
        expected = remembered(alone)
        for number in range(RUNS):
            out = Path(folder) / f"run-{number}"
            kills, found = disturbed(out, dice, progress), remembered(out)
            rows.append({"run": number, **{f"same_{name}": found[name] == x for name, x in expected.items()}, "kills": kills})
    value = "every run is compared with one that was not disturbed, bit for bit; only times may differ"
    settings = {
        **SETTINGS,
        "runs": RUNS,
        "kills_a_run": KILLS,
        "signal": "SIGKILL",
        "device": "cpu",
        "seed": SEED,
        "value": value,
    }
    print(save("faults", settings, rows))
    if not all(same for row in rows for name, same in row.items() if name.startswith("same_")):
        raise SystemExit("a disturbed run ended otherwise: " + json.dumps(rows))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        only_words(__doc__)
        main()
