"""Longer sequences for Hugging Face models with learned positions: BERT, RoBERTa, GPT-2, OPT, BART."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from regard.checks import need, shown
from regard.positions.longer_table import LENGTHENED, longer_table

POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions")  # the names of tables of positions
LENGTH_SETTINGS = ("max_position_embeddings", "n_positions")  # in configurations
ROW_BUFFERS = ("position_ids", "token_type_ids")  # (1 rows), beside such a table


def lengthen_positions(model: PreTrainedModel, max_len: int, how: str = "copied") -> int:
    """Let a model take max_len tokens: its tables of learned positions are copied again and again, or interpolated, in place.

    Returns the number of tables that were made longer: 0 for a model without (rotary positions need none). The configuration
    has the new length, so that a saved model is loaded with it. The first rows of RoBERTa, OPT and BART, which are no positions,
    stay. Tables that cannot be made longer (sinusoidal ones of Marian, those of Whisper and LED) are refused.

    `model` is one of transformers, `how` is "copied" or "interpolated".

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> import regard.hf
    >>> sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> regard.hf.lengthen_positions(model, 20)
    1
    >>> model.config.n_positions
    20
    """
    need("max_len", max_len)
    check_filling(how)
    short = [found for found in _position_tables(model) if found.length < max_len]
    for found in short:
        _check_learned(model, found)
    for found in short:
        _lengthen(found, max_len + found.special, how)
        for setting in LENGTH_SETTINGS:
            if hasattr(model.config, setting):
                setattr(model.config, setting, found.table.num_embeddings - found.offset)
    return len(short)


def check_filling(how: str) -> None:
    """Refuse an unknown way of filling the new rows of a table."""
    if how not in LENGTHENED:
        raise ValueError(f"longer positions are 'copied' or 'interpolated', not {shown(how)}")


class PositionTable(NamedTuple):
    """A table of positions in the module that owns it."""

    owner: nn.Module
    name: str  # of the table, there
    table: nn.Embedding
    special: int  # first rows, which are no positions
    offset: int  # those of them that the length in the configuration does not count

    @property
    def length(self) -> int:
        """How many positions it has."""
        return self.table.num_embeddings - self.special


def _position_tables(model: PreTrainedModel) -> list[PositionTable]:
    found = []
    for owner in model.modules():
        for name in POSITION_TABLES:
            table = owner._modules.get(name)
            if isinstance(table, nn.Embedding):
                offset = int(getattr(table, "offset", 0))  # OPT and BART have it
                special = offset if table.padding_idx is None else table.padding_idx + 1
                found.append(PositionTable(owner, name, table, special, offset))
    return found


def _check_learned(model: PreTrainedModel, found: PositionTable) -> None:
    """Refuse tables of encoders and decoders that are computed, or whose length the configuration has under another name."""
    if found.name != "embed_positions":
        return
    kind = type(found.table).__name__
    stated = [getattr(model.config, setting, None) for setting in LENGTH_SETTINGS]
    if "Learned" not in kind or found.table.num_embeddings - found.offset not in stated:
        raise ValueError(
            f"{type(model).__name__} has {found.length} positions ({kind}), which cannot be made longer here: "
            "make the model with more of them in its configuration"
        )


def _lengthen(found: PositionTable, rows: int, how: str) -> None:
    owner, table = found.owner, found.table
    with torch.no_grad():
        weight = longer_table(table.weight, rows, how, found.special)
    table.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
    table.num_embeddings = rows
    for name in ROW_BUFFERS:
        buffer = owner._buffers.get(name)
        if buffer is not None:
            longer = torch.arange(rows, device=buffer.device)[None] if name == "position_ids" else buffer.new_zeros(1, rows)
            owner._buffers[name] = longer
