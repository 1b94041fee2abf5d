"""States of zeros that cost no memory and no kernel: every element is the one zero of a device."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.cache import signature_cache
from regard.transforms import transformed

_zeros: dict[tuple[torch.device, torch.dtype], Tensor] = {}


@signature_cache
def _expanded(key: tuple[torch.device, torch.dtype, tuple[int, ...]]) -> tuple[Tensor]:
    device, dtype, shape = key
    return (_zeros[device, dtype].expand(shape),)


def zero_state(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return zeros on the device of a tensor, not to be written to: kernels see that they are zeros and do not read them."""
    if torch.compiler.is_compiling() or transformed():
        return like.new_zeros(shape, dtype=dtype)
    key = (like.device, dtype)
    if key not in _zeros:
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            return like.new_zeros(shape, dtype=dtype)  # memory of a CUDA graph is not kept
        with torch.inference_mode(False):
            made = torch.zeros((), dtype=dtype, device=like.device)
        if like.is_cuda:
            torch.cuda.synchronize(like.device)  # other streams read it too
        _zeros[key] = made
    return _expanded((*key, shape))[0]


def is_zero_state(x: Tensor) -> bool:
    """Return whether a tensor was made by `zero_state`."""
    if x.dim() == 0 or x.stride(-1) or any(x.stride()):
        return False
    zero = _zeros.get((x.device, x.dtype))
    return zero is not None and zero.data_ptr() == x.data_ptr()
