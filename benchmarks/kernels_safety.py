"""Kernels on a CUDA device, every head size and type: near float64, equal in every repeat, and blind to memory they do not own.

    python benchmarks/kernels_safety.py [--repeats 250] [--part 0 8] [--limit 60]    rows as JSON lines, exits 1 if one is wrong
    python benchmarks/kernels_safety.py --card default ...                 the configurations that cards without a table use
    python benchmarks/kernels_safety.py --join FILE ...                    results/kernels_safety.json from the lines of all parts
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python benchmarks/kernels_safety.py --once     small shapes, one pass each
    python benchmarks/kernels_safety.py --sanitized LOG                    results/kernels_sanitizer.json from what that printed
    TRITON_INTERPRET=1 python benchmarks/kernels_safety.py --once          without a GPU: tries the script and the indexing

Before every repeat free memory is filled with NaN, so that a kernel that reads what was never written changes its results.
Every row names the entries of the table of configurations that its kernels used: the joined file says which none reached.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import save
from regard import Dims, attend, core
from regard.ops import triton_support
from regard.ops.tuned_table import ANY_KEY, DEFAULT_CARD, TunedTable, shipped_table

SPECS = (
    *("Local(40)", "Local(200) | Global(first=2)", "Stride(5) | Local(12)", "Blocks(64, around=1) | Random(2, 64)"),
    *("linear", "efficient", "retention", "gla", "gla(gate='head')", "performer(features=48)", "delta", "delta(gated=True)"),
    *("reformer(rounds=2, buckets=8, chunk=16)", "routing(clusters=8, window=32)"),
    *("additive(hidden=16)", "relu(norm='count')", "synthesizer", "gat(Local(40))"),
    *("sparse_transformer(stride=5)", "Dilated(5, 3)", "cosformer", "rfa(features=32)", "hybrid(pattern=Local(40))"),
    *("linformer(rank=16)", "compressed(rate=4)", "sinkhorn(block=16)", "nystrom(landmarks=16)"),
)
BOTH_WAYS = ("nystrom",)  # that are never causal
WHOLE = ("gat", "sinkhorn", "synthesizer", "nystrom")  # kernels without a seam: the device decides, float64 has none
DRAWN = ("reformer", "routing")  # a hash or a centroid may round to another bucket: bits only, kernels_bucket.py has the errors
THEIRS = (
    "synthesizer",
    "linformer",
    "compressed",
    "nystrom",
)  # end in PyTorch's fused kernel, which adds up gradients in any order
LONG = (*THEIRS, "sinkhorn")  # whose kernels begin at 512 tokens
STEPPED = ("relu",)  # its derivative jumps at 0: a score that rounds to the other side changes a gradient by a whole pair
SIZES = (64, 128, 32, 256, 16)
BOUNDS = {torch.bfloat16: 2.5e-2, torch.float32: 1e-4, torch.float16: 4e-3}
JUMP = 2e-3  # of stepped gradients in float32: of pairs whose scores are rounded by 1e-6, one in 1e6 jumps, and its root counts
LENGTHS = (1, 130, 1100)
RESULTS = ("out", "dq", "dk", "dv")
HEADS, KV_HEADS, BATCH = 4, 2, 2
STEPS = ("linear_step", "delta_step", "window_step", "row_linear")  # one token: tests/test_decode_step.py runs them on a card
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # in Triton's interpreter
POISONED = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26)  # bytes of the blocks that hold NaN


def poison() -> None:
    """Fill free blocks of several sizes with NaN."""
    held = [torch.full((size // 4,), float("nan"), device=DEVICE) for size in POISONED for _ in range(4)]
    del held


def entry_used(table: TunedTable, card: str, kernel: str, key: str) -> tuple[str, str, str]:
    """Return the card, kernel and key of the table that a kernel's configuration came from."""
    for owner in (card, DEFAULT_CARD):
        configs = table.get(owner, {}).get(kernel, {})
        for name in (key, ANY_KEY):
            if name in configs:
                return owner, kernel, name
    raise KeyError(f"no configuration of {kernel} for {key}")


def one_pass(own: torch.nn.Module, x: list[Tensor], causal: bool, valid: Tensor | None) -> list[Tensor]:
    """Return the output and the gradients of q, k and v, of a random gradient of the output.

    A loss such as the squares of the output would weigh the first tokens most, whose gradients are differences of nearly equal
    numbers: with one key they are 0.
    """
    given = [y.detach().requires_grad_() for y in x]
    torch.manual_seed(3)
    out = attend(*given, own, causal=causal, valid=valid, query_valid=None if causal else valid)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    return [out.detach(), *torch.autograd.grad(out, given, up, allow_unused=True, materialize_grads=True)]


def distance(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Return the norm of a difference beside that of `scale`: with one key, gradients of q and k are 0 and have no scale."""
    return ((found.double() - expected).norm() / scale.norm().clamp(min=1e-30)).item()


def inputs(own: torch.nn.Module, n: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw q, k and v; keys of a shared space are the queries, gates come behind each key."""
    torch.manual_seed(2)
    kv = HEADS if own.shared_qk else KV_HEADS
    q = torch.randn(BATCH, HEADS, n, d, device=DEVICE)
    k = q if own.shared_qk else torch.randn(BATCH, kv, n, d, device=DEVICE)
    if own.gates:
        gates = torch.randn(BATCH, kv, n, own.gates, device=DEVICE)
        k = torch.cat([k, gates], -1)
    v = torch.randn(BATCH, kv, n, d, device=DEVICE)
    return [x.to(dtype) for x in (q, k, v)]


def row(
    text: str, d: int, dtype: torch.dtype, n: int, causal: bool, padded: bool, repeats: int, compared: bool
) -> dict[str, Any]:
    """Check one case; without a comparison to float64 where a tool watches every access of every kernel."""
    start, entries, differ = time.perf_counter(), [], set()
    card = triton_support.card_name(torch.device(DEVICE))
    known = {
        "card": card,
        "spec": text,
        "d": d,
        "dtype": str(dtype)[6:],
        "n": n,
        "causal": causal,
        "padded": padded,
        "repeats": repeats,
    }
    try:
        torch.manual_seed(1)
        kv = HEADS if text.startswith(DRAWN) else KV_HEADS
        fast, slow = ("auto", "auto") if text.startswith(WHOLE) else ("triton", "torch")
        own = core(text, Dims(HEADS * d, HEADS, kv, causal=causal, max_len=n, backend=fast)).to(DEVICE).eval()
        x = inputs(own, n, d, dtype)
        valid = torch.rand(BATCH, n, device=DEVICE) > 0.25 if padded else None
        with triton_support.trial_configs({}) as trial:
            first = one_pass(own, x, causal, valid)
        ours = 1 if text.startswith(THEIRS) else len(first)
        for _ in range(repeats):
            poison()
            again = one_pass(own, x, causal, valid)
            differ |= {name for name, a, b in zip(RESULTS[:ours], first, again, strict=False) if not torch.equal(a, b)}
        entries = sorted({" / ".join(entry_used(shipped_table(), card, *used)) for used in trial.used})
        errors: list[float] = []
        if compared and not text.startswith(DRAWN):
            torch.manual_seed(1)
            exact = core(text, Dims(HEADS * d, HEADS, kv, causal=causal, max_len=n, backend=slow)).to(DEVICE).eval()
            exact.load_state_dict(copy.deepcopy(own.state_dict()))
            expected = one_pass(exact.double(), [y.double() for y in x], causal, valid)
            scales = [expected[0], *expected[-1:] * 3] if n == 1 else expected
            errors = [distance(*three) for three in zip(first, expected, scales, strict=True)]
        finite = all(bool(y.isfinite().all()) for y in first)
        steep = max(JUMP, BOUNDS[dtype]) if text.startswith(STEPPED) else BOUNDS[dtype]
        near = all(error <= most for error, most in zip(errors, [BOUNDS[dtype], steep, steep, BOUNDS[dtype]], strict=False))
        wrong = {f"repeats differ in {', '.join(sorted(differ))}": differ, "not finite": not finite, "too far": not near}
        problem = ", ".join(name for name, found in wrong.items() if found)
    except ValueError as error:
        if "cannot compute" not in str(error):
            raise
        return known | {"errors": [], "problem": "", "refused": str(error), "entries": [], "seconds": 0.0}
    except Exception as error:  # noqa: BLE001 - a compiler's failure is a row of the table
        errors, problem = [], f"{type(error).__name__}: {str(error).splitlines()[-1][:200]}"
    return known | {"errors": errors, "problem": problem, "entries": entries, "seconds": round(time.perf_counter() - start, 2)}


def takes(causal: bool) -> list[str]:
    """List the mechanisms that have a form."""
    return [text for text in SPECS if not (causal and text.startswith(BOTH_WAYS))]


def cases(once: bool, sizes: tuple[int, ...] = SIZES) -> list[tuple[str, int, torch.dtype, int, bool, bool]]:
    """List what is checked, the most used sizes and types first; lengths and padding take turns."""
    if once:
        d, dtype = (64, torch.bfloat16) if DEVICE == "cuda" else (16, torch.float32)  # the interpreter has no bfloat16
        return [(text, d, dtype, LENGTHS[1], causal, True) for causal in (True, False) for text in takes(causal)]
    found = [
        (text, d, dtype, LENGTHS[-1] if causal or text.startswith(LONG) else LENGTHS[1 + number % 2], causal, number % 2 == 0)
        for number, d in enumerate(SIZES)
        if d in sizes
        for dtype in BOUNDS
        for causal in (True, False)
        for text in takes(causal)
    ]
    one = [(text, SIZES[0], torch.bfloat16, LENGTHS[0], True, False) for text in takes(True)]
    return found + (one if SIZES[0] in sizes else [])


def lines(path: Path) -> list[dict[str, Any]]:
    """Read the rows that a part has printed."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def join(rows: list[dict[str, Any]]) -> bool:
    """Write the rows of all parts, and which entries of the table of configurations no right row has used."""
    table = shipped_table()
    cards = {row["card"] for row in rows} | {DEFAULT_CARD}
    every = {
        " / ".join((card, kernel, key)): kernel
        for card in cards & set(table)
        for kernel, keys in table[card].items()
        for key in keys
    }
    reached = {entry for row in rows if not row["problem"] for entry in row.pop("entries")}
    missed = sorted(name for name, kernel in every.items() if name not in reached and kernel not in STEPS)
    settings = {"heads": [HEADS, KV_HEADS], "batch": BATCH, "poisoned": POISONED, "entries": len(every), "not_reached": missed}
    print(save("kernels_safety", settings, rows))
    print(f"{len(every)} configurations; by no right row: {', '.join(missed) or 'none'}", file=sys.stderr)
    return any(row["problem"] for row in rows)


def sanitized(log: Path) -> bool:
    """Write what compute-sanitizer reported while small shapes ran, and the rows that it watched."""
    rows, said = lines(log), [line.strip("= ") for line in log.read_text().splitlines() if line.startswith("=====")]
    if not said or not rows:
        sys.exit(f"{log} has no line of compute-sanitizer, or no row: run this under it, with both streams into one file")
    reports = [line for line in said if line != "COMPUTE-SANITIZER" and not line.startswith("ERROR SUMMARY")]
    kept = [{key: row[key] for key in ("spec", "d", "dtype", "n", "causal", "padded", "problem")} for row in rows]
    print(save("kernels_sanitizer", {"tool": "compute-sanitizer --tool memcheck", "reports": reports}, kept))
    return bool(reports)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=250)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="which part of how many, to compile side by side")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no further case is begun")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--card", help="use the configurations of another card: default is what cards without a table have")
    parser.add_argument("--only", nargs="*", default=(), help="names of mechanisms and patterns, or how they begin")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="head sizes, of " + ", ".join(map(str, SIZES)))
    parser.add_argument("--join", type=Path, nargs="*")
    parser.add_argument("--sanitized", type=Path)
    args = parser.parse_args()
    if args.join:
        return join([row for path in args.join for row in lines(path)])
    if args.sanitized:
        return sanitized(args.sanitized)
    if args.card:
        triton_support.card_name = lambda _: args.card
    part, parts = args.part
    wrong, end = 0, time.perf_counter() + args.limit
    chosen = [case for case in cases(args.once, tuple(args.sizes)) if not args.only or case[0].startswith(tuple(args.only))]
    for case in chosen[part::parts]:
        if time.perf_counter() > end:
            break
        found = row(*case, 0 if args.once else args.repeats, compared=not args.once or DEVICE == "cpu")
        wrong += bool(found["problem"])
        print(json.dumps(found), flush=True)
    print(f"{wrong} wrong; next: --join the lines of all parts into results/", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
