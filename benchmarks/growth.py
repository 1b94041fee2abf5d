"""How time and memory grow with the length, for every row of the catalogue: forward and backward, 4 heads x 64, float32, batch 1.

A row that is a key-value memory is measured bare, without the projections around it; a mixer of its own is measured whole.

python benchmarks/growth.py                     all of it, into results/growth.json (half an hour on two cores)
python benchmarks/growth.py --kept              rows that grew faster than they claim, once more with an allocator that keeps
                                                its memory, into results/growth_kept.json
python benchmarks/growth.py --only linear       rows whose name contains a word, printed
python benchmarks/growth.py SPEC N              one measurement, as a line of JSON
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable

import torch

from common import RESULTS, Progress, alone, peak_bytes, save, timed
from regard import CATALOGUE, Attention, Can, Dims, Spec, attend

# A row is shown with its default options unless something else is said here.
SPECS: dict[str, list[str]] = {
    "sparse": ["Local(128)", "Local(128) | Global(first=2)", "Dilated(32, 8)", "Stride(64)"],
    "longformer": ["longformer(window=128)"],
    "sparse_transformer": ["sparse_transformer(stride=64)"],
    "gat": ["gat(pattern=Local(16))"],
}
LENGTHS = [2048, 8192, 32768]
# Quadratic by nature, or walking token by token: they are not meant to go further.
FURTHEST = {"softmax": 8192, "relu": 8192, "synthesizer": 8192, "gmlp": 8192}
SHORTER = {"additive": [512, 1024, 2048]}
HEADS, DIM, SEED, CPU = 4, 64, 0, torch.device("cpu")
# The C library gives every tensor of more than 32 MB back to the system and gets its pages anew, zeroed. Told to keep them:
KEEPING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
LINEAR = 1.15  # the largest exponent that passes for linear


def specs() -> list[str]:
    return [spec for name in CATALOGUE for spec in SPECS.get(name, [name])]


def work(spec: str, n: int, causal: bool) -> Callable[[], None]:
    """One forward and backward pass."""
    torch.manual_seed(SEED)
    mixer = Spec.of(spec).build(Dims(HEADS * DIM, HEADS, causal=causal, max_len=n))
    if not isinstance(mixer, Attention):
        x = torch.randn(1, n, HEADS * DIM, requires_grad=True)
        return lambda: torch.autograd.backward(mixer(x).sum(), inputs=[x, *mixer.parameters()])
    core = mixer.core
    q = torch.randn(1, HEADS, n, DIM * core.streams, requires_grad=True)
    k, v = (torch.randn(1, HEADS, n, size, requires_grad=True) for size in core.sizes)
    up = torch.randn(1, HEADS, -(-n // core.rate), DIM)

    def both() -> None:
        attend(q, q if core.shared_qk else k, v, core, causal=causal).backward(up)
        for x in (q, k, v):
            x.grad = None

    return both


def measure(spec: str, n: int, causal: bool) -> dict:
    both = work(spec, n, causal)
    peak = peak_bytes(both, CPU)
    once = timed(both, CPU, 1)[0]
    times = timed(both, CPU, max(2, min(9, int(3 / once))))
    return {
        "spec": spec,
        "n": n,
        "causal": causal,
        "seconds": statistics.median(times),
        "fastest": min(times),
        "peak_bytes": peak,
    }


def exponent(rows: list[dict], key: str) -> float | None:
    """The slope of log(key) over log(n), by least squares."""
    rows = [r for r in rows if r[key]]
    if len(rows) < 2:
        return None
    x, y = [math.log(r["n"]) for r in rows], [math.log(r[key]) for r in rows]
    mx, my = statistics.mean(x), statistics.mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def jobs(lengths: list[int], word: str) -> list[tuple[str, bool, int]]:
    found = []
    for spec in specs():
        row = Spec.of(spec).row
        if word not in spec:
            continue
        for causal in (False, True) if Can.CAUSAL in row.can else (False,):
            found += [(spec, causal, n) for n in SHORTER.get(row.name, lengths) if n <= FURTHEST.get(row.name, n)]
    return found


def faster_than_claimed() -> list[str]:
    """Specs of results/growth.json whose time grew as more than n, though n is what their row says."""
    rows = json.loads((RESULTS / "growth.json").read_text())["rows"]
    linear = {r["spec"] for r in rows if Spec.of(r["spec"]).row.examples[0].cost == 1 and (r["time_exponent"] or 0) > LINEAR}
    return [spec for spec in specs() if spec in linear and Spec.of(spec).row.name != "sparse"]  # patterns have costs of their own


def compared(rows: list[dict]) -> list[dict]:
    """Rows with how they grow, and how many times faster than softmax they are at the same length."""
    for row in rows:
        if row["peak_bytes"] < row["n"] * HEADS * DIM * 4:  # less than its own gradient: what a cache gave back hid what it took
            row["peak_bytes"] = None
    for row in rows:
        own = [r for r in rows if (r["spec"], r["causal"]) == (row["spec"], row["causal"])]
        row["time_exponent"], row["memory_exponent"] = exponent(own, "fastest"), exponent(own, "peak_bytes")
        full = next((r for r in rows if r["spec"] == "softmax" and r["causal"] == row["causal"] and r["n"] == row["n"]), None)
        row["times_faster_than_softmax"] = full["fastest"] / row["fastest"] if full else None
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="?")
    parser.add_argument("n", nargs="?", type=int)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--kept", action="store_true")
    args = parser.parse_args()
    if args.spec and args.n:
        print(json.dumps(measure(args.spec, args.n, args.causal)))
        return
    todo = jobs(LENGTHS, args.only)
    if args.kept:
        todo = [job for job in todo if job[0] in faster_than_claimed()]
    rows, progress = [], Progress(len(todo))
    for spec, causal, n in todo:
        rows.append(alone(__file__, spec, str(n), *["--causal"] * causal, env=KEEPING if args.kept else None))
        form = "causal" if causal else ""
        took, held = rows[-1]["seconds"] * 1e3, rows[-1]["peak_bytes"] / 2**20
        progress.step(f"{spec:32s} {form:6s} n={n:6d} {took:9.1f} ms {held:8.1f} MiB")
    rows = compared(rows)
    if args.only:
        for row in rows:
            print(json.dumps(row))
        return
    settings = {"heads": HEADS, "dim": DIM, "batch": 1, "dtype": "float32", "pass": "forward + backward", "seed": SEED}
    settings |= {"allocator": KEEPING} if args.kept else {}
    print(save("growth_kept" if args.kept else "growth", settings, rows))
    print("next: make tables")


if __name__ == "__main__":
    main()
