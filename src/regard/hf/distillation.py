"""Distillation of converted models: the whole student learns the probabilities of its teacher, and labels if there are any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.checks import need
from regard.hf.layer_errors import ModelInputs, model_inputs, run_model

IGNORED_LABEL = -100


class Distillation(NamedTuple):
    """Hold the losses of every step of a distillation, in nats for each token."""

    losses: list[float]
    steps: int
    tokens: int


def distillation_loss(student: Tensor, teacher: Tensor, real: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """Return the mean of KL(teacher || student) over real tokens, times temperature^2, from logits (b n c); real (b n)."""
    student, teacher = (x.to(torch.promote_types(x.dtype, torch.float32)) / temperature for x in (student, teacher))
    apart = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    apart = apart * temperature**2
    if real is None:
        return apart.mean()
    return (apart * real).sum() / real.sum().clamp_min(1)


def label_loss(logits: Tensor, labels: Tensor, causal: bool) -> Tensor:
    """Return the cross entropy of logits (b n c) for labels (b n), -100 where nothing is scored; causal: of the next token's."""
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL)


def distil(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Iterable[ModelInputs],
    *,
    steps: int | None = None,
    lr: float = 3e-4,
    labels: float = 0.0,
    temperature: float = 1.0,
    warmup: float = 0.1,
    clip: float = 1.0,
    autocast: torch.dtype | None = None,
    train: Callable[[str], bool] | None = None,
    report: Callable[[int, float], None] | None = None,
) -> Distillation:
    """Train a converted model, all of its weights, towards the probabilities that its teacher gives to tokens.

    The teacher is a copy of the model from before: `teacher = copy.deepcopy(model)`, then convert(model, ...). The loss is
    (1 - labels) KL(teacher || student) + labels cross entropy; labels are those of a batch, or its own tokens in a model that
    predicts the next one. AdamW; `lr` rises over the fraction `warmup` of the steps and falls to a tenth along a cosine, where
    their number is given or the batches have one. `train` chooses parameters by name: train=lambda name: "mechanism" in name.
    autocast=torch.bfloat16 computes in half precision with weights as they are. `report(step, loss)` is called after each step.

    `student` was converted, `teacher` was not; `batches` and `steps` are those of `align`; probabilities are divided by
    `temperature` in their logarithms, and gradients clipped to the norm `clip`.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import regard.hf
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> import copy
    >>> teacher = copy.deepcopy(model)
    >>> names = regard.hf.convert(model, "hedgehog")
    >>> result = regard.hf.distil(model, teacher, [torch.randint(50, (2, 8)) for _ in range(2)])
    """
    if not 0 <= labels <= 1:
        raise ValueError(f"labels is the weight of the cross entropy, from 0 to 1, not {labels!r}")
    if steps is None and isinstance(batches, Sized):
        steps = len(batches)
    chosen = [own for name, own in student.named_parameters() if train is None or train(name)]
    if not chosen:
        raise ValueError("train chooses no parameter of the student: it is given their names and returns True for those to train")
    optimizer = torch.optim.AdamW(chosen, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = None if steps is None else _schedule(optimizer, need("steps", steps), warmup)
    teacher.eval()
    training, losses, tokens = student.training, [], 0
    student.train()
    for step, batch in enumerate(islice(batches, steps)):
        with torch.autocast(student.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = _loss(student, teacher, batch, labels, temperature)
        loss.backward()
        nn.utils.clip_grad_norm_(chosen, clip)
        optimizer.step()
        student.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
        losses.append(loss.detach())
        tokens += _ids(batch).numel()
        if report is not None:
            report(step, float(loss.detach()))
    student.train(training)
    return Distillation([float(loss) for loss in losses], len(losses), tokens)


def _loss(student: PreTrainedModel, teacher: PreTrainedModel, batch: ModelInputs, labels: float, temperature: float) -> Tensor:
    with torch.no_grad():
        expected = _logits(teacher, batch)
    found = _logits(student, batch)
    given = model_inputs(student, batch)
    real = given.get("attention_mask")
    loss = found.new_zeros(())
    if labels < 1:
        loss = (1 - labels) * distillation_loss(found, expected, real, temperature)
    if labels:
        loss = loss + labels * label_loss(found, *_labels(student, batch, real))
    return loss


def _labels(student: PreTrainedModel, batch: ModelInputs, real: Tensor | None) -> tuple[Tensor, bool]:
    """Return the labels of a batch (b n), and whether they are those of the next tokens."""
    causal = type(student).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    own = batch.get("labels") if isinstance(batch, Mapping) else None
    if own is None:
        if not causal:
            raise ValueError(f"{type(student).__name__} does not predict the next token: its batches need labels, or labels=0")
        own = _ids(batch)
        if real is not None:
            own = own.to(real.device).masked_fill(real == 0, IGNORED_LABEL)
    return own.to(student.device).long(), causal


def _logits(model: PreTrainedModel, batch: ModelInputs) -> Tensor:
    logits = getattr(run_model(model, batch), "logits", None)
    if logits is None or logits.dim() != 3:
        raise ValueError(f"{type(model).__name__} gives no logits for each token to learn from: take a model with such a head")
    return logits


def _ids(batch: ModelInputs) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch["input_ids"]


def _schedule(optimizer: torch.optim.Optimizer, steps: int, warmup: float) -> torch.optim.lr_scheduler.LRScheduler:
    """Make a learning rate that rises over a fraction of the steps and falls to a tenth along a cosine."""
    rising = max(1, int(warmup * steps))
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / rising, total_iters=rising)
    lr = optimizer.param_groups[0]["lr"]
    second = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - rising), eta_min=lr / 10)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [rising])
