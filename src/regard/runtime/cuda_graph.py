"""Capture of CUDA graphs: a function of kernels becomes one launch, and the memory that it reads stays where it is."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CapturedT = TypeVar("CapturedT")
WARMUPS = 2  # runs before a capture: libraries choose their kernels then


class ExternalReads(TorchDispatchMode):
    """Collect the memory that operations read and none of them made: weights, and tables that a model keeps between passes.

    A model may replace such a table, for example by a longer one of positions, and its memory would be given to other tensors
    while a captured graph still reads there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.read: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and (at := x.untyped_storage().data_ptr()) not in self.made:
                self.read[at] = x.untyped_storage()
        out = func(*args, **(kwargs or {}))
        made = {x.untyped_storage().data_ptr() for x in tree_leaves(out) if isinstance(x, Tensor)}
        self.made |= made - self.read.keys()
        return out


class CapturedGraph(NamedTuple, Generic[CapturedT]):
    graph: torch.cuda.CUDAGraph
    out: CapturedT  # overwritten by every replay
    read: list[torch.UntypedStorage]  # memory that a replay reads: kept alive


def capture_graph(
    run: Callable[[], CapturedT],
    device: torch.device,
    *,
    warm: Callable[[], object] | None = None,
    warmups: int = WARMUPS,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> CapturedGraph[CapturedT]:
    """Capture run() as one CUDA graph, after `warmups` calls of `warm` (of `run` itself unless given) on a stream of their own.

    `pool` is memory that graphs share which never run at the same time; `stream` is the one that is captured.
    """
    with torch.cuda.device(device):
        if warmups:
            _warm_up(warm or run, warmups)
        graph, outside = torch.cuda.CUDAGraph(), ExternalReads()
        with without_collection(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"), outside:
            out = run()
    return CapturedGraph(graph, out, list(outside.read.values()))


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect garbage now and not until the end: a graph that is destroyed while another one is captured breaks the capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _warm_up(run: Callable[[], object], times: int) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            run()
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def forbid_sync(device: torch.device) -> Iterator[None]:
    """Raise a RuntimeError where the host waits for a GPU, which no capture allows. A failed capture is not undone by itself."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode(mode)
