"""Compiled equals eager: every row, causal and not, padded and not, ten lengths, outputs and gradients, and how many graphs.

    python benchmarks/compiled.py [--only text] [--lengths 33 64] [--backend inductor]

Without --only and --lengths it writes results/compiled.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import common
from conftest import CASES, data, modes, some

LENGTHS = (33, 45, 64, 65, 100, 127, 128, 200, 257, 300)
GRAPHS = 2  # one for the first length, one for all others
NEAR = 1e-9  # in float64, relative to the largest number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose text holds one of these")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--padded", type=int, choices=(0, 1), help="with padding alone, or without")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--causal", type=int, choices=(0, 1), help="causal layers alone, or others")
    args = parser.parse_args()
    asked = []
    for number, case in enumerate(CASES):
        if not case.row.compiles or (args.only and not any(text in repr(case) for text in args.only)):
            continue
        for mode in modes(case):
            for padded in (False, True):
                if args.padded in (None, int(padded)) and args.causal in (None, int(mode["causal"])):
                    asked.append((number, mode, padded, args.lengths, args.backend))
    found, progress = [], common.Progress(len(asked))
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for one in pool.imap(measured, asked):
            found.append(one)
            progress.step(json.dumps(one))
    failed = [one for one in found if not one["right"]]
    print(f"{len(found)} compiled layers, {len(found) * len(args.lengths)} calls and as many gradients, {len(failed)} failed")
    if not args.only and tuple(args.lengths) == LENGTHS and args.padded is args.causal is None:
        settings = {"lengths": args.lengths, "batch": 2, "dtype": "float64", "backend": args.backend, "near": NEAR}
        totals = {"layers": len(found), "calls": len(found) * len(args.lengths), "failed": len(failed)}
        common.save("compiled", {**settings, **totals}, found)


def measured(asked: tuple[int, dict[str, Any], bool, list[int], str]) -> dict[str, Any]:
    """How far a compiled layer is from itself at its worst, and how many graphs that took."""
    number, mode, padded, lengths, backend = asked
    case = CASES[number]
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    made = case.build(max_len=2 * max(lengths), **mode)
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    worst, error, start, each = 0.0, "", time.perf_counter(), []
    for n in lengths:
        x, valid = data(n, b=2), some(2, n) if padded else None
        try:
            worst = max(worst, apart(answers(compiled, made, x, valid), answers(made, made, x, valid)))
        except Exception as problem:  # noqa: BLE001 - whatever a compiler raises is a case that failed
            error = f"{n}: {type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
            break
        each.append(counters["stats"]["unique_graphs"])
    right = not error and worst < NEAR and each[-1] <= GRAPHS
    about = {"case": repr(case), **mode, "padded": padded, "right": right, "graphs": each, "worst": worst}
    return {**about, **({"error": error} if error else {}), "seconds": round(time.perf_counter() - start, 1)}


def answers(run: torch.nn.Module, made: torch.nn.Module, x: torch.Tensor, valid: torch.Tensor | None) -> list[torch.Tensor]:
    """The output and its gradients, by the tokens and by every weight."""
    x = x.clone().requires_grad_()
    y = run(x) if valid is None else run(x, valid=valid)
    up = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    inputs = [x, *made.parameters()]
    grads = torch.autograd.grad((y * up).sum(), inputs, allow_unused=True)
    return [y, *(torch.zeros_like(z) if g is None else g for z, g in zip(inputs, grads, strict=True))]


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float(((x - y).abs().max() / y.abs().max().clamp_min(1)).detach()) for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
