"""What all Triton backends share: whether kernels can run on a tensor, and the tuned tile sizes of a card.

Triton is optional, and importing it takes time: a module of kernels (`triton_kernels.py` beside a backend) is imported by the
first call. TRITON_INTERPRET=1, set before that, runs kernels on a CPU in Triton's interpreter: slow, for tests.
REGARD_TUNED=FILE, set before that, reads configurations of kernels from a file too: see `regard.ops.tuned_table`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from regard.cache import forget_signatures
from regard.ops.tuned_table import KernelConfig, TunedTable, current_table, find_config
from regard.transforms import needs_plain_ops

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32)
INSTALLED = find_spec("triton") is not None  # not a cached function: torch.compile cannot trace those
WIDEST_HEAD = 256  # columns of a head that kernels of softmax attention take
FURTHEST = 1 << 31  # elements of one sequence that 32-bit offsets of kernels reach
SMALLEST_DOT = 16  # elements of every dimension of a product in Triton


def has_triton() -> bool:
    """Return whether the package triton is installed."""
    return INSTALLED


def interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_card(x: Tensor) -> bool:
    """Return whether kernels come into question for a tensor: on CUDA devices, where nothing traces the call."""
    return x.is_cuda and not torch.compiler.is_compiling() and not needs_plain_ops()


def compiled_on_card(x: Tensor) -> bool:
    """Return whether operators of kernels come into question for a tensor: on CUDA devices, while torch.compile traces."""
    return x.is_cuda and torch.compiler.is_compiling() and not needs_plain_ops()


def triton_cannot_run(*tensors: Tensor | None) -> str | None:
    """Return a sentence about why no Triton kernel can take these tensors, or None."""
    for x in tensors:
        if x is None or (x.is_cuda and x.dtype in DTYPES and INSTALLED):
            continue
        if not x.is_cuda and not interpreting():
            return f"its kernels run on CUDA devices, not on {x.device.type} (TRITON_INTERPRET=1 runs them in an interpreter)"
        if x.dtype not in DTYPES:
            return f"its kernels take float16, bfloat16 and float32, not {str(x.dtype).removeprefix('torch.')}"
    return None if has_triton() else "the package triton is not installed"


def block_of(size: int, device: torch.device) -> int:
    """Return the power of two that a dimension is padded to inside of a kernel: at least 64 on a GPU.

    Triton 3.6 computes wrong products of narrower operands on Hopper cards for some tile sizes.
    """
    smallest = 64 if device.type == "cuda" else SMALLEST_DOT
    return max(smallest, 1 << (size - 1).bit_length())


def dot_precision(dtype: torch.dtype) -> str:
    """Return Triton's name for how products of a type are computed: as precise as PyTorch's float32 matmul precision is set.

    Three products of TensorFloat32 parts are as precise as float32; Triton takes minutes to compile its "ieee" products.
    """
    if dtype != torch.float32:
        return "tf32"  # no effect on half precision
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@lru_cache(maxsize=1)
def _tuned() -> TunedTable:
    return current_table()


@lru_cache(maxsize=256)
def _config(card: str, kernel: str, key: str) -> KernelConfig:
    return find_config(_tuned(), card, kernel, key)


@lru_cache(maxsize=16)
def card_name(device: torch.device) -> str:
    """Return the name of a device in tables of configurations."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def read_tables_again() -> None:
    """Forget the configurations in use: the next kernel reads the tables from their files."""
    _tuned.cache_clear()
    _config.cache_clear()
    forget_signatures()


class ConfigTrial:
    """Hold configurations that replace those of the table for a while, and all that were used, by kernel and key."""

    def __init__(self, changes: Mapping[tuple[str, str], KernelConfig]) -> None:
        self.changes = changes
        self.used: dict[tuple[str, str], KernelConfig] = {}

    def take(self, kernel: str, key: str, tuned: KernelConfig) -> KernelConfig:
        found = self.changes.get((kernel, key), tuned)
        self.used[kernel, key] = found
        return found


_trials: list[ConfigTrial] = []  # the last one counts, in all threads: autograd has threads of its own


@contextmanager
def trial_configs(changes: Mapping[tuple[str, str], KernelConfig]) -> Iterator[ConfigTrial]:
    """Use other configurations inside, by kernel and key; yields a record of all that kernels used."""
    trial = ConfigTrial(changes)
    _trials.append(trial)
    forget_signatures()
    try:
        yield trial
    finally:
        _trials.remove(trial)
        forget_signatures()


def kernel_config(kernel: str, key: str, device: torch.device) -> dict[str, Any]:
    """Return the tile sizes, `num_warps` and `num_stages` of a kernel: the card's, or the default of cards not listed.

    key: what the best sizes depend on, as text, such as "half 64" for a type and a head size; "any" serves all others.
    """
    found = _config(card_name(device), kernel, key)
    return _trials[-1].take(kernel, key, found) if _trials else found
