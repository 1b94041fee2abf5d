"""A pass as one launch. On a GPU a small model spends its time in starting kernels, not in running them.

A forward and backward pass over a batch of some shape is always the same list of kernels. The first batch of a shape is run as it
is, the second is captured as a CUDA graph, and every later one copies its tokens into the captured ones and starts the whole list
at once. Dropout still falls anew: the random numbers of a graph move on with every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.runtime.cuda_graph import capture_graph
from regard.training.losses import Loss

Shape = tuple[tuple[str, torch.Size, torch.dtype] | None, ...]


class CapturedPass(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Loss  # overwritten by every replay
    read: list[torch.UntypedStorage]  # memory from outside of the pass: a replay reads it where it was, so it must stay

    def __call__(self, batch: Batch) -> Loss:
        for own, given in zip(self.inputs, _tensors(batch), strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return Loss(self.loss.total.clone(), self.loss.over.clone(), {name: x.clone() for name, x in self.loss.parts.items()})


class GraphedStep:
    """Passes of a model: `graphs(batch)` adds the gradient of loss.total / unit to what `wanted` holds, and gives the loss.

    `forward` must not look at the device, and must draw its random numbers there. All work of training is done on the stream of
    `on_stream`: a gradient that was made on another one could not be captured.
    """

    def __init__(self, forward: Callable[[Batch], Loss], wanted: Sequence[nn.Parameter], unit: float) -> None:
        self.forward, self.wanted, self.unit = forward, wanted, unit
        self.device = wanted[0].device
        self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        self.seen: set[Shape] = set()
        self.known: dict[Shape, CapturedPass] = {}

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """After what was asked for before, and before what is asked for later."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def __call__(self, batch: Batch) -> Loss:
        shape = _batch_shape(batch)
        if shape in self.known:
            return self.known[shape](batch)
        if shape not in self.seen:
            self.seen.add(shape)
            return self._first(batch)
        self.known[shape] = self._capture(batch)
        return self.known[shape](batch)

    def _first(self, batch: Batch) -> Loss:
        """As it is; whatever is made only once has been made then."""
        for p in self.wanted:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        before = torch.get_rng_state()
        loss = self._run(batch.to(self.device))
        if not torch.equal(before, torch.get_rng_state()):
            raise ValueError(
                "this model draws random numbers on the host, which a captured pass would draw once: use graphs=false"
            )
        return loss

    def _capture(self, batch: Batch) -> CapturedPass:
        own = batch.to(self.device)
        self.stream.synchronize()
        try:  # without warm-ups: `_first` has run a batch of this shape
            graph, loss, read = capture_graph(lambda: self._run(own), self.device, warmups=0, pool=self.pool, stream=self.stream)
        except RuntimeError as error:
            raise ValueError(
                f"a pass of this model cannot be captured, use graphs=false: {str(error).splitlines()[0]}"
            ) from error
        return CapturedPass(graph, _tensors(own), loss, read)

    def _run(self, batch: Batch) -> Loss:
        loss = self.forward(batch)
        (loss.total / self.unit).backward()
        return Loss(loss.total.detach(), loss.over, {name: x.detach() for name, x in loss.parts.items()})


def _tensors(batch: Batch) -> list[Tensor]:
    return [x for x in (*batch[:4], *batch.extra.values()) if isinstance(x, Tensor)]


def _batch_shape(batch: Batch) -> Shape:
    """What makes two batches the same list of kernels."""
    named = [*zip(Batch._fields, batch[:4], strict=False), *batch.extra.items()]
    return tuple(None if x is None else (name, x.shape, x.dtype) for name, x in named)
