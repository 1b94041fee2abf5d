"""Load checkpoints of Hugging Face's transformers as regard models with the same scores, and write them back.

`load_pretrained(folder)` reads the architectures in `FAMILIES`, `save_pretrained(model, folder)` writes a folder that
transformers reads; `special_ids(folder)` reads the tokens that begin and end an answer:

    model, ids = load_pretrained(folder), special_ids(folder)
    begin = torch.full((len(source), 1), ids.begin)
    constraints = Constraints(eos=ids.end, max_new_tokens=60)
    beam(model, model.start(source, valid), begin, constraints=constraints, width=5, penalty=1.0)

finds the same as `generate(num_beams=5, length_penalty=1.0, early_stopping="never", max_new_tokens=60, do_sample=False)` of
transformers: both divide log-probabilities by (the number of new tokens, the end included) ** penalty, and both stop only where
no better hypothesis can follow. With early_stopping True or False transformers may stop sooner, with a lower score. Tokens that a
generation configuration forces or forbids are not part of the weights: set forced_eos_token_id=None there, or use `Constraints`.
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
from regard.positions import Learned
from regard.pretrained.checkpoint_files import CheckpointError, CheckpointReader, read_settings
from regard.pretrained.checkpoint_length import lengthened
from regard.pretrained.checkpoint_model import Model, build_pretrained, described, remember
from regard.pretrained.checkpoint_writer import save_pretrained
from regard.pretrained.families import FAMILIES
from regard.pretrained.family import TensorNames, source
from regard.spec import Spec

__all__ = [
    "FAMILIES",
    "CheckpointError",
    "SpecialIds",
    "build_pretrained",
    "load_pretrained",
    "save_pretrained",
    "special_ids",
]


def load_pretrained(
    folder: str | PathLike[str],
    *,
    mixer: Named | Sequence[Named] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_len: int | None = None,
    positions: str = "copied",
) -> Model:
    """Load a model, in eval mode, from a folder with config.json and model.safetensors, in one file or in shards.

    Its scores of real tokens are those of transformers. Padding is ignored, and positions count real tokens only, as transformers
    does with padding on the right. `dtype` is that of the checkpoint unless given.

    `mixer` replaces the mechanism of every self-attention, by one or by several in turn, and keeps the projections q, k, v and
    out, and positions that act inside of attention, for further training: `load_pretrained(folder, mixer="linear")`. Other
    parameters of the new mechanism keep their initial values; cross-attention stays. A mechanism without attention weights has
    no dropout of them in training.

    `max_len` lets a model with learned positions take longer sequences than it was trained for: positions="copied" repeats the
    table of the checkpoint again and again, "interpolated" spreads it over the new length. Train it further.

    `folder` has the checkpoint, `device` is where the model is put.

    >>> settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 16}
    >>> settings |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    >>> import tempfile, torch
    >>> from regard.pretrained import build_pretrained, load_pretrained, save_pretrained
    >>> folder, ids = tempfile.mkdtemp(), torch.randint(50, (1, 10))
    >>> model = build_pretrained(settings).eval()
    >>> save_pretrained(model, folder)
    >>> torch.equal(load_pretrained(folder)(ids), model(ids))
    True
    >>> window = load_pretrained(folder, mixer="Local(4)")
    """
    folder = Path(folder)
    settings = read_settings(folder / "config.json")
    found = described(settings)
    with torch.device("meta"):  # shapes alone: no weights are allocated only to be overwritten
        model = found.build()
    checkpoint = CheckpointReader(folder, found.family.aliases)
    _fill(model, checkpoint, found.family.names(found.config), dtype, torch.device(device))
    checkpoint.check_all_taken(found.family.unneeded)
    if max_len is not None:
        settings = lengthened(model, settings, max_len, positions)
    if mixer is not None:
        _replace_mixers(model, mixer, max_len)
    return remember(model.eval(), settings)


class SpecialIds(NamedTuple):
    """Hold ids of special tokens; None where the checkpoint names none.

    `begin` starts a text, `end` ends it, `pad` fills rows.

    >>> from regard.pretrained import SpecialIds
    >>> SpecialIds(begin=1, end=2, pad=None).end
    2
    """

    begin: int | None  # the first token of a decoder
    end: int | None
    pad: int | None


def special_ids(folder: str | PathLike[str]) -> SpecialIds:
    """Read the special tokens of a checkpoint from generation_config.json, or else from config.json.

    `folder` has the checkpoint.

    >>> import pathlib, tempfile
    >>> from regard.pretrained import special_ids
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    >>> special_ids(folder)
    SpecialIds(begin=1, end=2, pad=None)
    """
    folder = Path(folder)
    settings = read_settings(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        settings |= {key: value for key, value in read_settings(generation).items() if value is not None}
    end = settings.get("eos_token_id")
    if isinstance(end, list):
        if len(end) != 1:
            raise CheckpointError(f"{folder} has several tokens that end an answer, {end}: choose one of them yourself")
        end = end[0]
    begin = settings.get("decoder_start_token_id")
    if begin is None:
        begin = settings.get("bos_token_id")
    return SpecialIds(begin, end, settings.get("pad_token_id"))


def _fill(
    model: nn.Module, checkpoint: CheckpointReader, names: TensorNames, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Fill every parameter from its tensor, one at a time; shared parameters stay shared."""
    shapes = dict(model.named_parameters())
    if dtype is None:  # that of the embeddings
        table = next((name for name in shapes if name.endswith("table.weight")), next(iter(shapes)))
        dtype = checkpoint.joined(source(names, table), shapes[table].shape).dtype
    real: dict[nn.Parameter, nn.Parameter] = {}
    for name, shape in shapes.items():
        made_of = source(names, name)
        found = checkpoint.joined(made_of, shape.shape)
        own = torch.empty(shape.shape, dtype=dtype, device=device).copy_(found)
        real[shape] = nn.Parameter(own, requires_grad=not made_of.takes[0].frozen)
    for module in model.modules():
        for name, shape in list(module.named_parameters(recurse=False)):
            setattr(module, name, real[shape])


def _replace_mixers(model: nn.Module, mixer: Named | Sequence[Named], max_len: int | None) -> None:
    """Replace the self-attention of every block by another mechanism with the same projections."""
    named = mixer if isinstance(mixer, Sequence) and not isinstance(mixer, str) else [mixer]
    specs = [Spec.of(one) for one in named]
    length = next((module.dims.max_len for module in model.modules() if isinstance(module, Learned)), max_len)
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        for block, spec in zip(stack, cycle(specs), strict=False):
            block.mixer = _with_projections(block.mixer, spec, replace(block.mixer.dims, max_len=length))


def _with_projections(old: nn.Module, spec: Spec, dims: Dims) -> Attention:
    """Build a mechanism with the projections of another one."""
    if not isinstance(old, Attention):
        raise CheckpointError(f"{old.name} has no projections that {spec} could take over: its weights are those of its blocks")
    like, positions = old.v.weight, old.positions or old.core.positions
    spec = _with_scale(spec, old, dims)
    with like.device:
        made = spec.build(replace(dims, dropout=0.0), positions=positions)
        if dims.dropout and Can.DROPOUT in made.can:
            made = spec.build(dims, positions=positions)
    parts = ("q", "k", "v", "out")
    shapes = [[_weight_shape(getattr(mixer, part, None)) for part in parts] for mixer in (made, old)]
    same = shapes[0] == shapes[1]
    if not isinstance(made, Attention) or not same or made.shared_qk or made.rate > 1:
        raise CheckpointError(
            f"{spec} cannot take over the weights of attention: it has no projections q, k, v and out of the same shapes, or its "
            "output is shorter than its input; softmax, linear, performer or a pattern such as Local(64) can"
        )
    for part in parts:
        setattr(made, part, getattr(old, part))
    return made.to(like.dtype)


def _with_scale(spec: Spec, old: Attention, dims: Dims) -> Spec:
    """Give a mechanism the scale of the scores that a checkpoint was trained with, where that is not 1 / sqrt(d), as in T5."""
    usual, scale = old.dims.d**-0.5, getattr(old.core, "scale", None)
    if scale is None or scale == usual or "scale" in spec.options:
        return spec
    try:
        return Spec(spec.name, **spec.options, scale=scale)
    except ValueError:  # it has no such option
        made = spec.build(replace(dims, dropout=0.0))
    if isinstance(made, Attention) and getattr(made.core, "scale", None) == usual:
        raise CheckpointError(
            f"{spec} divides scores by sqrt({old.dims.d}), and this checkpoint multiplies them by {scale:g}: softmax and "
            "patterns such as Local(64) keep that, and linear has no such scores"
        )
    return spec


def _weight_shape(part: nn.Module | None) -> torch.Size | None:
    return part.weight.shape if isinstance(part, nn.Linear) else None
