"""One decoding step of any model as a CUDA graph: the step itself, its buffers, and beams that are reordered in it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from regard.mixers.places import positions_below
from regard.ops.in_place import overwritten_states
from regard.runtime.cuda_graph import capture_graph, forbid_sync
from regard.runtime.state_buffers import StateBuffers


class DecodeGraph:
    """`model.extend(state, token)` in buffers: tokens in, scores out, the state in place.

    Two graphs are captured when they are first needed: one that goes on as it is, one that reorders rows first, for beams.
    `left` counts the steps that still fit into the caches and below `bound`, the end of the positions.
    """

    def __init__(self, model: Any, state: Any, buffers: StateBuffers, bound: int, pool: Any) -> None:
        self.model, self.buffers, self.bound, self.pool = model, buffers, bound, pool
        rows = len(state.t)
        self.device = state.t.device
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        self.rows = torch.arange(rows, device=self.device)
        self.turn = self.left = 0
        self.captured: dict[bool, Any] = {}

    def load(self, state: Any, left: int) -> None:
        """Begin with a state."""
        self.buffers.load(state)
        self.turn, self.left = self.turn + 1, left

    def why_not(self, state: Any) -> str | None:
        """Extend a state twice, kernel by kernel, and explain why that cannot be repeated as a graph; None if it can.

        The second time no table has to be made any more, and the host must not wait for the device.
        """
        for watch in (nullcontext(), forbid_sync(self.device)):
            self.buffers.load(state)
            with watch:
                _, after = self._extend()
            if why := self.buffers.why_not_static(after):
                return why
        self.buffers.load(state)
        return None

    def run(self, reorder: bool) -> Tensor:
        """Do one step without the host: what a graph captures."""
        if reorder:
            self.buffers.reorder(self.rows)
        scores, after = self._extend()
        self.buffers.store(after)
        return scores

    def _extend(self) -> tuple[Tensor, Any]:
        self.buffers.begin()
        with positions_below(self.bound), overwritten_states(self.buffers.moved.values()):
            return self.model.extend(self.buffers.state, self.tokens)

    def capture(self, reorder: bool) -> Any:
        """Capture a step; the state in the buffers is the same afterwards."""
        state = self.buffers.value()

        def warm() -> None:
            self.buffers.load(state)
            self.run(reorder)

        captured = capture_graph(lambda: self.run(reorder), self.device, warm=warm, pool=self.pool)
        self.buffers.load(state)
        return captured

    def launch(self, reorder: bool) -> Tensor:
        """Replay the graph of a step; its scores (b 1 v) are overwritten by the next one."""
        if reorder not in self.captured:
            with torch.inference_mode(False), torch.no_grad():  # a graph outlives the mode it is made in
                self.captured[reorder] = self.capture(reorder)
        captured = self.captured[reorder]
        captured.graph.replay()
        return captured.out

    def step(self, tokens: Tensor, rows: Tensor | None) -> Tensor:
        """Extend by tokens (b 1), after taking `rows` (b) where beams are reordered: scores (b 1 v)."""
        self.tokens.copy_(tokens)
        if rows is not None:
            self.rows.copy_(rows)
        scores = self.launch(rows is not None).clone()
        self.buffers.steps += 1
        self.turn, self.left = self.turn + 1, self.left - 1
        return scores

    def value(self) -> Any:
        """Return the ordinary state that the buffers hold, as a copy."""
        return self.buffers.value()
