"""The self-attention layers of a Hugging Face model: how they are found and named, their sizes, and a choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from regard.checks import shown
from regard.mixers.base import Dims

ChosenLayers = str | int | Sequence[int | str]


def attention_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the self-attention modules of a decoder or an encoder by name, in the order of its layers."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} has an encoder and a decoder: only models with one of them are converted")
    found = {name: module for name, module in model.named_modules() if _is_attention(module)}
    numbers = [module.layer_idx for module in found.values()]
    if not found or numbers != list(range(len(found))):
        raise ValueError(
            f"{type(model).__name__} has no attention layers that go through the attention interface of transformers, "
            "one for each block: Llama, Mistral, Qwen2, GPT-2, GPT-NeoX, BERT and RoBERTa have"
        )
    return found


def _is_attention(module: nn.Module) -> bool:
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        return False
    return all(hasattr(module, name) for name in ("layer_idx", "is_causal", "scaling"))


def layer_dims(model: PreTrainedModel, module: Any, max_len: int | None, dropout: float, backend: str) -> Dims:
    """Return the sizes of an attention module."""
    config = model.config
    heads = config.num_attention_heads
    sizes = [getattr(module, name, None) for name in ("head_dim", "head_size", "attention_head_size")]
    d = next((size for size in sizes if size), config.hidden_size // heads)
    return Dims(
        config.hidden_size,
        heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        key_dim=d,
        value_dim=d,
        causal=bool(module.is_causal),
        max_len=max_len,
        dropout=dropout,
        backend=backend,
    )


def choose_layers(names: Sequence[str], chosen: ChosenLayers | None, what: str = "layers") -> list[int]:
    """Return the indices of layers: all for None, a number, a slice as a text ("2::4"), a pattern of names, or a list."""
    if chosen is None:
        return list(range(len(names)))
    parts = [chosen] if isinstance(chosen, str | int) else chosen
    found: set[int] = set()
    for part in parts:
        found.update(_matching(names, part, what))
    return sorted(found)


def _matching(names: Sequence[str], part: int | str, what: str) -> list[int]:
    count = len(names)
    if isinstance(part, int) and not isinstance(part, bool) and -count <= part < count:
        return [part % count]
    if isinstance(part, str):
        numbers = part.split(":")
        if len(numbers) > 1 and all(number.lstrip("-").isdigit() or not number for number in numbers) and len(numbers) <= 3:
            return list(range(count))[slice(*(int(number) if number else None for number in numbers))]
        matching = [index for index, name in enumerate(names) if name == part or fnmatchcase(name, part)]
        if matching:
            return matching
    raise ValueError(f"{what} has {shown(part)}, which is none of the {count} attention layers: {names[0]} to {names[-1]}")
