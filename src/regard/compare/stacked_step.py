"""One training step of several models as one: losses, clipped gradients and AdamW of each by itself, by operations for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.arena.arena_task import IGNORED, ArenaBudget, ArenaTask
from regard.compare.batch_order import BatchOrder
from regard.compare.device_split import DeviceSplit, changes_batches
from regard.compare.split_score import target_losses, target_values
from regard.compare.stacked_model import StackedModel
from regard.compare.training_step import BETAS, CapturedStep, batch_scores

EPS = 1e-8  # of AdamW
NORM_EPS = 1e-6  # of clipping, as in torch.nn.utils.clip_grad_norm_
DRAWN = 512  # steps whose batches go to the device at once
STACKED_TOKENS = 240_000  # of all models in a step or in a batch of an evaluation, at most: more of them fill a GPU alone


class StackedStep(CapturedStep):
    """Run training steps of several models: the definition is a `TrainingStep` of each, with its own learning rate.

    Examples are numbered (m b). What is not a number in one model stays there: no operation joins two of them.
    """

    def __init__(
        self,
        model: StackedModel,
        task: ArenaTask,
        split: DeviceSplit,
        usual: ArenaBudget,
        rates: Sequence[float],
        dtype: torch.dtype = torch.float32,
        graphs: bool = True,
    ) -> None:
        device, count = split.tokens.device, model.count
        index = torch.zeros(count, min(usual.batch, len(split)), dtype=torch.long, device=device)
        super().__init__(split, index, torch.zeros(count, device=device), graphs)
        self.model, self.task, self.dtype = model, task, dtype
        self.clip, self.augments, self.decay = usual.clip, changes_batches(task), usual.weight_decay
        flat = model.flat
        self.rates = torch.tensor(rates, dtype=flat.dtype, device=device)
        self.rate = torch.zeros_like(self.rates)  # of the next step
        self.decayed = model.matrices()
        self.mean, self.square = torch.zeros_like(flat), torch.zeros_like(flat)
        self.updates = torch.zeros((), dtype=torch.float64, device=device)

    def mean_losses(self) -> list[float]:
        """Return the mean loss of each model since the last call; waits for the device."""
        means = (self.total_loss / max(1, self.summed)).tolist()
        self.total_loss.zero_()
        self.summed = 0
        return means

    def _set_rate(self, rate: float) -> None:
        """Take the share of its learning rate that each model gets."""
        torch.mul(self.rates, rate, out=self.rate)

    def _run(self, length: int | None) -> None:
        batch = self.split.rows(self.index.flatten(), length)
        parts = batch_scores(self.model, self.task, batch, self.dtype, self.augments)
        first, *more = (model_losses(scores, targets, self.model.count) for scores, targets in parts)
        losses = first + more[0] if more else first
        self.model.flat.grad = None
        losses.sum().backward()
        self._update()
        self.total_loss += losses.detach()

    @torch.no_grad()
    def _update(self) -> None:
        """Clip the gradients of every model by their norm, and make one update of AdamW."""
        flat, grad, (fast, slow) = self.model.flat, self.model.flat.grad, BETAS
        assert grad is not None
        norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        grad.mul_((self.clip / (norm + NORM_EPS)).clamp_max(1.0))
        self.updates += 1
        if self.decay:
            flat.mul_(1 - self.decay * self.rate[:, None] * self.decayed)
        self.mean.lerp_(grad, 1 - fast)
        self.square.mul_(slow).addcmul_(grad, grad, value=1 - slow)
        size = self.rate / (1 - fast**self.updates).to(flat.dtype)
        spread = (self.square / (1 - slow**self.updates).to(flat.dtype)).sqrt_().add_(EPS)
        flat.addcdiv_(self.mean * -size[:, None], spread)


def model_losses(scores: Tensor, targets: Tensor, count: int) -> Tensor:
    """Return the mean loss of each model (m), of scores (m * b ... c): 0 where no target counts."""
    total = target_losses(scores, targets).view(count, -1).sum(1)
    return total / (targets != IGNORED).view(count, -1).sum(1).clamp_min(1)


@torch.no_grad()
def stacked_points(model: StackedModel, split: DeviceSplit, metric: str, dtype: torch.dtype) -> list[Tensor]:
    """Return `target_points` of every model."""
    model.eval()
    device, count = split.tokens.device, model.count
    batch = max(1, STACKED_TOKENS // (count * split.tokens[0].numel()))
    found = []
    for first in range(0, len(split), batch):
        index = torch.arange(first, min(first + batch, len(split)), device=device)
        tokens, targets, valid, at = split.rows(index.repeat(count))
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            scores = model(tokens, valid, at)
        found.append(target_values(scores, targets, metric).unflatten(0, (count, -1)))
    model.train()
    return list(torch.cat(found, 1).cpu())


class StackedOrder:
    """Give the batches of several models, (m b) examples a step: those that each has alone, sent to the device many at a time."""

    def __init__(self, orders: Sequence[BatchOrder], device: torch.device) -> None:
        self.orders, self.device = orders, device
        self.first, self.drawn = 0, torch.empty(0)

    def __call__(self, step: int) -> Tensor:
        """Return the numbers of the examples of a step, on the device."""
        if not self.first <= step < self.first + len(self.drawn):
            each = {order.seed: torch.stack([order(step + more) for more in range(DRAWN)]) for order in self.orders}
            self.first = step
            self.drawn = torch.stack([each[order.seed] for order in self.orders], 1).to(self.device)
        return self.drawn[step - self.first]

    def length(self, step: int) -> None:  # noqa: ARG002 - orders are called alike
        """Return no length of its own: batches have that of the task."""
        return
