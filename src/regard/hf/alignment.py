"""Alignment: the parameters of converted layers learn the outputs of the softmax that they replace, all layers at once."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.checks import need
from regard.hf.conversion import converted_layers, mechanism_parameters, restore
from regard.hf.converted_attention import MechanismCall, observed
from regard.hf.layer_errors import (
    ErrorByLayer,
    LayersToKeep,
    ModelInputs,
    error_by_layer,
    head_squares,
    run_model,
)


class Alignment(NamedTuple):
    """Hold the errors by layer and head before and after an alignment, and which layers it kept."""

    before: ErrorByLayer
    after: ErrorByLayer
    steps: int
    tokens: int
    kept: LayersToKeep | None = None

    def keep(self, share: float | int) -> LayersToKeep:
        """Choose the layers that should stay softmax, a number or a fraction: those with the largest errors after alignment."""
        return self.after.keep(share)

    def __str__(self) -> str:
        lines = [f"{self.steps} steps, {self.tokens:,} tokens", "layer  before   after  worst head"]
        rows = zip(self.after.layers, self.before.by_layer, self.after.by_layer, self.after.errors, strict=True)
        for layer, before, after, heads in rows:
            lines.append(f"{layer:<5} {before:7.3f} {after:7.3f}  {int(heads.argmax())} ({float(heads.max()):.3f})")
        if self.kept is not None:
            lines.append(self.kept.sentence)
        return "\n".join(lines)


def _learn(call: MechanismCall) -> Tensor:
    """Add the gradient of one layer, whose graph ends here, and hand on what its softmax gives."""
    teacher = call.softmax()
    with torch.enable_grad():
        apart, size = head_squares(call.attend(), teacher, call.valid)
        loss = (apart / size).mean()
        if loss.requires_grad:
            loss.backward()
    return teacher


def align(
    model: PreTrainedModel,
    batches: Iterable[ModelInputs],
    *,
    steps: int | None = None,
    lr: float = 3e-2,
    keep: float | int | None = None,
    held_out: int = 1,
    autocast: torch.dtype | None = None,
) -> Alignment:
    """Train the parameters of converted layers, and nothing else, until each gives the outputs of its softmax.

    Every layer gets the inputs that it had before the conversion, so that one pass over a batch trains all of them, each by the
    mean over its heads of ||mechanism - softmax||^2 / ||softmax||^2. The softmax is computed by a fused kernel: no tensor has
    n x n elements. AdamW, `lr` falls to 0 over the steps along a cosine, where their number is given or the batches have one.

    `batches` are tensors of token ids (b n) or dictionaries of a model's arguments; the first `held_out` of them measure the
    errors before and after and are not trained on. keep: this fraction, or number, of the layers, those with the largest errors
    after alignment, get their softmax back. A mechanism without parameters is only measured. Call it before `distil`: it takes
    the projections of the model to be those of the teacher.

    `model` was converted; `autocast` is a type to compute in, such as torch.bfloat16.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import regard.hf
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> names = regard.hf.convert(model, "hedgehog")
    >>> report = regard.hf.align(model, [torch.randint(50, (2, 8)) for _ in range(3)], steps=2)
    >>> len(report.after.errors)
    2
    """
    need("held_out", held_out)
    converted_layers(model)
    parameters = mechanism_parameters(model)
    if steps is None and isinstance(batches, Sized):
        steps = max(len(batches) - held_out, 0)
    source = iter(batches)
    measured = list(islice(source, held_out))
    with _autocast(model, autocast):
        before = error_by_layer(model, measured)
        done = tokens = 0
        if parameters:
            done, tokens = _train_layers(model, parameters, islice(source, steps), lr, steps)
        after = error_by_layer(model, measured) if done else before
    kept = None if keep is None else after.keep(keep)
    if kept is not None and kept.layers:
        restore(model, kept.layers)
    return Alignment(before, after, done, tokens, kept)


def _train_layers(
    model: PreTrainedModel, parameters: list[nn.Parameter], batches: Iterable[ModelInputs], lr: float, steps: int | None
) -> tuple[int, int]:
    """Train the mechanisms of all layers; return the numbers of steps and tokens."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    schedule = None if not steps else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    done = tokens = 0
    training = model.training
    model.eval()
    for batch in batches:
        with observed(_learn), torch.no_grad():
            run_model(model, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
        ids = batch if isinstance(batch, Tensor) else batch["input_ids"]
        done, tokens = done + 1, tokens + ids.numel()
    model.train(training)
    return done, tokens


def _autocast(model: PreTrainedModel, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(model.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
