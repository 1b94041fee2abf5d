"""A decoding step of windows and sinks in one launch: one query of every head over a KV cache, and the write into the cache.

For patterns that are a band, with or without first tokens that all see and that see all: Local(256) | Global(first=4). Positions
and the slot are read on the device, so that a CUDA graph can hold the step. Inference alone: nothing here has a gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.kernel_launch import launch_kernel
from regard.ops.triton_support import SMALLEST_DOT, block_of, kernel_config, triton_cannot_run
from regard.patterns import Columns, Pattern, Rows
from regard.patterns.algebra import Alternative
from regard.patterns.relative import Band

FARTHEST_GAP = 2**62  # no gap is as large: a band without an end
LARGEST_ROOM = 4096  # slots that one program reads; a longer cache is read by many
LARGEST_HEAD = 256


class StepWindow(NamedTuple):
    """What a query sees of the past, in numbers."""

    back: int  # largest gap; -1: no band
    step: int  # gaps are multiples of it
    first: int  # keys below this position are seen by all
    rows: int  # queries below this position see all


class StepCall(NamedTuple):
    """One query of every row and head, and the cache that it reads."""

    q: Tensor  # (b h 1 d)
    k: Tensor  # (b g m d)
    v: Tensor  # (b g m e)
    at: Tensor  # (b m) positions of the keys
    valid: Tensor  # (b m) slots that hold a token
    where: Tensor  # (b 1) positions of the queries
    window: StepWindow
    scale: float
    new_k: Tensor | None = None  # (b g 1 d) to be written into the slot, with the position of the query
    new_v: Tensor | None = None  # (b g 1 e)
    slot: Tensor | None = None  # (1)


@lru_cache(maxsize=256)
def step_window(patterns: tuple[Pattern, ...]) -> StepWindow | None:
    """Return the window that all heads with these patterns share in causal attention; None where there is none."""
    pattern, *others = patterns
    if pattern.depends_on_length or any(other != pattern for other in others):
        return None
    parts = [_window_of(alternative) for alternative in pattern.alternatives()]
    found = [part for part in parts if part is not None]
    bands = [part for part in found if part.back >= 0]
    if len(found) < len(parts) or len(bands) > 1:
        return None
    back, step = (bands[0].back, bands[0].step) if bands else (-1, 1)
    return StepWindow(back, step, max(part.first for part in found), max(part.rows for part in found))


def _window_of(alternative: Alternative) -> StepWindow | None:
    """Return an intersection of bands, or the first rows or columns, as a window."""
    if all(isinstance(atom, Band) for atom in alternative):
        band = Band(None, None)
        for atom in alternative:
            band = band.both(atom)  # type: ignore[arg-type]
        return StepWindow(FARTHEST_GAP if band.back is None else band.back, band.step, 0, 0)
    (atom, *rest) = alternative
    if rest or not isinstance(atom, Rows | Columns) or atom.at or atom.last:
        return None
    return StepWindow(-1, 1, 0, atom.first) if isinstance(atom, Rows) else StepWindow(-1, 1, atom.first, 0)


def step_refuses(call: StepCall) -> str | None:
    """Return a sentence about why the kernel cannot compute a step, or None."""
    tensors = [call.q, call.k, call.v, call.new_k, call.new_v]
    if why := triton_cannot_run(*tensors):
        return why
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return "its kernel has no gradients"
    if call.q.shape[2] != 1:
        return f"its kernel takes one query of every row, not {call.q.shape[2]}"
    if call.k.shape[2] > LARGEST_ROOM:
        return f"its kernel reads caches of up to {LARGEST_ROOM} slots, not {call.k.shape[2]}"
    widest = max(call.k.shape[-1], call.v.shape[-1])
    return f"its kernel takes heads of up to {LARGEST_HEAD} columns, not {widest}" if widest > LARGEST_HEAD else None


def _inner(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def decoding_step(call: StepCall) -> Tensor:
    """Write the new key and value into the cache, if there are any, and return out (b h 1 e) over what the window shows."""
    from regard.ops.decode_step_kernels import window_step_kernel

    q, k, v, at, valid, where, window, scale, new_k, new_v, slot = call
    q, new_k, new_v = _inner(q), _inner(new_k), _inner(new_v)  # type: ignore[assignment]
    (b, h, _, d), (g, room), e = q.shape, k.shape[1:3], v.shape[-1]
    k, v, at, valid = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v, at, valid))
    out = v.new_empty(b, h, 1, e)
    config = dict(kernel_config("window_step", "any", k.device))
    few = b * h <= config.pop("eager")
    tile = min(config.pop("BM"), max(SMALLEST_DOT, 1 << (room - 1).bit_length()))
    strides = [*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], at.stride(0), valid.stride(0), where.stride(0)]
    for x in (new_k, new_v):
        strides += (0, 0) if x is None else x.stride()[:2]
    constants = {
        "H": h,
        "SHARE": h // g,
        "D": d,
        "E": e,
        "BD": block_of(d, k.device),
        "BE": block_of(e, k.device),
        "BM": tile,
        "WRITES": slot is not None,
        "STEPS": window.step > 1,
        "EAGER": few,
        **config,
    }
    tensors = (q, k, v, at, valid, where, new_k, new_v, slot, out)
    launch_kernel(window_step_kernel, (b, h), tensors, (*strides, room, float(scale), *window), constants)
    return out
