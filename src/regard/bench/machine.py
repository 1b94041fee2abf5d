"""The machine of a measurement: its versions and commit, its copy bandwidth and the rate of a plain matrix product."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from regard._version import version
from regard.bench.timing import plain_time

COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}  # bytes of the copy that is timed
PRODUCT = {"cuda": 8192, "cpu": 1024}  # side of the square matrices that are multiplied
RATE_SECONDS = 0.1  # for each rate


@dataclass(frozen=True)
class Rates:
    """Hold what a device reaches: bytes a second, read and written, of a copy; FLOPs a second of a product of matrices."""

    bytes: float
    flops: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the rates of a device for one dtype, on random numbers."""
    with torch.no_grad():
        return Rates(_copy_rate(device), _product_rate(device, dtype))


def _copy_rate(device: torch.device) -> float:
    size = COPIED[device.type]
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    here = torch.ones_like(there)
    here.copy_(there)
    return 2 * size / plain_time(lambda: here.copy_(there), device, RATE_SECONDS)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = PRODUCT[device.type]
    a = torch.randn(side, side, device=device).to(dtype)
    out = a @ a
    return 2 * side**3 / plain_time(lambda: torch.mm(a, a, out=out), device, RATE_SECONDS)


def made_with() -> dict[str, Any]:
    """Versions, device, threads, commit and date."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "regard": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "threads": torch.get_num_threads(),
        "commit": checkout_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def checkout_commit() -> str:
    """The commit of the package's own checkout, with +changes where its source differs; unknown without git."""
    folder = Path(__file__).parent
    try:
        done = _git(folder, "rev-parse", "--short", "HEAD")
        dirty = _git(folder, "status", "--porcelain", "..")
    except OSError:
        return "unknown"
    return (done or "unknown") + ("+changes" if dirty else "")


def _git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=folder, check=False)
    return done.stdout.strip()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".tmp") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    os.replace(file.name, path)
