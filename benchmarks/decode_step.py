"""Tokens per second of decoding steps, by mechanism: `model.extend`, `GraphedDecoder`, `StaticDecoder`, and an older checkout.

python benchmarks/decoding.py --only step --device cuda [--older DIR]      into results/decode_step.json, or into $OUT

Weights are random and tokens greedy. Every way prefills the same prompt; then its steps are timed, in turns with the others. An
older checkout runs in a process of its own with PYTHONPATH=DIR/src, where regard.decoding must have `Ready` or `StaticDecoder`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WIDTH, HEADS, DEPTH, VOCAB, PROMPT, SEED = 512, 8, 6, 32_000, 32, 0
MIXERS = {
    "softmax": "softmax",
    "linear": "linear",
    "gla": "gla",
    "retention": "retention",
    "Local(64)": "Local(64)",
    "sinks": "sinks(window=64, first=4)",
    "delta": "delta",
}
Steps = Callable[[], Tensor]


def built(mixer: str, device: str, dtype: str) -> Any:
    from regard.config import Config
    from regard.models import language_model

    torch.manual_seed(SEED)
    config = Config(width=WIDTH, heads=HEADS, depth=DEPTH, ffn=4 * WIDTH, dropout=0.0, max_len=1024, mixer=mixer)
    model = language_model(config, VOCAB)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)  # with smaller weights a model repeats one token
    return model.to(device, getattr(torch, dtype)).eval()


def stepping(decoder: Any, batch: int, new: int, device: str) -> tuple[Callable[[], None], Steps]:
    """Return a function that prefills the prompt, and one that then generates `new` tokens (batch new) greedily."""
    prompt = torch.randint(5, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(SEED)).to(device)
    kept: dict[str, Any] = {}

    def prefill() -> None:
        scores, state = decoder.last(decoder.start(batch), prompt)
        token = scores.argmax(-1, keepdim=True)
        _, state = decoder.extend(state, token)  # the graph is captured here, if it is not yet
        kept["state"], kept["token"] = state, token

    def steps() -> Tensor:
        state, token, tokens = kept["state"], kept["token"], []
        for _ in range(new):
            scores, state = decoder.extend(state, token)
            token = scores[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
        return torch.cat(tokens, 1)

    return prefill, steps


def clocked(prefill: Callable[[], None], steps: Steps, device: str) -> tuple[float, Tensor]:
    """Return the seconds of the steps alone, and their tokens."""
    with torch.no_grad():
        prefill()
        _wait(device)
        start = time.perf_counter()
        tokens = steps()
        _wait(device)
        return time.perf_counter() - start, tokens


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Older:
    """A softmax decoder of another checkout, in a process of its own."""

    def __init__(self, folder: str, device: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--device", device]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True, cwd=folder)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the older checkout has ended: see its error above")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def work(device: str) -> None:
    """Serve the older checkout: a line with a shape prepares a decoder, a line {"run": true} times it."""
    decoding = importlib.import_module("regard.decoding")
    make = getattr(decoding, "Ready", None) or decoding.StaticDecoder
    ready: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if "run" not in request:
            model = built("softmax", device, request["dtype"])
            ready = stepping(make(model, room=request["room"]), request["batch"], request["new"], device)
        took, tokens = clocked(*ready, device)
        print(json.dumps({"seconds": took, "tokens": tokens.tolist()}), flush=True)


def ways_of(model: Any, room: int) -> dict[str, Any]:
    from regard.decoding import GraphedDecoder, StaticDecoder, why_not_static

    ways: dict[str, Any] = {"model.extend": model, "GraphedDecoder": GraphedDecoder(model, room=room)}
    if why_not_static(model) is None:
        ways["StaticDecoder"] = StaticDecoder(model, room=room)
    return ways


def measured(name: str, batch: int, dtype: str, args: Any, older: Older | None) -> list[dict[str, Any]]:
    """Return a row for each way of one mechanism, batch and type."""
    new, device = args.new, args.device
    room = -(-(PROMPT + new + 1) // 32) * 32  # for the prompt, the step that captures, and the steps that are timed
    decoders = ways_of(built(MIXERS[name], device, dtype), room)
    timed: dict[str, Callable[[], tuple[float, Tensor]]] = {}
    for way, decoder in decoders.items():
        prefill, steps = stepping(decoder, batch, new, device)
        timed[way] = lambda prefill=prefill, steps=steps: clocked(prefill, steps, device)
    if older is not None and name == "softmax":
        first = older.ask(dtype=dtype, batch=batch, new=new, room=room)
        older_tokens = torch.tensor(first["tokens"], device=device)
        timed["older"] = lambda: (older.ask(run=True)["seconds"], older_tokens)
    tokens = {way: run()[1] for way, run in timed.items()}  # which warms up
    times: dict[str, list[float]] = {way: [] for way in timed}
    for _ in range(args.rounds):
        for way, run in timed.items():
            times[way].append(run()[0])
    rows = []
    for way, own in times.items():
        best = min(own)
        same = (tokens[way] == tokens["model.extend"]).float().mean().item()
        shape = {"mixer": name, "batch": batch, "dtype": dtype, "by": way}
        speed = {
            "tokens_per_second": batch * new / best,
            "step_ms": 1e3 * best / new,
            "speedup": min(times["model.extend"]) / best,
        }
        refused = sorted(set(getattr(decoders.get(way), "refused", {}).values()))
        rows.append({**shape, **speed, "same": same, "seconds": own, "refused": refused})
    return rows


def benchmark(args: Any) -> list[dict[str, Any]]:
    """Measure all cases, and print a line for each."""
    older = Older(args.older, args.device) if args.older else None
    rows: list[dict[str, Any]] = []
    print(f"{'mixer':10} {'batch':>5} {'dtype':8} {'by':15} {'step ms':>8} {'tokens/s':>9} {'speedup':>8} {'same':>5}")
    for dtype in args.dtypes.split(","):
        for name in args.mixers.split(",") if args.mixers else MIXERS:
            for batch in map(int, args.batches.split(",")):
                found = measured(name, batch, dtype, args, older)
                rows += found
                for row in found:
                    print(
                        f"{name:10} {batch:5} {dtype:8} {row['by']:15} {row['step_ms']:8.3f} {row['tokens_per_second']:9.0f} "
                        f"{row['speedup']:8.2f} {row['same']:5.2f} {'; '.join(row['refused'])}",
                        flush=True,
                    )
    if older is not None:
        older.close()
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older", default="", help="with --only step: another checkout, whose Ready takes turns")
    parser.add_argument("--mixers", default="", help="with --only step: some of " + ", ".join(MIXERS))
    parser.add_argument("--batches", default="1,32", help="with --only step")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="with --only step")
    parser.add_argument("--new", type=int, default=128, help="with --only step: timed steps")


def write(args: Any, rows: list[dict[str, Any]]) -> Path:
    """Write decode_step.json into $OUT, or into results/."""
    import common

    if os.environ.get("OUT"):
        common.RESULTS = Path(os.environ["OUT"])
    settings = {"width": WIDTH, "heads": HEADS, "depth": DEPTH, "vocab": VOCAB, "prompt": PROMPT, "new": args.new, "seed": SEED}
    settings |= {"rounds": args.rounds, "device": args.device, "value": "fastest of the rounds; speedup over model.extend"}
    return common.save("decode_step", settings, rows)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--worker", action="store_true", required=True, help="serve requests of benchmarks/decoding.py")
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    work(options.parse_args().device)
