"""Function transforms (torch.func, forward-mode AD), second derivatives and export: when the fast kernels are not used.

The fast kernels write into buffers and read values on the host, which no transform can trace. Where one is active the same
result is computed in plain differentiable operations (`ops/composite.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes


def transformed() -> bool:
    """Return whether a transform of torch.func (grad, vmap, jvp, ...) or forward-mode AD is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def exporting() -> bool:
    """Return whether torch.export traces now. Its strict form goes through torch.compile and counts as that."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def needs_plain_ops() -> bool:
    """Return whether plain operations must be used, which every transform and every exporter can trace."""
    if transformed():
        return True
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def needs_lengths(name: str, valid: Tensor | None) -> None:
    """Refuse a mask whose values the host has to read and cannot: under torch.func.vmap over it, and in torch.export."""
    if valid is None:
        return
    unreadable = torch.compiler.is_exporting() or _batched(valid)
    if unreadable:
        raise NotImplementedError(
            f"{name} depends on the number of real tokens of every row, which vmap over valid and export cannot read: "
            "leave out valid and pass rows of equal length"
        )


def _batched(x: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def may_read_data(x: Tensor) -> bool:
    """Return whether the host can read the values of x now, without synchronisation."""
    if x.device.type != "cpu":
        return False
    return not torch.compiler.is_compiling() and not transformed()


@contextmanager
def untraced() -> Iterator[None]:
    """Suspend every active transform, tracer and inference mode, so that ordinary tensors are made inside."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def differentiable_grads(
    f: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Compute the gradients of f(*inputs), given those of its results, as functions of both: for create_graph=True.

    Every input counts as a variable of its own, also where one was made of another or is the same tensor.
    """
    with torch.enable_grad():
        own = [None if x is None else x.view_as(x) for x in inputs]
        variables = [x for x in own if x is not None and x.requires_grad]
        results = f(*own)
        made = [(y, g) for y, g in zip(results, grads, strict=True) if y.requires_grad]
        if not made:
            return [None] * len(own)
        outputs, upstream = zip(*made, strict=True)
        found = torch.autograd.grad(outputs, variables, upstream, create_graph=True, allow_unused=True)
    each = iter(found)
    wanted = [x is not None and x.requires_grad for x in own]
    return [next(each) if has_grad else None for has_grad in wanted]
