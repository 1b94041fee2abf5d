"""The model that the settings of a checkpoint describe, without weights of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from regard.models.causal_lm import LanguageModel
from regard.models.encoder import Encoder
from regard.models.encoder_head import Reader
from regard.models.translator import Translator
from regard.pretrained.checkpoint_files import CheckpointError
from regard.pretrained.families import FAMILIES, REFUSED
from regard.pretrained.family import Family, HFConfig
from regard.text import unknown

Model = Encoder | Reader | LanguageModel | Translator


class Described(NamedTuple):
    """Hold the architecture of a checkpoint and its settings."""

    name: str
    family: Family
    config: HFConfig

    def build(self) -> nn.Module:
        return self.family.build(self.config)


def described(settings: Mapping[str, Any]) -> Described:
    """Find the architecture that the settings of a config.json name, and check that it can be built."""
    name = str((settings.get("architectures") or ["nothing"])[0])
    for start, sentence in REFUSED.items():
        if name.startswith(start):
            raise CheckpointError(f"regard cannot read {name}: {sentence}")
    if name not in FAMILIES:
        raise CheckpointError(unknown("regard cannot read the architecture", name, FAMILIES))
    family, config = FAMILIES[name], HFConfig(settings)
    for key, allowed in family.only.items():
        config.only(key, allowed)
    return Described(name, family, config)


def build_pretrained(settings: Mapping[str, Any]) -> Model:
    """Build an untrained model of the settings of a config.json: {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, ...}.

    Train it and write it by `save_pretrained(model, folder)`: transformers reads it as a checkpoint of that architecture.

    `settings` are those of config.json.

    >>> settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 16}
    >>> settings |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    >>> from regard.pretrained import build_pretrained
    >>> type(build_pretrained(settings)).__name__
    'LanguageModel'
    """
    found = described(settings)
    model = found.build()
    return remember(model, settings)


def remember(model: nn.Module, settings: Mapping[str, Any]) -> Model:
    """Keep settings with the model that they describe, for `save_pretrained`."""
    model.hf_settings = dict(settings)  # type: ignore[assignment]
    return model  # type: ignore[return-value]
