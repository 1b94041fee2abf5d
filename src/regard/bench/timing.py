"""Clocks of a call: plain time, time as a CUDA graph, launched kernels, peak memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.runtime.cuda_graph import forbid_sync, without_collection

Call = Callable[[], Any]
ROUNDS = 5  # timed rounds of a call: the median is reported
MOST_CALLS = 50  # calls in a round
MAX_UNROLLED = 20  # calls in one CUDA graph
GRAPH_SECONDS = 2e-3  # of work in one CUDA graph, so that the gap between two of them is small
FREE_OPS = ("empty", "detach", "alias", "_unsafe_view", "view", "lift_fresh", "is_same_size", "_local_scalar_dense", "resize_")


class NotCaptured(RuntimeError):
    """A call that cannot be a CUDA graph, with the reason."""


@contextmanager
def light_collections() -> Iterator[None]:
    """Make garbage collections inside cheap: what exists before them is not searched again. What is frozen already stays so."""
    frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def wait(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(f: Call, device: torch.device) -> float:
    """Seconds of one call, and of all the work it starts on the device."""
    wait(device)
    start = time.perf_counter()
    f()
    wait(device)
    return time.perf_counter() - start


def timed(f: Call, device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of several calls, after one that warms up."""
    f()
    return [seconds(f, device) for _ in range(repeats)]


def taking_turns(fs: dict[str, Call], device: torch.device, rounds: int, calls: int = 3) -> dict[str, list[float]]:
    """Seconds of many calls of each. They take turns, so that a busy moment hits all alike; the first call of a turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in fs}
    for _ in range(rounds):
        for name, f in fs.items():
            times[name] += timed(f, device, calls)
    return times


def plain_time(f: Call, device: torch.device, budget: float, pick: Callable[[list[float]], float] = statistics.median) -> float:
    """Seconds of a call among calls that follow each other without a wait: host time or device time, whichever is longer.

    The median (or another `pick`) of ROUNDS rounds which take about `budget` seconds together. The caller has warmed the call up.
    """
    once = max(seconds(f, device), 1e-7)
    calls = int(budget / ROUNDS / once)
    calls = min(max(calls, 1), MOST_CALLS)

    def batch() -> None:
        for _ in range(calls):
            f()

    rounds = ROUNDS if once < budget else 2
    found = [seconds(batch, device) / calls for _ in range(rounds)]
    return pick(found)


def graph_time(f: Call, device: torch.device, budget: float, once: float) -> float:
    """Seconds of a call inside a CUDA graph that holds several of them: device time alone. `once` is its plain time.

    Raises NotCaptured for a call that waits for the device, or whose capture fails.
    """
    unrolled = int(GRAPH_SECONDS / once)
    unrolled = min(max(unrolled, 1), MAX_UNROLLED)
    graph = captured(f, device, unrolled)
    return plain_time(graph.replay, device, budget) / unrolled


def captured(f: Call, device: torch.device, unrolled: int) -> torch.cuda.CUDAGraph:
    """Capture several calls as one CUDA graph, after a warm-up on a stream of its own."""
    graph = torch.cuda.CUDAGraph()
    try:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            f()
            with forbid_sync(device):
                f()
        torch.cuda.current_stream(device).wait_stream(stream)
        wait(device)
        with without_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(unrolled):
                f()
    except RuntimeError as error:
        wait(device)
        raise NotCaptured(first_line(error)) from error
    return graph


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class OpCount(TorchDispatchMode):
    """Count the operations that PyTorch dispatches; one that moves no number (a view) is none."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        nothing = bool(made) and not any(made)
        if not (func.is_view or nothing or name.startswith(FREE_OPS)):
            self.total += 1
        return out


def launches(f: Call, device: torch.device) -> int:
    """Kernels, copies and fills that a call starts on a GPU; on a CPU the operations that PyTorch dispatches."""
    if device.type != "cuda":
        with OpCount() as count:
            f()
        return count.total
    wait(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        f()
        wait(device)
    on_device = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_device for event in profiled.events() or ())


def peak_bytes(f: Call, device: torch.device) -> int:
    """The most memory that a call held beyond what was there before it. On a CPU: Linux's own high-water mark."""
    gc.collect()  # what earlier calls left behind in cycles is not theirs to free
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        f()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _process_bytes("VmRSS")
    f()
    return max(0, _process_bytes("VmHWM") - before)


def _process_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(x for x in lines if x.startswith(name + ":"))
    return int(line.split()[1]) * 1024
