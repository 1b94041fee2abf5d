"""One training step of a cell as a call: AdamW, clipped gradients, data on the device. On a GPU it is one CUDA graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.arena.arena_task import IGNORED, ArenaBudget, ArenaTask
from regard.compare.compared_model import ComparedModel
from regard.compare.device_split import DeviceSplit, changes_batches
from regard.compare.split_score import target_losses
from regard.runtime.cuda_graph import capture_graph, forbid_sync

EAGER_STEPS = 3  # before a capture


class TrainingStep:
    """Run training steps of one model, in `on_stream`. On a GPU, those behind EAGER_STEPS are one CUDA graph if possible."""

    def __init__(
        self,
        model: ComparedModel,
        task: ArenaTask,
        split: DeviceSplit,
        usual: ArenaBudget,
        dtype: torch.dtype = torch.float32,
        graphs: bool = True,
    ) -> None:
        self.model, self.task, self.split, self.dtype = model, task, split, dtype
        self.device = split.tokens.device
        self.on_card = self.device.type == "cuda"
        self.graphs = graphs and self.on_card
        self.clip, self.augments = usual.clip, changes_batches(task)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.rate = torch.zeros((), device=self.device)
        options = {"fused": True, "capturable": True} if self.on_card else {"fused": True}
        groups = decayed_groups(self.weights, usual.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate if self.on_card else 0.0, betas=(0.9, 0.98), **options)
        self.index = torch.zeros(min(usual.batch, len(split)), dtype=torch.long, device=self.device)
        self.total_loss = torch.zeros((), device=self.device)
        self.stream = torch.cuda.Stream(self.device) if self.on_card else None
        self.captured: dict[int | None, Any] = {}  # a graph for each length of batches
        self.memory = torch.cuda.graph_pool_handle() if self.graphs else None  # of all graphs: they run one after the other
        self.join()
        self.note = ""  # why steps are not captured
        self.done: Counter[int | None] = Counter()  # steps by length
        self.summed = 0

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run on the stream that steps are captured on. Streams of several models run side by side: see `join`."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Order the work of both streams, that of steps and the current one, behind what was started on the other."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(current)
            current.wait_stream(self.stream)

    def is_warm(self, length: int | None = None) -> bool:
        """Return whether the next step of this length comes behind those that warm up and are captured."""
        return length in self.captured or self.done[length] > EAGER_STEPS

    def __call__(self, index: Tensor, rate: float, length: int | None = None) -> None:
        """Make one update from the examples of these numbers, cut or padded to a length, that of the task unless given."""
        self.index.copy_(index)
        self._set_rate(rate)
        if length in self.captured:
            self.captured[length].graph.replay()
        elif self.graphs and not self.note and self.done[length] >= EAGER_STEPS:
            self._run_and_capture(length)
        else:
            self._run(length)
        self.done[length] += 1
        self.summed += 1

    @torch.no_grad()
    def restart(self, model: ComparedModel) -> None:
        """Take the weights of a new model of the same shape and forget all updates; a step that is captured stays captured."""
        with self.on_stream():
            for own, new in ((self.model.parameters(), model.parameters()), (self.model.buffers(), model.buffers())):
                for x, y in zip(own, new, strict=True):
                    x.copy_(y)
            for state in self.optimizer.state.values():
                for x in state.values():
                    x.zero_()
            self.total_loss.zero_()
        self.done.clear()
        self.summed = 0

    def mean_loss(self) -> float:
        """Return the mean loss since the last call; waits for the device."""
        mean = float(self.total_loss) / max(1, self.summed)
        self.total_loss.zero_()
        self.summed = 0
        return mean

    def _set_rate(self, rate: float) -> None:
        if self.on_card:
            self.rate.fill_(rate)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _run(self, length: int | None) -> None:
        loss = self._loss(length)
        for p in self.weights:
            p.grad = None
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.weights, self.clip, foreach=True)
        self.optimizer.step()
        self.total_loss += loss.detach()

    def _loss(self, length: int | None) -> Tensor:
        """Return the mean loss of the targets, and that of the side targets beside it where the task has some."""
        tokens, targets, valid, at = self.split.rows(self.index, length)
        if self.augments:
            tokens, targets = self.task.augment(tokens, targets, None)
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32, cache_enabled=False)
        if not self.task.side_labels:
            with autocast:
                scores = self.model(tokens, valid, at)
            return mean_loss(scores, targets)
        side = self.task.side_targets(tokens, valid)
        with autocast:
            scores, side_scores = self.model.with_side_scores(side.tokens, valid)
        return mean_loss(scores, targets) + mean_loss(side_scores, side.targets)

    def _run_and_capture(self, length: int | None) -> None:
        """Make one update without a synchronisation, then capture the next ones; the reason is noted where that fails."""
        try:
            with forbid_sync(self.device):
                self._run(length)
        except RuntimeError as error:
            self.note = f"not captured: {str(error).splitlines()[0]}"
            self._run(length)
            return
        torch.cuda.synchronize(self.device)
        try:
            self.captured[length] = capture_graph(
                lambda: self._run(length), self.device, warmups=0, pool=self.memory, stream=self.stream
            )
        except RuntimeError as error:
            self.note = f"not captured: {str(error).splitlines()[0]}"
            torch.cuda.synchronize(self.device)


def mean_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the targets that count, in float32; 0 where none does."""
    return target_losses(scores, targets).sum() / (targets != IGNORED).sum().clamp_min(1)


def decayed_groups(weights: list[torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Decay matrices alone: no norms, no biases."""
    matrices = [p for p in weights if p.dim() > 1]
    others = [p for p in weights if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
