"""The error of `regard advise`: predicted and measured time of a training step, for five mechanisms in place of softmax.

A 12-layer encoder of width 768 with softmax attention is measured as the command does it, and from that the time of the encoder
with another mechanism is predicted; then that encoder is built, as deep as it is, and its training steps are timed (forward,
backward, AdamW). Every length is saved when it is done, and a length that does not start within --limit seconds is left out.

    python benchmarks/advise_error.py                     on a GPU, bf16, n = 512, 4k, 16k: results/advise_error.json
    python benchmarks/advise_error.py --small             on a CPU, fp32, a narrow model, short texts; nothing is saved
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

import common
from regard.bench.advice import measured_frame, measured_whole, predicted_total, share_row, worst_error
from regard.bench.advised_model import AdviceRequest
from regard.bench.speed import FAILURES, failure_text
from regard.bench.timing import light_collections
from regard.bench.whole_models import ModelRequest
from regard.bench.workload import spec_text
from regard.spec import Spec

BASE = "softmax"
MIXERS = ("softmax", "Local(256)", "bigbird(block=64)", "linear", "performer(features=128)", "nystrom(landmarks=64)")
LARGE = {"width": 768, "heads": 12, "ffn": 3072, "depth": 12, "tokens": 32768, "device": "cuda", "dtype": "bf16", "seconds": 0.15}
SMALL = {"width": 128, "heads": 4, "ffn": 512, "depth": 6, "tokens": 1024, "device": "cpu", "dtype": "fp32", "seconds": 0.5}
LENGTHS = {"cuda": (512, 4096, 16384), "cpu": (256, 1024)}
ALLOWED = 0.15  # error of a prediction


def requested(small: bool) -> AdviceRequest:
    sizes: dict[str, Any] = SMALL if small else LARGE
    lengths = LENGTHS[sizes["device"]]
    return AdviceRequest(ModelRequest(mixers=tuple(map(Spec.parse, MIXERS)), lengths=lengths, **sizes), Spec.parse(BASE))


def cells(request: AdviceRequest, n: int) -> Iterator[dict[str, Any]]:
    """Predict all mechanisms at one length, as the command does, and only then measure whole models."""
    frame = measured_frame(request, n)
    share = share_row(frame)
    print(f"n = {n}: {share['ms']:.2f} ms, bound by the {share['bound']}, {_rounded(share['parts_ms'])}", flush=True)
    predictions: dict[Spec, Any] = {}
    for spec in request.models.mixers:
        try:
            predictions[spec] = predicted_total(request, frame, spec, n)
        except FAILURES as error:
            print(f"n = {n} {spec_text(spec)}: {failure_text(error)}", flush=True)
        release()
    del frame
    for spec, predicted in predictions.items():
        row: dict[str, Any] = {"spec": spec_text(spec), "n": n, "batch": request.batch_at(n)}
        row |= {"bound": "host" if predicted.host_bound else "device"}
        row |= {"host_ms": 1e3 * predicted.host, "device_ms": 1e3 * predicted.device, "predicted_ms": 1e3 * predicted.total}
        try:
            measured = 1e3 * measured_whole(request, spec, n)
            row |= {"measured_ms": measured, "error": row["predicted_ms"] / measured - 1}
        except FAILURES as error:
            row |= {"reason": failure_text(error)}
        release()
        yield row


def _rounded(parts: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:.2f}" for kind, value in parts.items())


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model on the CPU; nothing is saved")
    parser.add_argument("--limit", type=float, default=float(os.environ.get("LIMIT", "inf")), help="seconds; LIMIT unless given")
    args = parser.parse_args()
    request = requested(args.small)
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with light_collections():
        for n in request.models.lengths:
            if time.perf_counter() - start > args.limit:
                print(f"n = {n} is left out: {args.limit:.0f} seconds are over", flush=True)
                continue
            for row in cells(request, n):
                rows.append(row)
                found = f"{row['measured_ms']:.2f} ms, error {100 * row['error']:+.1f} %" if "error" in row else row["reason"]
                spent = time.perf_counter() - start
                print(f"[{spent:5.1f} s] n = {n} {row['spec']}: {row['predicted_ms']:.2f} -> {found}", flush=True)
            if not args.small:
                common.save("advise_error", request.to_json() | {"allowed": ALLOWED}, rows)
    worst = worst_error(rows)
    print("nothing was measured" if worst is None else f"largest error {100 * worst:.1f} %, allowed {100 * ALLOWED:.0f} %")


if __name__ == "__main__":
    main()
