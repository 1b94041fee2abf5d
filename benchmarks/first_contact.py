"""How long a first contact takes: import regard, and commands that compute nothing.

python benchmarks/first_contact.py      into results/first_contact.json

Every row is the fastest of several fresh processes, in seconds of wall clock and of CPU. "beyond torch" is the CPU time of
`import regard; regard.layer` in a process that has imported torch.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import Progress, only_words, save

SRC = Path(__file__).resolve().parents[1] / "src"
REPEATS = 5
BEYOND = "import time, torch; t = time.process_time(); import regard; regard.layer; print(time.process_time() - t)"
COMMAND = "from regard_command import main; main()"
ROWS: dict[str, list[str]] = {
    "import torch": ["-c", "import torch"],
    "import regard": ["-c", "import regard"],
    "import regard; regard.layer": ["-c", "import regard; regard.layer"],
    **{
        f"regard {words}": ["-c", COMMAND, *words.split()] for words in ("--help", "--version", "list", "tasks", "tasks multi30k")
    },
    "regard show bigbird": ["-c", COMMAND, "show", "bigbird"],
}


def once(words: list[str]) -> tuple[float, float, str]:
    """Run a fresh process: wall seconds, CPU seconds, and what it printed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def main() -> None:
    only_words(__doc__)
    rows: list[dict[str, Any]] = []
    progress = Progress(len(ROWS) + 1)
    for name, words in ROWS.items():
        found = [once(words) for _ in range(REPEATS)]
        rows.append({"what": name, "wall_s": round(min(x[0] for x in found), 3), "cpu_s": round(min(x[1] for x in found), 3)})
        progress.step(f"{name}: {rows[-1]['wall_s']} s, {rows[-1]['cpu_s']} s of CPU")
    beyond = min(float(once(["-c", BEYOND])[2]) for _ in range(REPEATS))
    rows.append({"what": "regard beyond torch", "wall_s": None, "cpu_s": round(beyond, 3)})
    progress.step(f"regard beyond torch: {beyond:.3f} s of CPU")
    print(save("first_contact", {"repeats": REPEATS}, rows))


if __name__ == "__main__":
    main()
