"""What every benchmark needs: honest clocks, peak memory, and a result file that says how it was made."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import regard

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def timed(f: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of several calls, after one that warms up."""
    f()
    return [seconds(f, device) for _ in range(repeats)]


def seconds(f: Callable[[], Any], device: torch.device) -> float:
    """Of one call, and of all the work it starts on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def taking_turns(fs: dict[str, Callable[[], Any]], device: torch.device, rounds: int, calls: int = 3) -> dict[str, list[float]]:
    """Seconds of many calls of each. They take turns, so that a busy moment hits all alike; the first call of a turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in fs}
    for _ in range(rounds):
        for name, f in fs.items():
            times[name] += timed(f, device, calls)
    return times


def peak_bytes(f: Callable[[], Any], device: torch.device) -> int:
    """The most memory that a call held beyond what was there before it. On a CPU: Linux's own high-water mark."""
    gc.collect()  # what earlier calls left behind in cycles is not theirs to free
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        f()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _status("VmRSS")
    f()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def alone(script: str, *args: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a part of a benchmark in a process of its own, so that no earlier part leaves memory behind."""
    env = {**os.environ, **(env or {})}
    done = subprocess.run([sys.executable, script, *args], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(args)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def save(name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """results/NAME.json, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    record = {"benchmark": name, "settings": settings, "made_with": made_with(), "rows": rows}
    path = RESULTS / f"{name}.json"
    with tempfile.NamedTemporaryFile("w", dir=RESULTS, delete=False, suffix=".tmp") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    os.replace(file.name, path)
    return path


def made_with() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu()
    return {
        "regard": regard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu() -> str:
    names = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, text=True, cwd=ROOT, check=False)
    return (done.stdout.strip() or "unknown") + ("+changes" if dirty.stdout.strip() else "")


class Progress:
    """One line a step on standard error, with the time left."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.perf_counter()

    def step(self, what: str) -> None:
        self.done += 1
        spent = time.perf_counter() - self.start
        left = spent / self.done * (self.total - self.done)
        print(f"[{self.done}/{self.total}] {what}   {spent:.0f} s, about {left:.0f} s left", file=sys.stderr, flush=True)
