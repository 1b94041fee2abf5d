"""CUDA graphs of training passes. On a GPU a small model spends most of its time on kernel launches.

A forward and backward pass over a batch of one shape is always the same sequence of kernels. The first batch of a shape is run
eagerly, the second is captured as a CUDA graph, and every later one is copied into the captured inputs and replayed. Dropout
differs between replays: a graph advances the state of the generator.
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
    """Hold a captured pass, its inputs and its outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Loss  # overwritten by every replay
    read: list[torch.UntypedStorage]  # memory outside of the graph that replays read: kept alive

    def __call__(self, batch: Batch) -> Loss:
        for own, given in zip(self.inputs, _tensors(batch), strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        parts = {name: x.clone() for name, x in self.loss.parts.items()}
        return Loss(self.loss.total.clone(), self.loss.over.clone(), parts)


class GraphedStep:
    """Run passes of a model: add the gradients of loss.total / unit to those of the parameters, and return the loss.

    `forward` must not synchronise with the device, and must draw random numbers on it. All training is done on the stream of
    `on_stream`: a gradient that was made on another stream could not be captured.
    """

    def __init__(self, forward: Callable[[Batch], Loss], parameters: Sequence[nn.Parameter], unit: float) -> None:
        self.forward, self.parameters, self.unit = forward, parameters, unit
        self.device = parameters[0].device
        self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        self.seen: set[Shape] = set()
        self.known: dict[Shape, CapturedPass] = {}

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run on the capture stream, ordered after earlier and before later work of the current stream."""
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
        """Run eagerly; one-time allocations happen here."""
        for p in self.parameters:
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
            reason = str(error).splitlines()[0]
            raise ValueError(f"a pass of this model cannot be captured, use graphs=false: {reason}") from error
        return CapturedPass(graph, _tensors(own), loss, read)

    def _run(self, batch: Batch) -> Loss:
        loss = self.forward(batch)
        (loss.total / self.unit).backward()
        return Loss(loss.total.detach(), loss.over, {name: x.detach() for name, x in loss.parts.items()})


def _tensors(batch: Batch) -> list[Tensor]:
    return [x for x in (*batch[:4], *batch.extra.values()) if isinstance(x, Tensor)]


def _batch_shape(batch: Batch) -> Shape:
    """Return a key that is equal for batches with the same sequence of kernels."""
    named = [*zip(Batch._fields, batch[:4], strict=False), *batch.extra.items()]
    return tuple(None if x is None else (name, x.shape, x.dtype) for name, x in named)
