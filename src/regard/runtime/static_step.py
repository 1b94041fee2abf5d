"""A step of a `StaticDecoder` as one CUDA graph: hundreds of kernels, one launch, and the host never waits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from regard.runtime.cuda_graph import capture_graph
from regard.runtime.static_cache import StaticCache


class GraphedStepReplay:
    """Read tokens and rows from a cache, reorder beams from `side` to the other, write one token more, and compute scores."""

    def __init__(self, step: Callable[[], Tensor], cache: StaticCache, side: int) -> None:
        self.cache, self.side, self.step = cache, side, step
        try:
            self.scores = self.captured()
        except RuntimeError as why:
            raise RuntimeError("a step of this model cannot be captured as a CUDA graph: use graphs=False") from why

    def captured(self) -> Tensor:
        """Capture the step; return the tensor that every replay writes its scores to."""
        self.graph, scores, self.read = capture_graph(self.run, self.cache.slot.device, warm=self.first)
        return scores

    def first(self) -> Tensor:
        """Run the first step of a sequence."""
        self.cache.slot.zero_()
        self.cache.at.zero_()
        return self.run()

    def run(self) -> Tensor:
        """Run one step without the host: the size of the cache is on the device alone."""
        cache = self.cache
        cache.side = self.side
        if cache.k > 1:
            cache.reorder(cache.rows)
        cache.valid.index_fill_(1, cache.slot, True)
        cache.bias.index_fill_(3, cache.slot, 0.0)
        scores = self.step()
        cache.slot += 1
        cache.at += 1
        return scores

    def replay(self, tokens: Tensor, rows: Tensor | None) -> Tensor:
        self.cache.tokens.copy_(tokens)
        if self.cache.k > 1:
            self.cache.rows.copy_(self.cache.same if rows is None else rows)
        self.graph.replay()
        self.cache.side = self.side if self.cache.k == 1 else 1 - self.side
        return self.scores.clone()  # the next step overwrites them
