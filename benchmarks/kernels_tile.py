"""The Triton kernels of tile attention on a CUDA device: right, and equal in every repeat.

    python benchmarks/kernels_tile.py [--repeats 3] [--part 0 4]

Errors are ||a - b|| / ||b|| against the torch backend in float64. `benchmarks/bench_gpu.py` has the times.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch
from torch import Tensor

from regard.ops.score_bias import ScoreBias
from regard.ops.tile.tile_op import HeadPatterns, tile_attention
from regard.patterns import Pattern
from regard.patterns.tiles import Span

BOUNDS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CHECKS = [  # pattern, query heads, key heads, n, d, e, causal, dropout, bias and padding
    ("Local(200)", 4, 4, 1000, 64, 64, True, 0.0, ""),
    ("Local(100)", 4, 2, 777, 64, 64, False, 0.2, "alibi"),
    ("Local(64)", 4, 1, 500, 128, 64, True, 0.0, "alibi"),
    ("Local(30)", 2, 2, 300, 16, 32, False, 0.0, ""),
    ("Local(30)", 2, 2, 300, 80, 96, True, 0.1, ""),
    ("Local(50)", 2, 1, 400, 128, 128, True, 0.0, "alibi"),
    ("Local(128) | Global(first=2, at=[333])", 4, 2, 1500, 64, 64, False, 0.1, "alibi"),
    ("Local(64) | Global(first=3)", 2, 2, 9000, 64, 64, False, 0.0, ""),
    ("Blocks(64, around=1) | Random(2, 64) | Global(first=64)", 4, 2, 1500, 64, 64, True, 0.0, "alibi"),
    ("Blocks(64, around=1) | Random(2, 64) | Global(first=64)", 4, 4, 6000, 64, 64, False, 0.0, ""),
    ("Random(2, 32, per_head=True) | Columns(last=3)", 4, 2, 900, 64, 64, False, 0.0, "alibi"),
    ("Stride(5) | Local(40)", 4, 2, 900, 64, 64, True, 0.1, "alibi"),
    ("Dilated(40, 3)", 4, 4, 900, 32, 64, False, 0.0, ""),
    ("PerHead([Local(60), Local(7), Local(200), Local(60)]) | Columns(first=1)", 4, 2, 900, 64, 64, True, 0.0, "alibi"),
    ("Local(100)", 4, 2, 777, 64, 64, False, 0.2, "relative"),
    ("Local(64) | Global(first=3)", 2, 1, 3000, 64, 64, False, 0.0, "relative"),
    ("Stride(5) | Local(40)", 4, 2, 900, 64, 64, True, 0.1, "relative"),
]


def run(inputs: list[Tensor], dtype: torch.dtype, backend: str, text: str, up: Tensor, **options) -> list[Tensor]:
    """Return output, log-sum-exp and gradients in one type."""
    x = [y.detach().to(dtype).requires_grad_() for y in inputs]
    sources = x
    bias = options["bias"]
    if bias is not None and bias.by_query is not None:  # in the type of sums
        by_query = bias.by_query.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        options["bias"] = bias._replace(by_query=by_query)
        sources = [*x, by_query]
    torch.manual_seed(1)
    patterns = HeadPatterns.of(Pattern.parse(text), x[0].shape[1])
    span = Span(0, x[0].shape[2], 0, x[1].shape[2])
    out, lse = tile_attention(*x, patterns, span, scale=1 / math.sqrt(x[0].shape[-1]), backend=backend, **options)
    wanted = torch.autograd.grad((out * up.to(out.dtype)).sum() + (0.1 * lse * (lse > -1e29)).sum(), sources)
    return [out.detach(), lse.detach(), *wanted]


def bias_of(kind: str, h: int, n: int, device: str) -> ScoreBias | None:
    """Return ALiBi, relative positions up to a distance of 16 with the weights of their classes, or nothing."""
    if kind == "alibi":
        return ScoreBias(slopes=torch.exp2(-torch.arange(1.0, h + 1, device=device)))
    if kind == "relative":
        by_query = torch.randn(2, h, n, 33, device=device)
        return ScoreBias(clip=16, by_query=by_query, mass=True)
    return None


def check(device: str, repeats: int, part: int, parts: int) -> int:
    """Compare every case in every type with float64; return how many are wrong. One part of several runs a share of them."""
    wrong = 0
    for text, h, g, n, d, e, causal, dropout, kind in CHECKS[part::parts]:
        torch.manual_seed(0)
        shapes = ((h, d), (g, d), (g, e))
        inputs = [torch.randn(2, heads, n, width, device=device, dtype=torch.float64) for heads, width in shapes]
        bias = bias_of(kind, h, n, device)
        width = e if bias is None else e + bias.more
        up = torch.randn(2, h, n, width, device=device, dtype=torch.float64)
        valid = torch.rand(2, n, device=device) > 0.2 if kind else None
        options = {"causal": causal, "dropout": dropout, "valid": valid, "bias": bias}
        for dtype, bound in BOUNDS.items():
            rounded = [x.to(dtype).double() for x in inputs]
            expected = run(rounded, torch.float64, "torch", text, up.to(dtype).double(), **options)
            name = f"{text} h={h}/{g} n={n} d={d}/{e} {'causal' if causal else ''} {kind} {str(dtype)[6:]}"
            try:
                found = run(rounded, dtype, "triton", text, up, **options)
                errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
                same = all(
                    all(torch.equal(a, b) for a, b in zip(found, run(rounded, dtype, "triton", text, up, **options), strict=True))
                    for _ in range(repeats)
                )
                good = same and all(x <= bound for x in errors)
                what = " ".join(f"{x:.0e}" for x in errors) + ("" if same else "  NOT REPEATABLE")
            except Exception as error:  # noqa: BLE001 - a compiler's failure is a row of the table
                good, what = False, f"{type(error).__name__}: {str(error)[:200]}"
            wrong += not good
            print(f"{'ok   ' if good else 'WRONG'} {name}: {what}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="which part of how many, to compile side by side")
    args = parser.parse_args()
    start = time.perf_counter()
    wrong = check("cuda", args.repeats, *args.part)
    print(
        f"{wrong} wrong, {time.perf_counter() - start:.0f} s; times: benchmarks/bench_gpu.py --only windows patterns", flush=True
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
