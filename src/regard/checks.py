"""Checks of arguments. Each raises an error of one sentence: what was wrong, and what is allowed."""

from __future__ import annotations

from reprlib import repr as shortened_repr
from typing import Any

import torch
from torch import Tensor

FARTHEST = 2**31  # the largest position, distance or size in a pattern: products of two of them fit into 64 bits
WIDEST = 2**16  # the largest size of an option that weights are allocated for


def need(name: str, value: Any, least: int = 1, most: int = FARTHEST) -> int:
    """Return the value, if it is an integer from `least` to `most`."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {shown(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Format a value for an error message, with a limited length."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print very long integers
        return f"a number of {value.bit_length():,} bits"
    try:
        return shortened_repr(value)
    except ValueError:  # such an integer inside a list
        return f"this {type(value).__name__}"


def missing_method(owner: object, call: str, returns: str) -> str:
    """Return an error message for a method that a class does not write: the class, the call, and what it must return."""
    return f"{type(owner).__name__} does not define {call}: write it, it must return {returns}"


def check_flag(name: str, value: Any) -> None:
    """Refuse a flag that is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_batch(batch: Any) -> None:
    """Refuse a batch size that is not a non-negative integer."""
    if isinstance(batch, bool) or not isinstance(batch, int | torch.SymInt):
        raise TypeError(f"batch is a number of sequences, an integer, not {type(batch).__name__}")
    if batch < 0:
        raise ValueError(f"batch is a number of sequences, 0 or more, not {batch}")


def check_dense(x: Any, what: str) -> None:
    """Refuse anything but a dense tensor: other types, sparse layouts, nested tensors."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"{what} is a nested tensor: pass a padded one, and valid=... for its real tokens")
    if x.layout != torch.strided:
        raise TypeError(f"{what} has the layout {x.layout}, but a dense tensor is needed: write {what}.to_dense()")


def check_vectors(x: Any, what: str, width: int) -> None:
    """Refuse anything but a dense floating-point tensor of shape (batch, length, width)."""
    check_dense(x, what)
    if x.dim() != 3 or x.shape[-1] != width:
        raise ValueError(f"{what} has shape {tuple(x.shape)}, but (batch, length, {width}) is needed")
    if not x.is_floating_point():
        raise TypeError(f"{what} is {x.dtype}, but tokens are vectors of floating-point numbers")


def check_tokens(x: Any, what: str, width: int, weight: Tensor | None) -> None:
    """Refuse anything but tokens (batch, length, width) on the device and of the type of a layer's weight, if it has one."""
    check_vectors(x, what, width)
    if weight is None:
        return
    if x.device != weight.device:
        raise ValueError(f"{what} is on {x.device} but the layer is on {weight.device}: move one of them with .to()")
    kind = x.device.type if x.device.type != "meta" else "cpu"
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(kind):
        raise TypeError(f"{what} is {x.dtype} but the layer is {weight.dtype}: convert one of them, or use torch.autocast")


def check_valid(valid: Any, b: int, n: int, what: str = "x") -> None:
    """Refuse a padding mask that is neither None nor a bool tensor (b n), True = real token."""
    if valid is None:
        return
    check_dense(valid, "valid")
    if valid.dtype != torch.bool:
        raise TypeError(f"valid must be a bool tensor, True = real token, not {valid.dtype}: write `valid != 0`")
    if valid.shape != (b, n):
        raise ValueError(f"valid has shape {tuple(valid.shape)}, but {what} needs (batch, length) = {(b, n)}")


def check_same_batch(x: Tensor, context: Tensor) -> None:
    """Refuse a context (b m w) of another number of sequences than x (b n w)."""
    if context.shape[0] != x.shape[0]:
        raise ValueError(f"x has {x.shape[0]} sequences but the context {context.shape[0]}: give every sequence its own")


def check_rows(rows: Any) -> None:
    """Refuse anything but a one-dimensional tensor of integers, as an index of rows."""
    check_dense(rows, "rows")
    if rows.dtype not in (torch.long, torch.int) or rows.dim() != 1:
        raise TypeError(f"rows must be a tensor of integers of shape (rows), not {rows.dtype} of shape {tuple(rows.shape)}")


def check_rows_of(rows: Any, batch: int, device: torch.device) -> None:
    """Refuse rows outside of a batch or on another device. The content is checked on a CPU alone: a GPU would synchronise."""
    check_rows(rows)
    if rows.device != device:
        raise ValueError(f"rows are on {rows.device} but the state is on {device}: move one of them with .to()")
    if device.type != "cpu" or torch.compiler.is_compiling() or not rows.numel():
        return
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= batch:
        raise ValueError(f"rows must be from 0 to {batch - 1}, as the state holds {batch} sequences: found {low} to {high}")
