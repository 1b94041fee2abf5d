"""The error of converted attention layers against their softmax, by layer and head, and which layers to keep by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard.checks import shown
from regard.hf.attention_layers import attention_layers
from regard.hf.conversion import converted_layers, kept_count
from regard.hf.converted_attention import MECHANISM, MechanismCall, observed

ModelInputs = Tensor | Mapping[str, Any]  # token ids (b n), or the arguments of a model


class LayersToKeep(NamedTuple):
    """Hold a choice of layers that should stay softmax, and its reason."""

    layers: list[int]
    sentence: str


class ErrorByLayer(NamedTuple):
    """Hold relative squared errors of converted layers: ||mechanism - softmax||^2 / ||softmax||^2 of every head's outputs."""

    layers: list[int]
    names: list[str]
    errors: Tensor  # (layers, heads), float64, on the host

    @property
    def by_layer(self) -> list[float]:
        """The mean over the heads of each layer."""
        return self.errors.mean(1).tolist()

    def keep(self, share: float | int) -> LayersToKeep:
        """Choose the layers with the largest errors: a number of them, or a fraction."""
        count = share if isinstance(share, int) and not isinstance(share, bool) else kept_count(len(self.layers), share)
        if not 0 <= count <= len(self.layers):
            raise ValueError(f"{shown(share)} of {len(self.layers)} converted layers cannot be kept")
        means = self.by_layer
        order = sorted(range(len(means)), key=lambda place: -means[place])
        kept = sorted(self.layers[place] for place in order[:count])
        if not kept:
            return LayersToKeep([], f"Convert all {len(self.layers)} layers: the mean error is {sum(means) / len(means):.3f}.")
        rest = [means[place] for place in order[count:]]
        worst = sum(means[place] for place in order[:count]) / count
        listed = f"layer {kept[0]}: its" if count == 1 else f"layers {_listed(kept)}: their"
        others = f", that of the others {sum(rest) / len(rest):.3f}" if rest else ""
        return LayersToKeep(kept, f"Keep softmax in {listed} mean error is {worst:.3f}{others}.")

    def __str__(self) -> str:
        heads = self.errors.shape[1]
        lines = ["layer   mean  " + " ".join(f"head {head:<2}" for head in range(heads))]
        for layer, mean, row in zip(self.layers, self.by_layer, self.errors.tolist(), strict=True):
            lines.append(f"{layer:<6} {mean:6.3f}  " + " ".join(f"{error:7.3f}" for error in row))
        return "\n".join(lines)


def _listed(numbers: list[int]) -> str:
    """Write "1, 4 and 5"."""
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


class HeadErrors:
    """Sum squares of differences and of the teacher's outputs by head, for every converted layer, over passes of a model.

    As an observer it gives each layer its softmax output, so that all layers get the inputs that they had before.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = {
            id(module): (index, name)
            for index, (name, module) in enumerate(attention_layers(model).items())
            if hasattr(module, MECHANISM)
        }
        self.sums: dict[int, Tensor] = {}

    def __call__(self, call: MechanismCall) -> Tensor:
        teacher = call.softmax()
        squares = head_squares(call.attend(), teacher, call.valid).double()
        self.sums[id(call.module)] = squares + self.sums.get(id(call.module), 0)
        return teacher

    def result(self) -> ErrorByLayer:
        """Return the errors of all passes so far."""
        found = [(*place, self.sums[key]) for key, place in self.modules.items()]
        errors = torch.stack([sums[0] / sums[1] for *_, sums in found])
        return ErrorByLayer([index for index, *_ in found], [name for _, name, _ in found], errors.cpu())


def head_squares(student: Tensor, teacher: Tensor, valid: Tensor | None) -> Tensor:
    """Return the squares of student - teacher and of teacher (b n h e), by head (2 h), in float32 or better; valid (b n)."""
    wide = torch.promote_types(teacher.dtype, torch.float32)
    teacher, apart = teacher.to(wide), student.to(wide) - teacher.to(wide)
    if valid is not None:
        teacher, apart = (x.masked_fill(~valid[:, :, None, None], 0) for x in (teacher, apart))
    apart, size = (x.square().sum((0, 1, 3)) for x in (apart, teacher))
    return torch.stack([apart, size.clamp_min(torch.finfo(wide).tiny)])


@torch.no_grad()
def error_by_layer(model: PreTrainedModel, batches: Iterable[ModelInputs]) -> ErrorByLayer:
    """Measure how far every converted layer is from the softmax that it replaces, by head, on the inputs that it had before.

    `batches` are tensors of token ids (b n) or dictionaries of a model's arguments. No tensor has n x n elements.

    `model` was converted.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import regard.hf
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> names = regard.hf.convert(model, "hedgehog")
    >>> found = regard.hf.error_by_layer(model, [torch.randint(50, (2, 8))])
    >>> len(found.errors)
    2
    """
    converted_layers(model)
    errors = HeadErrors(model)
    training = model.training
    model.eval()
    with observed(errors):
        for batch in batches:
            run_model(model, batch)
    model.train(training)
    if not errors.sums:
        raise ValueError("there are no batches: give token ids (b n), or dictionaries of a model's arguments")
    return errors.result()


def model_inputs(model: PreTrainedModel, batch: ModelInputs) -> dict[str, Any]:
    """Return the arguments of a model for token ids or a dictionary, on its device, without labels."""
    given = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    given.pop("labels", None)
    return {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in given.items()}


def run_model(model: PreTrainedModel, batch: ModelInputs) -> Any:
    """Run a model on token ids or a dictionary, without a cache."""
    inputs = model_inputs(model, batch)
    if getattr(model.config, "is_decoder", True) or "use_cache" in inputs:
        inputs.setdefault("use_cache", False)
    return model(**inputs)
