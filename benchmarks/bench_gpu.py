"""The tables of speed on a GPU: sets of `regard bench`, each into bench_SET.json in a folder (results/ unless given).

    PYTHONPATH=src:PEERS python benchmarks/bench_gpu.py --minutes 9 --warm 14 [--only windows linear] [--out DIR]
    python benchmarks/bench_gpu.py --small --out /tmp/x       the same sets with short sequences on a CPU, to try the script

PEERS is a folder with the packages of the peers (pip install --target PEERS 'regard[peers]'); those that are not there are
listed in the files. Rows are written after every job, and the time that is left after --minutes cuts the last sets short.
With --warm so many processes compile the kernels and models of all sets first (gpu_sets.py, warm_up.py); times are taken after
that by this process alone. --compiled measures models of torch.compile instead, by so many processes that take turns; other
work on the card may go on meanwhile, if --beside names its process groups. --resume keeps the models that a file of an earlier
run has, and measures the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no idle compilers beside what is timed

import torch

from common import RESULTS, Progress
from compiled_models import measure_compiled
from gpu_sets import COMPILED, SETS
from regard.bench.floors import FORWARD, TRAINING
from regard.bench.machine import write_record
from regard.bench.record import model_record, speed_record
from regard.bench.speed import Request
from regard.bench.summary import crossovers
from regard.bench.timing import first_line
from regard.bench.whole_models import ModelRequest, SlowModels, job_key
from regard.spec import Spec
from warm_up import short_tuning, warm_up

TUNING_MS = (5.0, 20.0)  # for each configuration of a peer that chooses at run time: before the clock, and under it
SMALL: dict[str, Any] = {"tokens": 1024, "heads": 2, "seconds": 0.01, "device": "cpu"}


class TimeIsUp(Exception):
    """Raised between two jobs when the minutes are spent."""


def run_set(name: str, parts: list[dict[str, Any]], args: argparse.Namespace, end: float) -> None:
    """Run the parts of a set, all into one file."""
    path = args.out / f"bench_{name}.json"
    earlier, merged = earlier_record(path, args.resume and "kinds" in parts[0]), dict[str, Any]()
    slow: SlowModels = {}
    for part in parts:
        kept = dict(merged)

        def save(record: dict[str, Any], kept: dict[str, Any] = kept) -> None:
            merged.clear()
            merged.update(joined(kept, record))
            write_record(path, resumed(earlier, merged))

        run_part(part, args, end, save, slow, earlier.get("rows", []))
    print(f"{name}: {len(merged.get('rows', []))} rows in {path}", flush=True)


def earlier_record(path: Path, resume: bool) -> dict[str, Any]:
    """Read the file of an earlier run that is resumed; empty if there is none."""
    return json.loads(path.read_text()) if resume and path.exists() else {}


def resumed(earlier: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Add the rows of an earlier run that this one has not come to yet, and name the commits of both."""
    if not earlier:
        return record
    there = {job_key(row) for row in record["rows"]}
    rows = [*record["rows"], *(row for row in earlier["rows"] if job_key(row) not in there)]
    commits = dict.fromkeys([*earlier["made_with"]["commit"].split(", "), record["made_with"]["commit"]])
    return record | {"rows": rows, "made_with": record["made_with"] | {"commit": ", ".join(commits)}}


def request_of(part: dict[str, Any], args: argparse.Namespace) -> Request | ModelRequest:
    """The request of a part of a set."""
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in part.items()}
    options["mixers"] = tuple(Spec.parse(text) for text in part["mixers"])
    options |= {"seconds": args.seconds, "device": "cuda", "dtype": args.dtype}
    if args.small:
        options |= SMALL | {"lengths": (SMALL["tokens"],)}
    if "kinds" in options:
        return ModelRequest(**options | ({"depth": 1, "width": 64, "ffn": 64} if args.small else {}))
    return Request(**{"passes": (FORWARD, TRAINING), "step_batch": 2 if args.small else 32, **options})


def run_part(
    part: dict[str, Any], args: argparse.Namespace, end: float, save: Any, slow: SlowModels, known: list[dict[str, Any]]
) -> None:
    request = request_of(part, args)
    shown: list[Progress] = []

    def report(done: int, total: int, text: str) -> None:
        if time.perf_counter() > end:
            raise TimeIsUp
        if not shown:
            shown.append(Progress(total + 1))
        shown[0].step(f"{text} ({done} done)")

    if isinstance(request, ModelRequest):
        model_record(request, report, save, slow, known)
    else:
        speed_record(request, report, save)


def answers() -> bool:
    """Whether the device still computes: after an access outside its memory nothing does in this process."""
    try:
        return float(torch.ones(1, device="cuda")) == 1
    except RuntimeError:
        return False


def start_again(args: argparse.Namespace, sets: list[str], left: float) -> None:
    """Measure the other sets in this process begun anew; does not return where there are any."""
    print("the device does not answer any more: the other sets are measured in a new process", flush=True)
    if sets:
        given = ["--only", *sets, "--out", str(args.out), "--minutes", str(left / 60), "--seconds", str(args.seconds)]
        again = ["--resume"] if args.resume else []
        os.execv(sys.executable, [sys.executable, __file__, *given, "--dtype", args.dtype, *again])


def joined(before: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Put the rows and settings of two records together."""
    if not before:
        return record | {"settings": record["settings"] | {"parts": [record["settings"]]}}
    parts = [*before["settings"]["parts"], record["settings"]]
    rows = [*before["rows"], *record["rows"]]
    both = {"rows": rows, "peers": {**before["peers"], **record["peers"]}, "settings": before["settings"] | {"parts": parts}}
    return before | both | ({"crossovers": crossovers(rows)} if "crossovers" in record else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(SETS), default=list(SETS), metavar="SET", help=", ".join(SETS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seconds", type=float, default=0.05, help="for each time that is measured")
    parser.add_argument("--warm", type=int, default=0, metavar="PROCESSES", help="compile everything by so many processes first")
    parser.add_argument("--warm-seconds", type=float, default=150.0, help="for that, at most")
    parser.add_argument(
        "--compiled", type=int, default=0, metavar="PROCESSES", help="models of torch.compile: bench_compiled.json"
    )
    parser.add_argument(
        "--beside",
        type=int,
        nargs="*",
        default=[],
        metavar="GROUP",
        help="process groups that --compiled stops while it measures",
    )
    parser.add_argument("--longest", type=int, help="leave longer sequences out of --compiled: a million tokens fill the card")
    parser.add_argument("--resume", action="store_true", help="keep the models that are in the files of an earlier run")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: --small tries the script on a CPU")
    end = time.perf_counter() + 60 * args.minutes
    if args.compiled:
        requests = [request_of(part, args) for part in COMPILED]
        if args.longest:
            requests = [replace(x, lengths=tuple(n for n in x.lengths if n <= args.longest)) for x in requests]
        path = args.out / "bench_compiled.json"
        earlier = earlier_record(path, args.resume)
        measure_compiled(
            requests,
            args.compiled,
            60 * args.minutes,
            lambda record: write_record(path, resumed(earlier, record)),
            earlier.get("rows", []),
            [
                row
                for name in ("models", "lengths")
                for row in earlier_record(RESULTS / f"bench_{name}.json", True).get("rows", [])
            ],
            args.beside,
        )
        return
    if args.warm:
        files = [args.out / f"bench_{name}.json" for name in args.only]
        known = {job_key(row) for path in files for row in earlier_record(path, args.resume).get("rows", []) if "model" in row}
        warm_up([request_of(part, args) for name in args.only for part in SETS[name]], args.warm, args.warm_seconds, known)
    with short_tuning(*TUNING_MS):
        for number, name in enumerate(args.only, 1):
            try:
                run_set(name, SETS[name], args, end)
            except TimeIsUp:
                print(f"{name}: the time is up, its rows so far are kept", flush=True)
                break
            except RuntimeError as error:
                print(f"{name}: {first_line(error)}; its rows so far are kept", flush=True)
            if not args.small and not answers():
                start_again(args, args.only[number:], end - time.perf_counter())
    print("next: copy the files into results/, then make tables")


if __name__ == "__main__":
    main()
