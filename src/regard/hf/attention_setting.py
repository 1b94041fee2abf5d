"""Set the attention of a model of transformers, for all layers or layer by layer, so that it is saved and loaded with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from regard.checks import shown
from regard.hf.spec_names import LayerSpecs, is_registered, register_specs
from regard.spec import Named, Spec

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def set_attention(model: PreTrainedModel, spec: Named | Sequence[Named] | Mapping[int, Named]) -> PreTrainedModel:
    """Let a model attend by a Spec, and return it: `set_attention(model, "Local(512) | Global(first=1)")`.

    A list has a Spec for each layer. A dict {layer: Spec} names some of them, and the others get softmax. Names of transformers
    ("sdpa", "eager") set its own attention again.
    `save_pretrained` writes the mechanisms into config.json, and `from_pretrained` reads them wherever `regard.hf` is imported.
    Without the import it refuses to load them, unless it is given an attn_implementation.

    `model` is one of transformers, `spec` the mechanism.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import regard.hf
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> model = regard.hf.set_attention(model, {1: "Local(4)"})
    >>> tuple(model(torch.randint(50, (1, 10))).logits.shape)
    (1, 10, 50)
    """
    if isinstance(spec, str) and not register_specs(spec):
        _set_named(model, spec)
        _write_name(model, None)
        return model
    specs = _layer_specs(model, spec)
    text = str(specs)
    register_specs(text)
    if not specs.shared:
        _number_layers(model)
    model.set_attn_implementation(text)
    if model.config._attn_implementation != text:
        raise ValueError(f"{type(model).__name__} does not go through the attention interface of transformers: nothing was set")
    _write_name(model, text)
    return model


def _set_named(model: PreTrainedModel, name: str) -> None:
    """Set an attention of transformers; a name that it does not know gets the answer that names of mechanisms get."""
    try:
        model.set_attn_implementation(name)
    except ValueError:
        if not is_registered(name) and "/" not in name:  # with it: a kernel of the hub
            LayerSpecs.parse(name)  # raises
        raise


def _layer_specs(model: PreTrainedModel, spec: Named | Sequence[Named] | Mapping[int, Named]) -> LayerSpecs:
    if isinstance(spec, str):
        specs = LayerSpecs.parse(spec)
    elif isinstance(spec, Mapping) and "name" not in spec:
        specs = LayerSpecs.made(_completed(spec, _layer_count(model)), False)  # type: ignore[arg-type]
    elif isinstance(spec, list | tuple):
        specs = LayerSpecs.made(map(Spec.of, spec), False)
    else:
        specs = LayerSpecs.made([Spec.of(spec)], True)  # type: ignore[arg-type]
    layers = _layer_count(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layers: nothing was set")
    if not specs.shared and len(specs.each) != layers:
        raise ValueError(f"{len(specs.each)} mechanisms for {layers} layers: give one for each, or a dict {{layer: mechanism}}")
    return specs


def _completed(spec: Mapping[int, Named], layers: int) -> tuple[Spec, ...]:
    """Return a Spec for each of the layers: softmax where a dict has none."""
    for layer in spec:
        if not isinstance(layer, int) or not 0 <= layer < layers:
            raise ValueError(f"there is no layer {shown(layer)}: the model has layers 0 to {layers - 1}")
    return tuple(Spec.of(spec.get(layer, "softmax")) for layer in range(layers))


def _attention_layers(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Return the modules that attend, with the number of the layer each is in."""
    found = {}
    for name, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        numbers = _LAYER.findall(name)
        if "Attention" not in type(module).__name__ or (layer is None and not numbers):
            continue
        found[module] = int(numbers[0]) if layer is None else layer
    return found


def _layer_count(model: PreTrainedModel) -> int:
    """Count the layers; of an encoder and a decoder, those of the longer one."""
    return max(_attention_layers(model).values(), default=-1) + 1


def _number_layers(model: PreTrainedModel) -> None:
    """Give modules that attend the number of their layer, where they have none."""
    for module, layer in _attention_layers(model).items():
        if getattr(module, "layer_idx", None) is None:
            module.layer_idx = layer  # type: ignore[assignment]


def _write_name(model: PreTrainedModel, name: str | None) -> None:
    """Write a name into the configurations of a model where those are saved, or take it out of them."""
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        part.config.__dict__.pop("attn_implementation", None)
        if name is not None and part.config._attn_implementation == name:
            part.config.attn_implementation = name
