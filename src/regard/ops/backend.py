"""The registry of backends: which implementations of an operation there are, and which one a call gets.

An operation (`tile`, `linear`, `delta`, `bucket`, `pair`) has one API function and several backends, one file each. Every
backend has the methods of its operation's protocol, and `refuses(...)`, which returns None or a sentence: why it cannot compute
this call.

    backend="auto"     the first backend, in order of registration, that does not refuse; kernels for GPUs on GPUs alone
    backend="torch"    that one, or an error with its sentence

A call that the kernels of its device refuse is computed by the next backend, with one warning (`SlowBackend`) for each reason.
REGARD_LOG=kernels prints the backend of every call that `auto` decides, once for each backend and operation.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

AUTO = "auto"


_BACKENDS: dict[str, dict[str, Any]] = {}
_logged: set[tuple[str, str]] = set()
_warned: set[tuple[str, str]] = set()


class SlowBackend(UserWarning):
    """A call that the kernels of its device do not take."""


def register_backend(operation: str, backend: Any, *, first: bool = False) -> None:
    """Add a backend to an operation, behind those that are there or in front of them: `auto` tries them in this order."""
    every = _BACKENDS.setdefault(operation, {})
    _BACKENDS[operation] = {backend.name: backend, **every} if first else {**every, backend.name: backend}


def backends(operation: str) -> list[str]:
    """List the names of the backends of an operation, in the order in which `auto` tries them."""
    return list(_BACKENDS[operation])


def check_backend(name: str) -> str:
    """Return a backend's name, or raise: it must be `auto` or registered for some operation."""
    known = dict.fromkeys([AUTO, "reference", "torch", *(name for every in _BACKENDS.values() for name in every)])
    if name not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}, not {name!r}")
    return name


def check_operations(name: str, operations: Sequence[str], backend: str) -> None:
    """Refuse a backend that a mechanism made of these operations does not have; without any, it has one implementation."""
    if backend == AUTO:
        return
    if not operations and backend != "torch":
        raise ValueError(f"{name} has one implementation: leave out backend={backend!r}")
    for operation in operations:
        every = _BACKENDS.get(operation)
        if every is not None and backend not in every:
            raise ValueError(
                f"{name} computes {operation} attention, which has no backend {backend!r}: there is {', '.join(every)}"
            )


def choose_backend(operation: str, name: str, *call: Any) -> Any:
    """Return the backend that computes this call: the one of this name, or the first that does not refuse."""
    every = _BACKENDS[operation]
    if name != AUTO:
        if name not in every:
            raise ValueError(f"{operation} attention has no backend {name!r}: there is {', '.join(every)}")
        if why := every[name].refuses(*call):
            raise ValueError(f"backend {name!r} cannot compute this {operation} attention: {why}")
        return every[name]
    for backend in every.values():
        if not _automatic(backend, call[0]):
            continue
        why = backend.refuses(*call)
        if why is None:
            if "REGARD_LOG" in os.environ:
                log_backend(operation, backend.name)
            return backend
        warn_refused(operation, backend.name, call[0][1], why)
    reasons = "; ".join(f"{backend.name}: {backend.refuses(*call)}" for backend in every.values())
    raise ValueError(f"no backend can compute this {operation} attention: {reasons}")


def _automatic(backend: Any, call: tuple) -> bool:
    """Return whether `auto` considers a backend for tensors on this device; `devices` of a backend, if it has them, are types.

    The second field of every call is a tensor.
    """
    devices = getattr(backend, "devices", None)
    return devices is None or call[1].device.type in devices


def warn_refused(operation: str, name: str, x: torch.Tensor, why: str) -> None:
    """Warn, once for each reason, that a call with a tensor x goes to the next backend; float64 has one backend by design."""
    if torch.compiler.is_compiling() or (operation, why) in _warned or x.dtype == torch.float64:
        return
    _warned.add((operation, why))
    warnings.warn(
        f"{operation} attention is not computed by backend {name!r}, but by a slower one: {why}", SlowBackend, stacklevel=4
    )


def log_backend(operation: str, name: str) -> None:
    """Print the backend of an operation, once, where REGARD_LOG=kernels."""
    if torch.compiler.is_compiling() or (operation, name) in _logged:
        return
    if "kernels" not in os.environ.get("REGARD_LOG", "").split(","):
        return
    _logged.add((operation, name))
    print(f"regard: {operation} attention by backend {name!r}", file=sys.stderr)  # noqa: T201
