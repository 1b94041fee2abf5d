"""Write a model as a checkpoint folder that transformers reads, by the tables that checkpoints are read with."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.mixers.base import Mixer
from regard.pretrained.checkpoint_files import SINGLE_FILE, CheckpointError, TensorLayout, split
from regard.pretrained.checkpoint_model import Described, described
from regard.pretrained.family import source
from regard.training import atomic_files


def save_pretrained(model: nn.Module, folder: str | PathLike[str], settings: Mapping[str, Any] | None = None) -> None:
    """Write config.json and model.safetensors into a folder, so that `from_pretrained` of transformers loads an equal model.

    `settings` are those of a config.json, with "architectures"; unless given, those that the model was loaded or built with. A
    model that they do not describe is refused: one with another mechanism, another size, or a norm of another kind. Tokenizers
    and generation_config.json are no part of a model: copy them.

    `model` is one that was loaded or built by this package, `folder` is made if it is not there.

    >>> settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 16}
    >>> settings |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    >>> import tempfile, pathlib
    >>> from regard.pretrained import build_pretrained, save_pretrained
    >>> folder = tempfile.mkdtemp()
    >>> save_pretrained(build_pretrained(settings), folder)
    >>> sorted(path.name for path in pathlib.Path(folder).iterdir())
    ['config.json', 'model.safetensors']
    """
    if settings is None:
        settings = getattr(model, "hf_settings", None)
    if settings is None:
        raise CheckpointError(
            "this model was not read from a checkpoint: give the settings of its config.json, "
            'such as {"architectures": ["LlamaForCausalLM"], "hidden_size": 512, ...}'
        )
    found = described(settings)
    _check_described(model, found)
    tensors = checkpoint_tensors(model, found)
    types = {str(x.dtype).removeprefix("torch.") for x in tensors.values()}
    if len(types) > 1:
        raise CheckpointError(
            f"the weights of the model have several types, {', '.join(sorted(types))}: model.to(...) one of them"
        )
    written = {key: value for key, value in settings.items() if key != "torch_dtype"}
    written |= {"architectures": [found.family.saved_as or found.name], "dtype": types.pop()}
    _write(Path(folder), tensors, written)


def checkpoint_tensors(model: nn.Module, found: Described) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, by the names and in the layout of transformers."""
    names = found.family.names(found.config)
    parts: dict[str, dict[int, tuple[TensorLayout, Tensor]]] = defaultdict(dict)
    for name, weight in model.named_parameters():
        made_of = source(names, name)
        pieces = split(weight.detach(), len(made_of.takes), made_of.heads)
        for take, piece in zip(made_of.takes, pieces, strict=True):
            if take.written:
                parts[take.names[0]][take.layout.part] = take.layout, piece
            elif take.default is None or not torch.equal(piece, take.default(piece.shape).to(piece)):
                raise CheckpointError(f"{name} has other values than transformers computes, and a checkpoint does not hold them")
    tensors = {}
    for name, shared in parts.items():
        layout = shared[0][0]
        whole = layout.write([shared[part][1] for part in range(layout.parts)])
        tensors[found.family.written(name)] = whole.clone(memory_format=torch.contiguous_format)
    return tensors


def _check_described(model: nn.Module, found: Described) -> None:
    """Refuse a model that is not the one that its settings describe."""
    with torch.device("meta"):
        described_model = found.build()
    for kind, ours, theirs in zip(("parameter", "part"), _shape(model), _shape(described_model), strict=True):
        for own, other in zip([*ours, "nothing"], [*theirs, "nothing"], strict=False):
            if own != other:
                raise CheckpointError(
                    f"the settings of {found.name} describe another model: this one has the {kind} {own} where they have {other}"
                )


def _shape(model: nn.Module) -> tuple[list[str], list[str]]:
    """Describe the parameters of a model by name and size, and its parts by kind and options; dropout may differ."""
    parameters = [f"{name} {tuple(weight.shape)}" for name, weight in model.named_parameters()]
    parts = []
    for name, module in model.named_modules():
        options = "" if isinstance(module, nn.Dropout) else re.sub(r",? ?p=[\d.e-]+", "", module.extra_repr())
        kind = module.spec if isinstance(module, Mixer) and module.spec else type(module).__name__
        parts.append(f"{name or 'model'} {kind}({options})")
    return parameters, parts


def _write(folder: Path, tensors: dict[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Write both files, each whole or not at all."""
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        raise ModuleNotFoundError("checkpoints need safetensors: pip install safetensors") from None
    part = folder / f".writing-{SINGLE_FILE}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, part, metadata={"format": "pt"})
        part.replace(folder / SINGLE_FILE)
        atomic_files.replace(folder / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise CheckpointError(atomic_files.cannot_write(folder, error)) from error
    finally:
        with suppress(OSError):  # it was moved, or never made
            part.unlink()
