"""What every benchmark needs: honest clocks, peak memory, and a result file that says how it was made."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from regard.bench.machine import made_with, write_record
from regard.bench.timing import peak_bytes as peak_bytes
from regard.bench.timing import seconds as seconds
from regard.bench.timing import taking_turns as taking_turns
from regard.bench.timing import timed as timed

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def only_words(description: str | None, words: str = "", nargs: str = "*") -> list[str]:
    """Read the command line of a script without options, which --help describes; returns its words, where it takes any."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if words:
        parser.add_argument(words, nargs=nargs)
    return getattr(parser.parse_args(), words, [])


def alone(script: str, *args: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a part of a benchmark in a process of its own, so that no earlier part leaves memory behind."""
    env = {**os.environ, **(env or {})}
    done = subprocess.run([sys.executable, script, *args], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(args)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def save(name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """results/NAME.json, whole or not at all."""
    record = {"benchmark": name, "settings": settings, "made_with": made_with(), "rows": rows}
    path = RESULTS / f"{name}.json"
    write_record(path, record)
    return path


class Progress:
    """One line a step on standard error, with the time left."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.perf_counter()

    def step(self, what: str) -> None:
        self.done += 1
        spent = time.perf_counter() - self.start
        left = spent / self.done * (self.total - self.done)
        print(f"[{self.done}/{self.total}] {what}   {spent:.0f} s, about {left:.0f} s left", file=sys.stderr, flush=True)
