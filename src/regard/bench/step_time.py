"""Times of a call on its two clocks: how long the host issues work, and how long the device computes. The longer one counts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from regard.bench.timing import MOST_CALLS, Call, NotCaptured, graph_time, plain_time, wait

CLOCK_TURNS = 3  # of calls that are subtracted from each other: a busy moment hits all alike
HOST_CALLS = 5  # of a turn; the fastest is the time of the host
LEAST_CALLS = 3  # of a pass on a CPU, unless they take OVER_BUDGET times the budget
OVER_BUDGET = 10
WARM_SECONDS = 0.2  # of calls before a GPU is timed: kernels compile, and clocks fall to what its power allows
HOST_FREE = 0.7  # of the plain time: a host that needs less never lets the device wait


class StepTime(NamedTuple):
    """Hold seconds of the host and of the device for one call. They overlap, and each adds up over the parts of a model."""

    host: float
    device: float
    spread: float = 0.0  # between turns of the same call; independent ones add up by their squares

    @property
    def total(self) -> float:
        """Seconds of the call among others that follow it without a wait."""
        return max(self.host, self.device)

    @property
    def host_bound(self) -> bool:
        return self.host > self.device

    def plus(self, other: StepTime, count: float = 1) -> StepTime:
        """Add a part that occurs so many times; a negative count takes it away. No time is below zero."""
        host = self.host + count * other.host
        device = self.device + count * other.device
        return StepTime(max(host, 0.0), max(device, 0.0), math.hypot(self.spread, count * other.spread))

    def minus(self, other: StepTime) -> StepTime:
        """Return how much longer this call is than another, on each clock."""
        return StepTime(self.host - other.host, self.device - other.device, math.hypot(self.spread, other.spread))

    def of_bound(self, host_bound: bool) -> float:
        """Return the seconds on the clock that limits the whole model."""
        return self.host if host_bound else self.device


NO_TIME = StepTime(0.0, 0.0)


def step_time(f: Call, device: torch.device, budget: float) -> StepTime:
    """Measure both clocks of a call. On a CPU they are one: all of it is time of the device."""
    return times_in_turns([f], device, budget)[0]


def times_in_turns(fs: Sequence[Call], device: torch.device, budget: float) -> list[StepTime]:
    """Measure both clocks of calls that are subtracted from each other: in turns, all in the same way. The fastest turn counts.

    A device that the host never lets wait computes for as long as the plain call takes. Where one of the calls makes it wait, the
    time of all is that inside a CUDA graph, where no host is waited for; of a call that cannot be captured, the plain one.
    """
    if device.type != "cuda":
        return [_fastest_turn(times, [0.0]) for times in _turns(fs, lambda f: real_time(f, device, budget / CLOCK_TURNS))]
    for f in fs:
        warm_up(f, device)
    plain = _turns(fs, lambda f: plain_time(f, device, budget / CLOCK_TURNS, min))
    host = _turns(fs, lambda f: host_time(f, device))
    found = [_fastest_turn(*times) for times in zip(plain, host, strict=True)]
    if all(one.host < HOST_FREE * one.device for one in found):
        return found
    return [one._replace(device=_device_alone(f, device, budget, one.device)) for f, one in zip(fs, found, strict=True)]


def _turns(fs: Sequence[Call], clock: Callable[[Call], float]) -> list[list[float]]:
    """Read a clock for each call in turn, several times; returns the times of each call."""
    turns = [[clock(f) for f in fs] for _ in range(CLOCK_TURNS)]
    return [list(times) for times in zip(*turns, strict=True)]


def _fastest_turn(plain: list[float], host: list[float]) -> StepTime:
    """Keep the fastest turn of both clocks: other programs only add to a time. The median turn says how much."""
    return StepTime(min(host), min(plain), statistics.median(plain) - min(plain))


def _device_alone(f: Call, device: torch.device, budget: float, plain: float) -> float:
    """Seconds of a call inside a CUDA graph, at most the plain ones."""
    try:
        return min(graph_time(f, device, budget / 2, plain), plain)
    except NotCaptured:
        return plain


def real_time(f: Call, device: torch.device, budget: float) -> float:
    """Seconds of a call as a program makes it, eager calls one after the other: what a prediction is compared with."""
    if device.type != "cuda":
        f()
        return least_time(f, budget)
    warm_up(f, device)
    return plain_time(f, device, budget, min)


def warm_up(f: Call, device: torch.device) -> None:
    """Call twice, which compiles what is missing, and then go on until the clocks of a GPU are those of such work."""
    f()
    f()
    wait(device)
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_SECONDS:
        f()
        wait(device)


def least_time(f: Call, budget: float) -> float:
    """Seconds of the fastest of several calls on a CPU: other programs only add to a time."""
    found: list[float] = []
    while not found or sum(found) < budget or (len(found) < LEAST_CALLS and sum(found) < OVER_BUDGET * budget):
        start = time.perf_counter()
        f()
        found.append(time.perf_counter() - start)
        if len(found) == MOST_CALLS:
            break
    return min(found)


def host_time(f: Call, device: torch.device) -> float:
    """Seconds until a call returns, with an idle device: the least time in which Python and PyTorch issue its work."""
    found = []
    for _ in range(HOST_CALLS):
        wait(device)
        start = time.perf_counter()
        f()
        found.append(time.perf_counter() - start)
    wait(device)
    return min(found)


def deeper(one: StepTime, many: StepTime, depth: int, wanted: int) -> StepTime:
    """Extrapolate from models of 1 and `depth` layers to one of `wanted` layers: both clocks are linear in the layers."""
    if depth == 1:
        return one
    layer = many.plus(one, -1)
    return one.plus(layer, (wanted - 1) / (depth - 1))
