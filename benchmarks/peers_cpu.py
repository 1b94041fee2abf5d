"""Beside other packages on a CPU, forward + backward, each in turn with ours: the median of paired ratios.

Operations on q, k, v, and whole layers, in which four projections take most of the time at 2,048 tokens.

A pair is a call of the peer and a call of ours right after it, so that a busy moment of the machine hits both. --clock cpu counts
the time in which the process ran rather than the time that passed: for one thread on a machine that runs other programs.

    python benchmarks/peers_cpu.py [--threads 2] [--clock wall] [--seconds 4]        into results/peers_cpu.json
    python benchmarks/peers_cpu.py --only sinkhorn fnet --lengths 2048               printed, nothing is saved
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from common import Progress, save
from regard.bench.peer import Peer
from regard.bench.peers import PEERS, peers_of
from regard.bench.speed import FAILURES, failure_text
from regard.bench.timing import Call, light_collections
from regard.bench.workload import (
    LAYER,
    OPERATION,
    Setting,
    Workload,
    build_mixer,
    layer_input,
    module_workload,
    operation_inputs,
    own_core,
    own_workload,
    spec_text,
)
from regard.mixers.base import Mixer
from regard.spec import Spec

CASES = (  # and whether they are causal
    ("Local(129)", False),
    ("Local(129)", True),
    ("performer(features=128)", False),
    ("performer(features=128)", True),
    ("efficient", False),
    ("linformer(rank=128, share='head')", False),
    ("nystrom(landmarks=64)", False),
    ("nystrom(landmarks=64, iterations=6)", False),
    ("sinkhorn(block=64)", False),
    ("sinkhorn(block=64)", True),
    ("routing(window=128)", False),
    ("reformer(chunk=64, rounds=2)", False),
    ("fnet", False),
    ("longformer(window=257)", False),
    ("bigbird(block=64)", False),
)
LENGTHS = (2048, 8192)
HEADS, DIM, SEED = 8, 64, 0
LEAST_PAIRS, MOST_PAIRS = 5, 200
OVER_BUDGET = 10  # times the budget after which fewer pairs are enough
TOO_LARGE = {("performer(features=128)", True): 4096}  # causal performer-pytorch keeps a state of every token: 7 GB at n = 8,192
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
PACKAGES = [peer.name for peer in PEERS if not peer.needs_gpu and peer.package != "torch"]


def pairs(ours: Call, theirs: Call, clock: Callable[[], float], budget: float) -> list[tuple[float, float]]:
    """Seconds of the peer and of ours, in turns, for about `budget` seconds on the clock; a first call of each warms up."""
    theirs()
    ours()
    found: list[tuple[float, float]] = []
    spent = 0.0
    while not found or spent < budget or (len(found) < LEAST_PAIRS and spent < OVER_BUDGET * budget):
        moments = [clock()]
        for call in (theirs, ours):
            call()
            moments.append(clock())
        found.append((moments[1] - moments[0], moments[2] - moments[1]))
        spent += moments[2] - moments[0]
        if len(found) == MOST_PAIRS:
            break
    return found


def row(peer: Peer, layer: Mixer, setting: Setting, level: str, clock: str, budget: float) -> dict[str, Any]:
    """One peer at one length; what cannot be measured has a reason."""
    named = {"spec": spec_text(Spec.parse(str(layer.spec))), "causal": setting.causal, "level": level}
    named |= {"n": setting.n, "peer": peer.name}
    reason = peer.missing(setting.device)
    if reason:
        return named | {"reason": reason}
    try:
        module = peer.build(layer, setting, level).train()
        x = (layer_input(setting),) if level == LAYER else operation_inputs(own_core(layer), setting)
        ours = own_workload(layer, setting, level, x)
        theirs = module_workload(module, x) if level == LAYER else _operation(module, x)
        found = pairs(ours.both, theirs.both, CLOCKS[clock], budget)
    except FAILURES as error:
        return named | {"reason": failure_text(error)}
    times: dict[str, Any] = {"ms": 1e3 * statistics.median(t for _, t in found)}
    times |= {"peer_ms": 1e3 * statistics.median(t for t, _ in found)}
    return named | times | {"ratio": statistics.median(t / own for t, own in found), "pairs": len(found)}


def _operation(module: Any, x: tuple[Tensor, ...]) -> Workload:
    """The operation of a package on tensors in its own layout, which is made before it is timed."""
    inputs = tuple(given.detach().requires_grad_(given.requires_grad) for given in module.prepare(*x))
    return Workload(module.run, inputs, tuple(p for p in module.parameters() if p.requires_grad))


def rows(only: list[str], lengths: list[int], clock: str, budget: float) -> Iterator[dict[str, Any]]:
    chosen = [(text, causal) for text, causal in CASES if not only or any(part in text for part in only)]
    progress = Progress(len(chosen) * len(lengths))
    for text, causal in chosen:
        spec = Spec.parse(text)
        for n in (n for n in lengths if n <= TOO_LARGE.get((text, causal), n)):
            setting = Setting(n, 1, HEADS, DIM, causal, seed=SEED)
            layer = build_mixer(spec, setting).train()
            for peer in peers_of(spec, causal, PACKAGES):
                for level in (OPERATION, LAYER) if peer.level == OPERATION else (LAYER,):
                    yield row(peer, layer, setting, level, clock, budget)
            progress.step(f"{text}, n = {n}")


def line(found: dict[str, Any]) -> str:
    what = f"{found['spec']}{' causal' if found['causal'] else ''} ({found['level']}) n={found['n']} {found['peer']}"
    if "reason" in found:
        return f"{what}: {found['reason']}"
    return f"{what}: {found['peer_ms']:.1f} -> {found['ms']:.1f} ms, {found['ratio']:.2f} x ({found['pairs']} pairs)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each pair of layers")
    parser.add_argument("--only", nargs="*", default=[], help="mechanisms whose text holds one of these")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    load = os.getloadavg()[0]
    found = []
    with light_collections():
        for one in rows(args.only, args.lengths, args.clock, args.seconds):
            found.append(one)
            print(line(one), flush=True)
    if args.only:
        return
    settings = {"batch": 1, "heads": HEADS, "dim": DIM, "dtype": "float32", "seed": SEED, "threads": args.threads}
    settings |= {"clock": args.clock, "load": load, "seconds": args.seconds, "pass": "forward + backward"}
    print(save("peers_cpu", settings, found))


if __name__ == "__main__":
    main()
