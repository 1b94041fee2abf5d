"""How time and memory grow with the length: forward and backward of bare cores, 4 heads x 64, float32, batch 1.

python benchmarks/growth.py            all of it, into results/growth.json (some minutes on two cores)
python benchmarks/growth.py SPEC N     one measurement, as a line of JSON
"""

from __future__ import annotations

import argparse
import json
import math
import statistics

import torch

from common import Progress, alone, peak_bytes, save, timed
from regard import Dims, attend, core

SPECS = ["softmax", "Local(128)", "Local(128) | Global(first=2)", "Dilated(32, 8)", "bigbird", "linear", "Stride(64)"]
MORE = ["efficient", "performer", "rfa", "longformer(window=128)", "sparse_transformer(stride=64)"]
LENGTHS = [4096, 8192, 16384, 32768]
HEADS, DIM, SEED = 4, 64, 0


def measure(spec: str, n: int, causal: bool, device: torch.device) -> dict:
    torch.manual_seed(SEED)
    made = core(spec, Dims(HEADS * DIM, HEADS, causal=causal)).to(device)
    q, k, v = (torch.randn(1, HEADS, n, DIM * made.streams, device=device, requires_grad=True) for _ in range(3))

    up = torch.randn(1, HEADS, n, DIM, device=device)

    def both() -> None:
        attend(q, k, v, made, causal=causal).backward(up)
        for x in (q, k, v):
            x.grad = None

    peak = peak_bytes(both, device)
    once = timed(both, device, 1)[0]
    times = timed(both, device, max(2, min(9, int(4 / once))))
    return {
        "spec": spec,
        "n": n,
        "causal": causal,
        "seconds": statistics.median(times),
        "fastest": min(times),
        "peak_bytes": peak,
    }


def exponent(rows: list[dict], key: str) -> float:
    """The slope of log(key) over log(n), by least squares."""
    x, y = [math.log(r["n"]) for r in rows], [math.log(r[key]) for r in rows]
    mx, my = statistics.mean(x), statistics.mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="?")
    parser.add_argument("n", nargs="?", type=int)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.spec and args.n:
        print(json.dumps(measure(args.spec, args.n, args.causal, torch.device(args.device))))
        return
    jobs = [(spec, causal, n) for spec in SPECS + MORE for causal in (False, True) for n in LENGTHS]
    jobs = [job for job in jobs if not (job[0] == "softmax" and job[2] > 16384)]
    rows, progress = [], Progress(len(jobs))
    for spec, causal, n in jobs:
        flags = ["--causal"] if causal else []
        rows.append(alone(__file__, spec, str(n), *flags, "--device", args.device))
        progress.step(f"{spec:32s} n={n:6d} {rows[-1]['seconds'] * 1e3:9.1f} ms {rows[-1]['peak_bytes'] / 2**20:8.1f} MiB")
    for row in rows:
        own = [r for r in rows if (r["spec"], r["causal"]) == (row["spec"], row["causal"])]
        row["time_exponent"], row["memory_exponent"] = exponent(own, "fastest"), exponent(own, "peak_bytes")
        full = next((r for r in rows if r["spec"] == "softmax" and r["causal"] == row["causal"] and r["n"] == row["n"]), None)
        row["times_faster_than_softmax"] = full["fastest"] / row["fastest"] if full else None
    settings = {"heads": HEADS, "dim": DIM, "batch": 1, "dtype": "float32", "pass": "forward + backward", "seed": SEED}
    print(save("growth", settings, rows))


if __name__ == "__main__":
    main()
