"""Masks of torch's attention modules, in the words of mechanisms: which keys are real, and whether a mask is the causal one."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.checks import check_dense


def real_keys(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """Return which keys (b m) are real, from a key_padding_mask: True at padding, or -inf there and 0 elsewhere.

    That a float mask holds nothing else is checked, except while a compiler traces: values cannot be read there.
    """
    if mask is None:
        return None
    _check_mask(mask, "key_padding_mask")
    if mask.shape != (batch, keys):
        raise ValueError(f"key_padding_mask has shape {tuple(mask.shape)}, but (batch, keys) = {(batch, keys)} is needed")
    if mask.dtype == torch.bool:
        return ~mask
    valid = mask == 0
    if not torch.compiler.is_compiling() and not bool((valid | mask.isneginf()).all()):
        raise ValueError("key_padding_mask adds numbers to scores, which only softmax takes: give a bool mask, True at padding")
    return valid


def is_causal_mask(mask: Tensor | None, queries: int, keys: int) -> bool:
    """Return whether an attn_mask hides exactly the later tokens, as `generate_square_subsequent_mask` does.

    Any other mask is refused, and so is one whose values cannot be read because a compiler traces. Waits for a GPU.
    """
    if mask is None:
        return False
    _check_mask(mask, "attn_mask")
    if torch.compiler.is_compiling():
        raise ValueError(
            "the values of attn_mask cannot be read under torch.compile: give is_causal=True if it is the causal one"
        )
    if mask.shape == (queries, keys) and queries == keys:
        hidden = mask if mask.dtype == torch.bool else mask.isneginf()
        later = torch.ones_like(mask, dtype=torch.bool).triu(1)
        if torch.equal(hidden, later) and not bool(mask.masked_fill(later, 0).any()):
            return True
    raise ValueError(
        "only softmax takes any attn_mask, other mechanisms the causal one: leave it out, or write the pairs as a pattern"
    )


def _check_mask(mask: Tensor, what: str) -> None:
    check_dense(mask, what)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{what} must be bool or floating point, as torch has it, not {mask.dtype}")
