"""Is it slower than it was? Rows of this checkout beside the same rows of another one, the two taking turns in one run.

python benchmarks/beside.py ../older                    layers: training, padded passes, decoding steps; results/beside.json
python benchmarks/beside.py ../older --what growth      the passes of growth.py; results/beside_growth.json
python benchmarks/beside.py ../older --what step        steps of step.py, decoding with shared heads; results/beside_step.json
python benchmarks/beside.py ../older --device cuda      the same on a GPU, into results/beside_gpu.json and so on
python benchmarks/beside.py ../older --only linear      rows whose name contains a word, printed

Two processes stay alive, one for each checkout, and each measurement goes back and forth between them, so that a busy moment hits
both alike. Each process uses the benchmark scripts of its own checkout. On a CPU times are those in which the process ran.
A row has the median over all turns of the ratio of the two times of a turn, here over there: below 1 is faster than it
was. `low` and `high` are the quartiles of these ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HEADS, DIM, SEED = 4, 64, 0
LENGTH = {"cpu": [1024], "cuda": [8192]}
GROWTH = {"cpu": [256, 2048], "cuda": [2048, 8192]}
TOKENS, DECODED = 448, 8192  # of a step of the translator, and before the token that is decoded with shared heads
SHORT = {"additive": 512}  # tokens of rows that make something wide for every pair
SPECS = {"sparse": ["Local(128)", "Local(128) | Global(first=2)", "Stride(64)"], "gat": ["gat(pattern=Local(16))"]}
SHARED = [("Stride(2)", 4), ("Stride(2)", 8)]  # patterns and heads of decoding with shared heads
Work = Callable[[], Any]
Job = tuple[str, str, int]  # spec, kind and tokens


def work(spec: str, kind: str, n: int, device: str) -> Work:
    """Return one measured call of a row."""
    if kind.startswith("core"):
        import growth

        return growth.work(spec, n, kind == "core causal", torch.device(device))
    if spec == "translator":
        import step

        mode, do = step.steps(n, torch.device(device))[kind]
        mode()
        return do
    if kind.startswith("token"):
        heads, shared = map(int, kind.removeprefix("token, ").removesuffix(" heads").split(" / "))
        return decoding(spec, n, device, heads=heads, kv_heads=shared, onward=True)
    if kind == "step":
        return decoding(spec, n, device, heads=HEADS, kv_heads=HEADS)
    return training(spec, kind, n, device)


def decoding(spec: str, n: int, device: str, *, heads: int, kv_heads: int, onward: bool = False) -> Work:
    """Return a decoding step of one token of two rows behind n tokens: always the same step, or (onward) one after the other."""
    from regard import layer

    torch.manual_seed(SEED)
    shared = {} if kv_heads == heads else {"kv_heads": kv_heads}
    m = layer(spec, width=heads * DIM, heads=heads, causal=True, max_len=n + 1024, **shared).to(device).eval()
    x = torch.randn(2, n, heads * DIM, device=device)
    with torch.no_grad():
        states = [m.extend(m.start(2), x)[1]]

    def step() -> None:
        with torch.no_grad():
            _, later = m.extend(states[0], x[:, :1])
        if onward:
            states[0] = later

    return step


def training(spec: str, kind: str, n: int, device: str) -> Work:
    """Return a forward and backward pass of a layer over two rows: kind is "full", "causal" or "padded"."""
    from regard import layer

    torch.manual_seed(SEED)
    m = layer(spec, width=HEADS * DIM, heads=HEADS, causal=kind == "causal", max_len=n + 64).to(device)
    x = torch.randn(2, n, HEADS * DIM, device=device, requires_grad=True)
    valid = torch.arange(n, device=device) < torch.tensor([[n], [n // 2]], device=device) if kind == "padded" else None

    def train() -> None:
        y = m(x) if valid is None else m(x, valid=valid)
        torch.autograd.backward(y.sum(), inputs=[x, *m.parameters()])

    return train


def serve(device: str) -> None:
    """Answer lines of JSON: [spec, kind, n] builds a call and warms it up, "go" times it."""
    import regard

    sys.path[0] = str(Path(regard.__file__).parents[2] / "benchmarks")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    call: Work = lambda: None  # noqa: E731
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


def seconds(call: Work, device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
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


def measured(here: Checkout, there: Checkout, job: Job, least: float) -> dict[str, Any] | None:
    """Medians in ms of both, after as many turns as fit into `least` seconds, at least seven; None where either cannot."""
    first = [side.ask(job) for side in (here, there)]
    if not all(isinstance(x, float) for x in first):
        return None
    turns = max(7, min(200, int(least / sum(first))))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for side in (0, 1) if turn % 2 else (1, 0):
            times[side].append((here, there)[side].ask("go"))
    now, before = (1e3 * statistics.median(x) for x in times)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    spec, kind, n = job
    row = {"spec": spec, "kind": kind, "n": n, "ms": now, "before_ms": before}
    return row | {"ratio": middle, "low": low, "high": high, "turns": turns}


def layers(lengths: list[int]) -> Iterator[Job]:
    from regard import CATALOGUE

    for name in CATALOGUE:
        for spec in SPECS.get(name, [name]):
            for n in lengths:
                yield from ((spec, kind, min(n, SHORT.get(spec, n))) for kind in ("full", "causal", "padded", "step"))


def growing(lengths: list[int]) -> Iterator[Job]:
    import growth

    for spec, causal, n in growth.jobs(lengths, ""):
        if n <= SHORT.get(spec, n):
            yield spec, "core causal" if causal else "core", n


def stepping() -> Iterator[Job]:
    yield from (("translator", kind, TOKENS) for kind in ("training step", "forward pass", "decoding step"))
    for spec, heads in SHARED:
        yield from ((spec, f"token, {heads} / {kv_heads} heads", DECODED) for kv_heads in (heads, 1))


def jobs() -> list[Job]:
    """List what is measured."""
    if args.what == "step":
        found = stepping()
    elif args.what == "growth":
        found = growing(args.n or GROWTH[args.device])
    else:
        found = layers(args.n or LENGTH[args.device])
    return [job for job in found if not args.only or args.only in job[0]]


def commit_of(root: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, check=True).stdout.strip()


def main() -> None:
    from common import ROOT, Progress, save

    here, there = Checkout(ROOT, args.device), Checkout(args.other.resolve(), args.device)
    todo = jobs()
    rows, progress = [], Progress(len(todo))
    for job in todo:
        if found := measured(here, there, job, args.seconds):
            rows.append(found)
        shown = f"{found['ms']:.2f} ms, ratio {found['ratio']:.2f}" if found else "not there"
        progress.step(f"{job[0]} {job[1]} {job[2]}: {shown}")
    ratios = sorted(row["ratio"] for row in rows)
    print(f"{len(rows)} measurements, median ratio {statistics.median(ratios):.3f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")
    for row in sorted(rows, key=lambda row: -row["ratio"])[:20]:
        what = f"{row['spec']} {row['kind']} {row['n']}"
        spread = f"{row['low']:.2f} .. {row['high']:.2f}"
        print(f"{row['ratio']:.2f} ({spread})  {what}  {row['before_ms']:.2f} -> {row['ms']:.2f} ms")
    if not args.only:
        settings = {"heads": HEADS, "dim": DIM, "batch": 1 if args.what == "growth" else 2, "seed": SEED}
        settings |= {
            "clock": "process time" if args.device == "cpu" else "wall",
            "seconds": args.seconds,
            "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        settings |= {"before": commit_of(args.other)}
        name = "beside" if args.what == "layers" else f"beside_{args.what}"
        print(save(name if args.device == "cpu" else f"{name}_gpu", settings, rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the root of the other checkout")
    parser.add_argument("--what", default="layers", choices=("layers", "growth", "step"), help="which rows")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", help="rows whose name contains this word")
    parser.add_argument("--n", type=int, nargs="+", help="tokens")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    parser.add_argument("--serve", action="store_true", help="be one of the two processes")
    args = parser.parse_args()
    if args.serve:
        serve(args.device)
    elif args.other is None:
        parser.error("the root of the other checkout is missing")
    else:
        main()
