"""One update: some passes, one gradient, one step of the optimiser."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.config import Config
from regard.data.batch import Batch
from regard.training.atomic_files import RunError
from regard.training.graphed_step import GraphedStep
from regard.training.losses import Loss
from regard.training.lr_schedule import lr_factor
from regard.training.moving_average import TRAINED_WEIGHT, MovingAverage

TYPES = {"32": None, "tf32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
SKIPS = 25  # updates in a row that a scaler may skip while it searches its scale; each halves it


class Update(NamedTuple):
    """Sums of an update, still on the device."""

    total: Tensor
    over: Tensor
    norm: Tensor
    parts: dict[str, Tensor]


class Learner:
    """A model, its optimiser, and how a list of batches becomes one update of it.

    The gradient of an update is that of sum(total) / sum(over) over all its passes, so how it is cut into passes does not matter.
    Autocast is around the forward pass only. Gradients are unscaled and clipped before the step of a fused optimiser. `begin`
    comes before the first update.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Batch, Any], Loss], config: Config, kind: str) -> None:
        self.model = model
        self.loss = loss
        self.config = config
        self.kind = kind
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.step = 0  # updates so far
        self.skipped = 0  # the last so many of them had no finite gradient
        self.pending: list[Update] = []
        self.graphs: GraphedStep | None = None
        self.clock: Tensor | None = None  # the update that is being made, where captured passes can read it
        self.scaler = torch.amp.GradScaler(kind) if config.precision == "16-mixed" else None
        self.ema: MovingAverage | None = None

    def autocast(self) -> AbstractContextManager:
        dtype = TYPES[self.config.precision]
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.kind, dtype=dtype)

    def begin(self) -> None:
        """Move the model to its device, make the optimiser of its parameters there, and switch dropout on."""
        self.model.to(self.device)
        self.optimizer = optimizer(self.model, self.config)
        self.wanted = [p for p in self.model.parameters() if p.requires_grad]
        self.ema = MovingAverage(self.model, self.config.ema) if self.config.ema else None
        self.model.train()

    def evaluated(self) -> AbstractContextManager:
        """Put the weights that are evaluated into the model, for a while: their moving average, if there is one."""
        return nullcontext() if self.ema is None else self.ema.in_model()

    def update(self, passes: list[Batch]) -> None:
        """Make one update from the batches of its passes."""
        if self.config.graphs:
            return self._replayed(passes)
        step, unit, total, over = self.step + 1, None, None, None
        parts: dict[str, Tensor] = {}
        for batch in passes:
            with self.autocast():
                loss = self.loss(self.model, batch.to(self.device), step)
            if unit is None or total is None or over is None:
                unit, total, over = loss.over.clamp_min(1), loss.total.detach(), loss.over
                parts = loss.parts
            else:
                total, over = total + loss.total.detach(), over + loss.over
                parts = {name: x + loss.parts[name] for name, x in parts.items()}
            mean = loss.total / unit  # of this size, so that no half-precision gradient overflows
            scaled = mean if self.scaler is None else self.scaler.scale(mean)
            scaled.backward()
        assert unit is not None and total is not None and over is not None
        scale = None
        if len(passes) > 1:
            scale = unit.to(total.dtype) / over.clamp_min(1)
        norm = self.take(scale)
        self.pending.append(Update(total, over, norm, parts))
        self.step = step

    def _replayed(self, passes: list[Batch]) -> None:
        """Make the same update from passes captured as CUDA graphs."""
        if self.graphs is None:
            self.graphs = GraphedStep(self._forward, self.wanted, float(self.config.batch_tokens))
            self.clock = torch.zeros((), dtype=torch.long, device=self.wanted[0].device)
        assert self.clock is not None
        with self.graphs.on_stream():
            self.clock.fill_(self.step + 1)
            losses = [self.graphs(batch) for batch in passes]
            total, over = sum(x.total for x in losses), sum(x.over for x in losses)
            assert isinstance(total, Tensor) and isinstance(over, Tensor)
            parts = {name: torch.stack([x.parts[name] for x in losses]).sum(0) for name in losses[0].parts}
            count = over.clamp_min(1).to(total.dtype)
            norm = self.take(self.config.batch_tokens / count)
        self.pending.append(Update(total, over, norm, parts))
        self.step += 1

    def _forward(self, batch: Batch) -> Loss:
        with self.autocast():
            return self.loss(self.model, batch, self.clock)

    def take(self, scale: Tensor | None) -> Tensor:
        """Scale the gradients to those of the mean, clip them and take the step. Returns their norm before clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        grads = [p.grad for p in self.wanted if p.grad is not None]
        if scale is not None:
            torch._foreach_mul_(grads, scale)
        norm = nn.utils.get_total_norm(grads)
        if self.config.clip:
            nn.utils.clip_grads_with_norm_(self.wanted, self.config.clip, norm)
        rate = self.rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.graphs is None)
        if self.ema is not None:
            self.ema.update(self.step + 1)
        return norm

    @property
    def rate(self) -> float:
        """Learning rate of the update that is being made."""
        return self.config.lr * lr_factor(self.config, self.step + 1)

    def measured(self, saved: Callable[[], str]) -> dict[str, float]:
        """Compute means over the updates since the last call: one synchronisation. Raises RunError if training has diverged."""
        updates, self.pending = self.pending, []
        columns = zip(*(u[:3] for u in updates), strict=True)
        totals, overs, norms = (torch.stack(xs).tolist() for xs in columns)
        most = SKIPS if self.scaler is not None else 0
        for place, (total, norm) in enumerate(zip(totals, norms, strict=True)):
            good = math.isfinite(total) and math.isfinite(norm)
            self.skipped = 0 if good else self.skipped + 1
            if self.skipped > most:
                step = self.step - len(updates) + place + 1
                raise RunError(self._gone_wrong(step, total, saved()))
        count = max(1, sum(overs))
        finite = [norm for norm in norms if math.isfinite(norm)]
        means: dict[str, float] = {}
        for name in updates[-1].parts:
            values = torch.stack([u.parts[name] for u in updates])
            means[name] = sum(values.tolist()) / count
        return {
            "loss": sum(totals) / count,
            **{name: x for name, x in means.items() if name != "loss"},
            "tokens": sum(overs),
            "lr": self.config.lr * lr_factor(self.config, self.step),
            "norm": statistics.median(finite) if finite else math.nan,
        }

    def unmeasured(self) -> list[dict[str, Any]]:
        """Write the updates that `measured` has not read yet as JSON values."""
        return [
            {"parts": {k: _tensor_json(x) for k, x in u.parts.items()}, "sums": [_tensor_json(x) for x in u[:3]]}
            for u in self.pending
        ]

    def put_unmeasured(self, kept: list[dict[str, Any]]) -> None:
        """Read what `unmeasured` wrote, onto the device of training."""
        for update in kept:
            total, over, norm = (_json_tensor(x, self.device) for x in update["sums"])
            parts = {k: _json_tensor(x, self.device) for k, x in update["parts"].items()}
            self.pending.append(Update(total, over, norm, parts))

    def _gone_wrong(self, step: int, total: float, saved: str) -> str:
        what = f"the loss is {total}" if not math.isfinite(total) else "the gradient is not finite"
        row = f" for the {SKIPS + 1}th time in a row" if self.scaler is not None else ""
        return f"{what} at update {step}{row}: {saved}. Try a lower lr, a longer warmup, or a smaller clip, in another folder"


def _tensor_json(x: Tensor) -> list[Any]:
    """Write a tensor of one number as the number and its type."""
    dtype = str(x.dtype)
    return [x.item(), dtype.removeprefix("torch.")]


def _json_tensor(kept: list[Any], device: torch.device) -> Tensor:
    value, dtype = kept
    return torch.tensor(value, dtype=getattr(torch, dtype), device=device)


def optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101), whose decay spares biases, norms and embeddings.

    Fused: it never waits for a CUDA device, and on a CPU it is four times as fast.
    """
    spared = {id(p) for p in _spared(model)}
    every = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in every if id(p) not in spared], "weight_decay": config.decay},
        {"params": [p for p in every if id(p) in spared], "weight_decay": 0.0},
    ]
    first, second = config.betas
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=config.lr, betas=(first, second), fused=True)


def _spared(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        kind = type(module).__name__.lower()
        whole = isinstance(module, nn.Embedding | nn.EmbeddingBag) or "norm" in kind or "embed" in kind
        for name, p in module.named_parameters(recurse=False):
            if whole or p.ndim < 2 or "bias" in name:
                yield p


def optimizer_state(model: nn.Module, made: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Collect the tensors of an optimiser by parameter and name: "stack.0.weight/exp_avg"."""
    return {f"{name}/{key}": x for name, p in model.named_parameters() for key, x in made.state.get(p, {}).items()}


def put_optimizer_state(model: nn.Module, made: torch.optim.Optimizer, state: Mapping[str, Tensor], where: object) -> None:
    by_id = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, dict[str, Tensor]] = {}
    for key, x in state.items():
        name, _, what = key.rpartition("/")
        if what != TRAINED_WEIGHT:
            found.setdefault(name, {})[what] = x
    if strange := sorted(set(found) - set(by_id.values())):
        raise RunError(f"{where} has {strange[0]!r}, which the model lacks: it is of another model or another version")
    empty = made.state_dict()
    order: Iterable[nn.Parameter] = (p for group in made.param_groups for p in group["params"])
    filled = {}
    for number, p in enumerate(order):
        values = found.get(by_id[id(p)], {})
        if any(x.shape not in (p.shape, ()) for x in values.values()):
            raise RunError(f"{where} has {by_id[id(p)]!r} in another shape than {tuple(p.shape)}, the model's")
        if values:
            filled[number] = values
    made.load_state_dict({"state": filled, "param_groups": empty["param_groups"]})
