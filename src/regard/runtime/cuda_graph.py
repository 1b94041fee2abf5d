"""A pass captured as a CUDA graph, and what it reads and did not make: memory that must stay where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CapturedT = TypeVar("CapturedT")


class ExternalReads(TorchDispatchMode):
    """Notes the memory that operations read and none of them made: weights, and whatever a model keeps between passes.

    A model may replace what it keeps, such as a table of positions when a longer text comes, and its memory would go to others
    while a captured pass still reads there.
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
    out: CapturedT  # where every replay writes what it found
    read: list[torch.UntypedStorage]  # a replay reads there, so it must stay


def capture_graph(
    run: Callable[[], CapturedT], device: torch.device, *, warm: Callable[[], object] | None = None, pool: Any = None
) -> CapturedGraph[CapturedT]:
    """run() as one launch; before that it is done twice, as `warm` does it, if that is something else.

    `pool` is memory that may be shared with graphs that never run at the same time.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries choose their kernels now, not while they are watched
                (warm or run)()
        torch.cuda.current_stream().wait_stream(stream)
        graph, outside = torch.cuda.CUDAGraph(), ExternalReads()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"), outside:
            out = run()
    return CapturedGraph(graph, out, list(outside.read.values()))
