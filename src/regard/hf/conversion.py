"""Conversion of pretrained models: attention layers get a mechanism with parameters of its own, and keep q, k, v and o."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from regard.checks import shown
from regard.hf.attention_layers import ChosenLayers, attention_layers, choose_layers, layer_dims
from regard.hf.converted_attention import MECHANISM, RECORD
from regard.hf.converted_core import ConvertedCore, check_attends
from regard.hf.longer_positions import check_filling, lengthen_positions
from regard.hf.spec_names import IMPLEMENTATION, SAVED, registered_specs
from regard.mixers.base import Can
from regard.spec import Named, Spec

Kept = float | ChosenLayers


def convert(
    model: PreTrainedModel,
    spec: Named,
    *,
    layers: ChosenLayers | None = None,
    keep: Kept | None = None,
    max_len: int | None = None,
    positions: str = "copied",
    backend: str = "auto",
) -> list[str]:
    """Replace the attention of layers by a mechanism, in place, and return their names. Projections q, k, v and o stay.

    `spec` is any mechanism of queries, keys and values: "hedgehog", "gla", "hybrid(pattern=Local(64), far='hedgehog')",
    "performer", a pattern. Gates are linear maps of a token's values. `layers` chooses layers by number, slice ("2::4") or name,
    all of them unless given; `keep` leaves some as they are: a fraction of the chosen ones, spread evenly, or numbers and names,
    such as those that `align` recommends. Layers that were converted before get the new mechanism. Layers that are not chosen
    attend by softmax, so a model that `set_attention` gave another mechanism is refused.
    `max_len` is the longest sequence: tables of learned positions are made longer, "copied" or "interpolated".

    Parameters of the mechanism are `mechanism` in each attention module, float32, and are saved and loaded with the model:
    `save_pretrained(folder)`, then `load_converted(folder)`; `from_pretrained` refuses the folder. Train them with `align`, then
    the whole with `distil`.

    `model` is one of transformers; `positions` is how its table is made longer, `backend` that of `layer`.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import regard.hf
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> len(regard.hf.convert(model, "hedgehog", keep=0.5))  # one of two layers
    1
    """
    spec = Spec.of(spec)
    check_attends(spec)
    check_filling(positions)
    _check_softmax(model)
    named = attention_layers(model)
    chosen = choose_layers(list(named), layers)
    kept = _kept_layers(list(named), chosen, keep)
    wanted = [index for index in chosen if index not in kept]
    if not wanted:
        raise ValueError(f"keep={shown(keep)} keeps all layers that layers={shown(layers)} chooses: there is nothing to convert")
    made = {index: _mechanism(model, index, spec, max_len, backend) for index in wanted}
    if max_len is not None:
        lengthen_positions(model, max_len, positions)
    names = list(named)
    for index, mechanism in made.items():
        setattr(named[names[index]], MECHANISM, mechanism)
    _record(model, max_len)
    model.set_attn_implementation(IMPLEMENTATION)
    return [names[index] for index in wanted]


def restore(model: PreTrainedModel, layers: ChosenLayers | None = None) -> list[str]:
    """Give layers their softmax back, in place, and return their names: those that `align` recommends to keep, or all.

    `model` was converted, `layers` are numbers or names.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import regard.hf
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> converted = regard.hf.convert(model, "gla")
    >>> regard.hf.restore(model) == converted
    True
    """
    named = attention_layers(model)
    names = list(named)
    chosen = [names[index] for index in choose_layers(names, layers)]
    restored = [name for name in chosen if hasattr(named[name], MECHANISM)]
    for name in restored:
        delattr(named[name], MECHANISM)
    _record(model, _converted(model).get("max_len"))
    return restored


def load_converted(folder: str | PathLike[str], *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a converted model from the folder that its `save_pretrained` wrote, in eval mode; the class is that of its config.

    Settings of `generate` are those that were saved with it.

    `folder` is where it was saved, `dtype` that of the checkpoint unless given.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import regard.hf
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> import tempfile
    >>> names, folder = regard.hf.convert(model, "hedgehog"), tempfile.mkdtemp()
    >>> model.save_pretrained(folder)
    >>> ids = torch.randint(50, (1, 10))
    >>> torch.allclose(regard.hf.load_converted(folder)(ids).logits, model(ids).logits, atol=1e-5)
    True
    """
    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder)
    record = getattr(config, RECORD, None)
    if not isinstance(record, dict) or "layers" not in record:
        raise ValueError(f"{folder} holds no model that regard.hf.convert has converted: load it with transformers")
    config._attn_implementation = None  # that of a converted model is refused
    weights = _read_weights(folder)
    own = {name: weights.pop(name) for name in list(weights) if f".{MECHANISM}." in name}
    make = getattr(transformers, config.architectures[0])
    model = make.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    for index, text in record["layers"].items():
        convert(model, text, layers=int(index), max_len=record.get("max_len"))
    lacking = model.load_state_dict(own, strict=False)
    missing = [name for name in lacking.missing_keys if f".{MECHANISM}." in name]
    if missing or lacking.unexpected_keys:
        raise ValueError(f"{folder} does not have the weights of its mechanisms: {shown([*missing, *lacking.unexpected_keys])}")
    if (folder / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def converted_layers(model: PreTrainedModel) -> dict[str, ConvertedCore]:
    """Return the mechanisms of a converted model by the names of their layers."""
    found = {name: getattr(module, MECHANISM, None) for name, module in attention_layers(model).items()}
    made = {name: one for name, one in found.items() if one is not None}
    if not made:
        raise ValueError(f"this {type(model).__name__} has no converted layer: begin with regard.hf.convert")
    return made


def _check_softmax(model: PreTrainedModel) -> None:
    """Refuse a model that attends by a Spec other than softmax: layers that are not converted would lose it."""
    name = model.config._attn_implementation
    specs = registered_specs(name)
    if specs is not None and any(text != "softmax" for text in specs.each):
        raise ValueError(
            f"the model attends by {name!r}, and convert takes models with softmax alone: call "
            "regard.hf.set_attention(model, 'sdpa') first, and convert layers to a pattern where they are to have one"
        )


def _mechanism(model: PreTrainedModel, index: int, spec: Spec, max_len: int | None, backend: str) -> ConvertedCore:
    """Build the mechanism of a layer, on its device."""
    module: Any = list(attention_layers(model).values())[index]
    config = model.config
    rates = [getattr(config, name, None) for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")]
    dropout = next((rate for rate in rates if rate is not None), 0.0)
    dims = layer_dims(model, module, max_len, 0.0, backend)
    if spec.needs_length(dims):
        dims = layer_dims(model, module, max_len or config.max_position_embeddings, 0.0, backend)
    with next(module.parameters()).device:
        made = ConvertedCore(spec, dims, module.scaling)
        if dropout and Can.DROPOUT in made.can:
            sized = layer_dims(model, module, dims.max_len, dropout, backend)
            made = ConvertedCore(spec, sized, module.scaling)
    return made.train(module.training)


def _kept_layers(names: list[str], chosen: list[int], keep: Kept | None) -> list[int]:
    if keep is None:
        return []
    if isinstance(keep, float):
        if not 0 <= keep < 1:
            raise ValueError(f"keep must be a fraction from 0 to below 1, or layers, not {keep}")
        count = kept_count(len(chosen), keep)
        return [chosen[(2 * i + 1) * len(chosen) // (2 * count)] for i in range(count)]
    return choose_layers(names, keep, "keep")


def kept_count(layers: int, share: float) -> int:
    """Return the number of layers that a fraction of them is: rounded, half of one up."""
    return int(layers * share + 0.5)


def _converted(model: PreTrainedModel) -> dict[str, Any]:
    return getattr(model.config, RECORD, None) or {}


def _record(model: PreTrainedModel, max_len: int | None) -> None:
    """Write what was converted into the configuration, which is saved with the model."""
    mechanisms = [getattr(module, MECHANISM, None) for module in attention_layers(model).values()]
    layers = {str(index): one.spec for index, one in enumerate(mechanisms) if one is not None}
    setattr(model.config, RECORD, {"layers": layers, "max_len": max_len})
    if layers:
        model.config.attn_implementation = SAVED  # from_pretrained reads it, and refuses
    elif getattr(model.config, "attn_implementation", None) == SAVED:
        del model.config.attn_implementation


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no weights, a file model.safetensors")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= load_file(file)
    return weights


def mechanism_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the mechanisms of a converted model, and no others."""
    return [own for name, own in model.named_parameters() if f".{MECHANISM}." in name]
