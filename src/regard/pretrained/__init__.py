"""Weights of others: checkpoints of Hugging Face's transformers as models of ours, with the same scores.

`load(folder)` reads BERT's, GPT-2's, BART's and Marian's; `special(folder)` says which tokens begin and end an answer, so that

    model, tokens = load(folder), special(folder)
    begin = torch.full((len(source), 1), tokens.begin)
    beam(model, model.start(source, valid), begin, constraints=Rules(eos=tokens.end, max_new_tokens=60), width=5, penalty=1.0)

finds what their `generate(num_beams=5, length_penalty=1.0, early_stopping="never", max_new_tokens=60, do_sample=False)` finds:
both divide log-probabilities by (the number of new tokens, the end among them) ** penalty, and with "never" theirs, like ours
always, stops only where nothing better can come; with early_stopping True or False it may stop sooner, and find less. What their
generation settings force or forbid is not in the weights: give forced_eos_token_id=None there, or `Rules` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from regard.blocks.stack import Named, Stack
from regard.mixers.attention import Attention
from regard.mixers.base import Can, Dims
from regard.models.causal_lm import LanguageModel
from regard.models.encoder import Encoder
from regard.models.encoder_head import Reader
from regard.models.translator import Translator
from regard.positions import Learned
from regard.pretrained.checkpoint_files import CheckpointError, CheckpointReader, read_settings
from regard.pretrained.families import FAMILIES
from regard.pretrained.family import HFConfig, TensorNames, source
from regard.spec import Spec
from regard.text import unknown

__all__ = ["FAMILIES", "CheckpointError", "SpecialIds", "load_pretrained", "special_ids"]

Model = Encoder | Reader | LanguageModel | Translator


def load_pretrained(
    folder: str | PathLike[str],
    *,
    mixer: Named | Sequence[Named] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """The model of a folder with config.json and model.safetensors, whole or in shards, ready to be used: eval() is on.

    It scores as theirs does wherever there is a token; padding is as if absent, so positions count real tokens only, which is
    what theirs does with padding behind. `dtype` is that of the checkpoint unless given.

    `mixer` lets another mechanism, or several in turn, look through the q, k, v and out of every layer's self-attention, to go on
    training from there: `load(folder, mixer="linear")`. What is new in it is as it starts; how a decoder reads its encoder stays.
    A mechanism without attention weights drops none of them in training.
    """
    folder = Path(folder)
    said = read_settings(folder / "config.json")
    name = (said.get("architectures") or ["nothing"])[0]
    if name not in FAMILIES:
        raise CheckpointError(unknown("regard cannot read the architecture", str(name), FAMILIES))
    family, told = FAMILIES[name], HFConfig(said)
    for key, allowed in family.only.items():
        told.only(key, allowed)
    with torch.device("meta"):  # shapes alone: no weight is made only to be overwritten
        model = family.build(told)
    checkpoint = CheckpointReader(folder, family.aliases)
    _fill(model, checkpoint, family.names(told), dtype, torch.device(device))
    checkpoint.check_all_taken(family.unneeded)
    if mixer is not None:
        _swap(model, mixer)
    return model.eval()  # type: ignore[return-value]


class SpecialIds(NamedTuple):
    """Tokens with a meaning of their own; None where the checkpoint names none."""

    begin: int | None  # what an answer begins with
    end: int | None
    pad: int | None


def special_ids(folder: str | PathLike[str]) -> SpecialIds:
    """The special tokens of a checkpoint, as generation_config.json says or else config.json."""
    folder = Path(folder)
    said = read_settings(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        said |= {key: value for key, value in read_settings(folder / "generation_config.json").items() if value is not None}
    end = said.get("eos_token_id")
    if isinstance(end, list) and len(end) != 1:
        raise CheckpointError(f"{folder} has several tokens that end an answer, {end}: choose one of them yourself")
    begin = said.get("decoder_start_token_id")
    return SpecialIds(
        said.get("bos_token_id") if begin is None else begin, end[0] if isinstance(end, list) else end, said.get("pad_token_id")
    )


def _fill(
    model: nn.Module, checkpoint: CheckpointReader, names: TensorNames, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Every parameter from its tensor, one at a time; what was shared stays shared."""
    shapes = dict(model.named_parameters())
    if dtype is None:  # the embeddings decide
        table = next(name for name in shapes if name.endswith("table.weight"))
        dtype = checkpoint.take(source(names, table), shapes[table].shape).dtype
    real: dict[nn.Parameter, nn.Parameter] = {}
    for name, shape in shapes.items():
        take = source(names, name)
        found = checkpoint.take(take, shape.shape)
        own = torch.empty(shape.shape, dtype=dtype, device=device).copy_(found)
        real[shape] = nn.Parameter(own, requires_grad=not take.fixed)
    for module in model.modules():
        for name, shape in list(module.named_parameters(recurse=False)):
            setattr(module, name, real[shape])


def _swap(model: nn.Module, mixer: Named | Sequence[Named]) -> None:
    """Another mechanism in every block, behind the projections that are there."""
    named = mixer if isinstance(mixer, Sequence) and not isinstance(mixer, str) else [mixer]
    specs = [Spec.of(one) for one in named]
    length = next(module.dims.max_len for module in model.modules() if isinstance(module, Learned))
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        for block, spec in zip(stack, cycle(specs), strict=False):
            block.mixer = _behind(block.mixer, spec, replace(block.mixer.dims, max_len=length))


def _behind(old: nn.Module, spec: Spec, dims: Dims) -> Attention:
    """The mechanism with the projections of the old one."""
    assert isinstance(old, Attention)
    like = old.v.weight
    with like.device:
        made = spec.build(replace(dims, dropout=0.0))
        if dims.dropout and Can.DROPOUT in made.can:
            made = spec.build(dims)
    parts = ("q", "k", "v", "out")
    same = all(_weight_shape(getattr(made, part, None)) == _weight_shape(getattr(old, part)) for part in parts)
    if not isinstance(made, Attention) or not same or made.shared_qk or made.rate > 1:
        raise CheckpointError(
            f"{spec} cannot take over the weights of attention: it has no maps q, k, v and out of the same shapes, or does not "
            "answer every token; softmax, linear, performer or a pattern such as Local(64) can"
        )
    for part in parts:
        setattr(made, part, getattr(old, part))
    return made.to(like.dtype)


def _weight_shape(part: nn.Module | None) -> torch.Size | None:
    return part.weight.shape if isinstance(part, nn.Linear) else None
