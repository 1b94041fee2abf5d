"""Longer sequences for models of checkpoints with learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regard.checks import need
from regard.positions import Learned
from regard.positions.longer_table import longer_table
from regard.pretrained.checkpoint_files import CheckpointError

LENGTH_KEYS = ("max_position_embeddings", "n_positions")


def lengthened(model: nn.Module, settings: Mapping[str, Any], max_len: int, how: str) -> dict[str, Any]:
    """Make the tables of learned positions of a model max_len long, in place, and return settings that describe it.

    Tables that are as long already stay, and so do models without: rotary and relative positions have no end.
    """
    need("max_len", max_len)
    if "image_size" in settings:
        raise CheckpointError("the positions of an image are those of its patches: max_len is for sequences of tokens")
    more = 0
    for module in model.modules():
        if isinstance(module, Learned) and len(module.vectors) < max_len:
            old = module.vectors
            more = max_len - len(old)
            with torch.no_grad():
                module.vectors = nn.Parameter(longer_table(old, max_len, how), requires_grad=old.requires_grad)
            module.dims = replace(module.dims, max_len=max_len)
    return {key: value + more if key in LENGTH_KEYS else value for key, value in settings.items()}
