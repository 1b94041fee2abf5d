"""Is it slower than it was? Every row of this checkout beside the same row of another one, the two taking turns in one run.

python benchmarks/beside.py ../older                    training, padded passes and decoding steps, into results/beside.json
python benchmarks/beside.py ../older --device cuda      the same on a GPU, into results/beside_gpu.json
python benchmarks/beside.py ../older --only linear      rows whose name contains a word, printed

Two processes stay alive, one for each checkout, and each measurement goes back and forth between them, so that a busy moment hits
both alike. A row is reported with the ratio of its medians, here over there: below 1 is faster than it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HEADS, DIM, SEED = 4, 64, 0
LENGTH = {"cpu": 1024, "cuda": 8192}
SHORT = {"additive": 512}  # tokens of rows that make something wide for every pair
SPECS = {"sparse": ["Local(128)", "Local(128) | Global(first=2)", "Stride(64)"], "gat": ["gat(pattern=Local(16))"]}


def work(spec: str, kind: str, n: int, device: str) -> Callable[[], Any]:
    """One measured call of a row: kind is "full", "causal", "padded" or "step"."""
    from regard import layer

    torch.manual_seed(SEED)
    width, causal = HEADS * DIM, kind in ("causal", "step")
    m = layer(spec, width=width, heads=HEADS, causal=causal, max_len=n + 64).to(device)
    x = torch.randn(2, n, width, device=device, requires_grad=kind != "step")
    if kind == "step":
        m, token = m.eval(), x[:, :1]
        with torch.no_grad():
            state = m.extend(m.start(2), x)[1]

        def step() -> None:
            with torch.no_grad():
                m.extend(state, token)

        return step
    valid = torch.arange(n, device=device) < torch.tensor([[n], [n // 2]], device=device) if kind == "padded" else None

    def train() -> None:
        y = m(x) if valid is None else m(x, valid=valid)
        torch.autograd.backward(y.sum(), inputs=[x, *m.parameters()])

    return train


def serve(device: str) -> None:
    """Answer lines of JSON: [spec, kind, n] builds a call and warms it up, "go" times it."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    call: Callable[[], Any] = lambda: None  # noqa: E731
    for line in sys.stdin:
        asked, answer = json.loads(line), None
        try:
            if asked == "go":
                answer = seconds(call, device)
            else:
                call = work(*asked, device)
                answer = min(seconds(call, device) for _ in range(3))
        except (ValueError, torch.OutOfMemoryError) as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)


def seconds(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Checkout:
    """A process that measures with the code of one checkout."""

    def __init__(self, root: Path, device: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(root / "src")}
        command = [sys.executable, __file__, "--serve", "--device", device]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def measured(here: Checkout, there: Checkout, spec: str, kind: str, n: int, least: float) -> dict[str, Any] | None:
    """Medians in ms of both, after as many turns as fit into `least` seconds, at least seven; None where either cannot."""
    first = [side.ask([spec, kind, n]) for side in (here, there)]
    if not all(isinstance(x, float) for x in first):
        return None
    turns = max(7, min(200, int(least / sum(first))))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for side in (0, 1) if turn % 2 else (1, 0):
            times[side].append((here, there)[side].ask("go"))
    now, before = (1e3 * statistics.median(x) for x in times)
    return {"spec": spec, "kind": kind, "n": n, "ms": now, "before_ms": before, "ratio": now / before, "turns": turns}


def main() -> None:
    from common import ROOT, Progress, save
    from regard import CATALOGUE

    names = [spec for name in CATALOGUE for spec in SPECS.get(name, [name])]
    names = [name for name in names if not args.only or args.only in name]
    n, here, there = args.n or LENGTH[args.device], Checkout(ROOT, args.device), Checkout(args.other.resolve(), args.device)
    rows, progress = [], Progress(4 * len(names))
    for spec in names:
        for kind in ("full", "causal", "padded", "step"):
            if found := measured(here, there, spec, kind, min(n, SHORT.get(spec, n)), args.seconds):
                rows.append(found)
            progress.step(f"{spec} {kind}: " + (f"{found['ms']:.2f} ms, ratio {found['ratio']:.2f}" if found else "not there"))
    ratios = sorted(row["ratio"] for row in rows)
    print(f"{len(rows)} measurements, median ratio {statistics.median(ratios):.3f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")
    for row in sorted(rows, key=lambda row: -row["ratio"])[:10]:
        print(f"{row['ratio']:.2f}  {row['spec']} {row['kind']}  {row['before_ms']:.2f} -> {row['ms']:.2f} ms")
    if not args.only:
        settings = {
            "heads": HEADS,
            "dim": DIM,
            "batch": 2,
            "n": n,
            "seed": SEED,
            "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        print(save("beside" if args.device == "cpu" else "beside_gpu", settings, rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the root of the other checkout")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", help="rows whose name contains this word")
    parser.add_argument("--n", type=int, help="tokens")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    parser.add_argument("--serve", action="store_true", help="be one of the two processes")
    args = parser.parse_args()
    if args.serve:
        serve(args.device)
    elif args.other is None:
        parser.error("the root of the other checkout is missing")
    else:
        main()
