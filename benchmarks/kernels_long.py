"""Kernels on sequences of a million tokens, on a CUDA device: near float64, and equal in every repeat.

    PYTHONPATH=src python benchmarks/kernels_long.py [--n 1048576] [--limit 120] [--out results]      adds to kernels_long.json
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/kernels_long.py --n 300 --d 16 --out /tmp/x     tries the script on a CPU

Errors are ||a - b|| / ||b|| against the torch backend in float64, over all tokens and over the last ones alone: a position
that overflows, or a state that drifts, would show there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS
from kernels_safety import BOUNDS, DEVICE, one_pass
from regard import Dims, core
from regard.bench.machine import made_with, write_record
from regard.bench.tune import relative_error

SPECS = (
    *("Local(256)", "Local(128)", "Local(128) | Global(first=2)", "bigbird", "linear", "efficient", "retention", "gla"),
    *("delta", "performer(features=128)", "cosformer"),
)
HEADS, REPEATS, LAST = 2, 2, 4096


def inputs(own: torch.nn.Module, n: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw q, k and v of one row; gates come behind each key."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, HEADS, n, width, device=DEVICE) for width in (d, d + own.gates, d))
    return [x.to(dtype) for x in (q, k, v)]


def row(text: str, n: int, d: int, causal: bool) -> dict[str, Any]:
    """Check one mechanism in one form."""
    dtype, start = torch.bfloat16 if DEVICE == "cuda" else torch.float32, time.perf_counter()
    known = {"spec": text, "n": n, "d": d, "dtype": str(dtype)[6:], "causal": causal, "repeats": REPEATS}
    try:
        torch.manual_seed(1)
        own, exact = (
            core(text, Dims(HEADS * d, HEADS, causal=causal, max_len=n, backend=backend)).to(DEVICE).eval()
            for backend in ("auto", "torch")
        )
        x = inputs(own, n, d, dtype)
        first = one_pass(own, x, causal, None)
        equal = all(torch.equal(a, b) for _ in range(REPEATS) for a, b in zip(first, one_pass(own, x, causal, None), strict=True))
        exact.load_state_dict(own.state_dict())
        expected = one_pass(exact.double(), [y.double() for y in x], causal, None)
        whole = [relative_error(a, b) for a, b in zip(first, expected, strict=True)]
        last = [relative_error(a[..., -LAST:, :], b[..., -LAST:, :]) for a, b in zip(first, expected, strict=True)]
    except torch.OutOfMemoryError:
        return known | {"reason": "out of memory, of the kernels or of the float64 that they are compared with"}
    except ValueError as refusal:
        return known | {"reason": str(refusal).splitlines()[0]}
    near = max(*whole, *last) <= BOUNDS[dtype]
    problem = ", ".join(name for name, right in (("repeats differ", equal), ("too far", near)) if not right)
    return known | {"errors": whole, "last": last, "problem": problem, "seconds": round(time.perf_counter() - start, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1 << 20)
    parser.add_argument("--d", type=int, default=64, help="of a head")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no further case is begun")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    end, path = time.perf_counter() + args.limit, args.out / "kernels_long.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    there = {(row["spec"], row["causal"], row["n"], row["d"]) for row in rows}
    settings = {"heads": HEADS, "batch": 1, "last": LAST, "bounds": {str(x)[6:]: bound for x, bound in BOUNDS.items()}}
    for text, causal in ((text, causal) for causal in (True, False) for text in SPECS):
        if (text, causal, args.n, args.d) in there:
            continue
        if time.perf_counter() > end:
            print(f"left out for want of time, from {text}, {'causal' if causal else 'both ways'}", file=sys.stderr)
            break
        rows.append(row(text, args.n, args.d, causal))
        print(rows[-1], flush=True)
        write_record(path, {"benchmark": "kernels_long", "settings": settings, "made_with": made_with(), "rows": rows})
    return any(row.get("problem") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
