"""Longer sequences for Hugging Face models with learned positions: BERT, RoBERTa, GPT-2."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from regard.checks import need
from regard.positions.longer_table import longer_table

POSITION_TABLES = ("position_embeddings", "wpe")  # the names of tables of positions
LENGTH_SETTINGS = ("max_position_embeddings", "n_positions")  # in configurations
ROW_BUFFERS = ("position_ids", "token_type_ids")  # (1 rows), beside such a table


def lengthen_positions(model: PreTrainedModel, max_len: int, how: str = "copied") -> int:
    """Let a model take max_len tokens: its tables of learned positions are copied again and again, or interpolated, in place.

    Returns the number of tables that were made longer: 0 for a model without (rotary positions need none). The configuration
    has the new length, so that a saved model is loaded with it. RoBERTa's first rows, which are no positions, stay.

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
    changed = 0
    for owner in model.modules():
        for name in POSITION_TABLES:
            table = owner._modules.get(name)
            if not isinstance(table, nn.Embedding):
                continue
            special = 0 if table.padding_idx is None else table.padding_idx + 1
            if table.num_embeddings - special >= max_len:
                continue
            _lengthen(owner, table, max_len + special, how, special)
            changed += 1
            for length in LENGTH_SETTINGS:
                if hasattr(model.config, length):
                    setattr(model.config, length, max_len + special)
    return changed


def _lengthen(owner: nn.Module, table: nn.Embedding, rows: int, how: str, special: int) -> None:
    with torch.no_grad():
        weight = longer_table(table.weight, rows, how, special)
    table.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
    table.num_embeddings = rows
    for name in ROW_BUFFERS:
        buffer = owner._buffers.get(name)
        if buffer is not None:
            longer = torch.arange(rows, device=buffer.device)[None] if name == "position_ids" else buffer.new_zeros(1, rows)
            owner._buffers[name] = longer
