"""A step of a ready model as one CUDA graph: hundreds of kernels, one launch, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from regard.runtime.cuda_graph import capture_graph
from regard.runtime.static_cache import StaticCache


class GraphedStepReplay:
    """Reads the desk's tokens and rows, reorders beams from `side` to the other, writes one token more, gives the scores."""

    def __init__(self, step: Callable[[], Tensor], desk: StaticCache, side: int) -> None:
        self.desk, self.side, self.step = desk, side, step
        try:
            self.scores = self.captured()
        except RuntimeError as why:
            raise RuntimeError("a step of this model cannot be captured as a CUDA graph: use Ready(model, graphs=False)") from why

    def captured(self) -> Tensor:
        """Where the scores of every replay will lie."""
        self.graph, scores, self.read = capture_graph(self.run, self.desk.slot.device, warm=self.first)
        return scores

    def first(self) -> Tensor:
        """The first step of a text."""
        self.desk.slot.zero_()
        self.desk.at.zero_()
        return self.run()

    def run(self) -> Tensor:
        """One step without the host: what size the text has only the device knows."""
        desk = self.desk
        desk.side = self.side
        if desk.k > 1:
            desk.reorder(desk.rows)
        desk.valid.index_fill_(1, desk.slot, True)
        desk.price.index_fill_(3, desk.slot, 0.0)
        scores = self.step()
        desk.slot += 1
        desk.at += 1
        return scores

    def replay(self, tokens: Tensor, rows: Tensor | None) -> Tensor:
        self.desk.tokens.copy_(tokens)
        if self.desk.k > 1:
            self.desk.rows.copy_(self.desk.same if rows is None else rows)
        self.graph.replay()
        self.desk.side = self.side if self.desk.k == 1 else 1 - self.side
        return self.scores.clone()  # the next step writes where these lie
