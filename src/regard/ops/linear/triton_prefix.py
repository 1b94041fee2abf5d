"""Decayed prefix sums in Triton, in both directions: sums of segments, a scan over them, and all sums of a segment.

    forwards    y_i = keep_i y_{i-1} + x_i,      y_{-1} = first
    backwards   y_i = keep_{i+1} y_{i+1} + x_i,  y_n = first and keep_n = 1

The gradient of one direction is a sum in the other, so that every derivative is computed by the same kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.kernel_launch import launch_kernel
from regard.ops.linear.triton_kernels import linear_scan
from regard.ops.triton_support import block_of, kernel_config


@triton.jit
def _compose(keep_a, a, keep_b, b):
    """Compose two maps y -> keep y + x."""
    return keep_a * keep_b, b + keep_b * a


@triton.jit
def _chunk(X, LD, low, sxn, sln, d, n, f: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr):
    """Load x, log decays and token indices of the steps low ... low + C - 1 of a sum in one direction."""
    step = low + tl.arange(0, C)
    i = step
    j = step
    if REVERSE:
        i = n - 1 - step
        j = i + 1
    mask = (step[:, None] < n) & (d[None, :] < f)
    x = tl.load(X + i[:, None] * sxn + d[None, :], mask=mask, other=0.0).to(tl.float32)
    log = tl.zeros_like(x)
    if DECAY > 0:
        column = d if DECAY == 2 else tl.zeros_like(d)
        log = tl.load(LD + j[:, None] * sln + column[None, :], mask=mask & (j[:, None] < n), other=0.0).to(tl.float32)
    return x, log, i, mask


@triton.jit(do_not_specialize=["n", "segs", "SEG"])
def prefix_segments(
    X, LD, S, A, sxb, sxh, sxn, slb, slh, sln, n, segs, SEG, G, PARTS,
    f: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Sum x over each segment, each token with the decay of those behind it; A: the log decay of all its tokens."""
    pid = tl.program_id(0)
    part, seg, bg = pid % PARTS, (pid // PARTS) % segs, (pid // PARTS // segs).to(tl.int64)
    X += (bg // G) * sxb + (bg % G) * sxh
    LD += (bg // G) * slb + (bg % G) * slh
    d = part * BF + tl.arange(0, BF)
    total = tl.zeros([BF], tl.float32)
    decay = tl.zeros([BF], tl.float32)
    end = tl.minimum(seg * SEG + SEG, n)
    for low in range(seg * SEG, end, C):
        x, log, _i, _mask = _chunk(X, LD, low, sxn, sln, d, n, f, C, DECAY, REVERSE)
        chunk = tl.sum(log, 0)
        if DECAY > 0:
            x = x * tl.exp(tl.minimum(chunk[None, :] - tl.cumsum(log, 0), 0.0))
        total = total * tl.exp(chunk) + tl.sum(x, 0)
        decay += chunk
    at = (bg * (segs + 1) + seg) * f + d
    tl.store(S + at, total, mask=d < f)
    tl.store(A + at, decay, mask=d < f)


@triton.jit(do_not_specialize=["n", "segs", "SEG"])
def prefix_outputs(
    X, LD, S, OUT, sxb, sxh, sxn, slb, slh, sln, n, segs, SEG, G, PARTS,
    f: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute OUT (b n g f), all sums of a segment, from the one before it."""
    pid = tl.program_id(0)
    part, seg, bg = pid % PARTS, (pid // PARTS) % segs, (pid // PARTS // segs).to(tl.int64)
    X += (bg // G) * sxb + (bg % G) * sxh
    LD += (bg // G) * slb + (bg % G) * slh
    OUT += ((bg // G) * n * G + bg % G) * f
    d = part * BF + tl.arange(0, BF)
    r = tl.arange(0, C)
    carry = tl.load(S + (bg * (segs + 1) + seg) * f + d, mask=d < f, other=0.0)
    end = tl.minimum(seg * SEG + SEG, n)
    for low in range(seg * SEG, end, C):
        x, log, i, mask = _chunk(X, LD, low, sxn, sln, d, n, f, C, DECAY, REVERSE)
        if DECAY > 0:
            keep, y = tl.associative_scan((tl.exp(log), x), 0, _compose)
            y = y + keep * carry[None, :]
        else:
            y = tl.cumsum(x, 0) + carry[None, :]
        tl.store(OUT + i[:, None] * (G * f) + d[None, :], y.to(OUT.dtype.element_ty), mask=mask)
        carry = tl.sum(tl.where(r[:, None] == C - 1, y, 0.0), 0)


def _launch(x: Tensor, first: Tensor, log_decay: Tensor | None, reverse: bool) -> Tensor:
    b, g, n, f = x.shape
    config = dict(kernel_config("linear_prefix", "any", x.device))
    size, chunk = config.pop("tokens"), config.pop("chunk")
    segs = -(-n // size)
    x = x if x.stride(-1) == 1 else x.contiguous()
    decay, log = 0, x
    if log_decay is not None:
        decay = 1 if log_decay.shape[-1] == 1 and f > 1 else 2
        log = log_decay if log_decay.stride(-1) == 1 or decay == 1 else log_decay.contiguous()
    first = first.float().contiguous()
    sums, decays = (torch.empty(b, g, segs + 1, f, device=x.device) for _ in range(2))
    out = torch.empty(b, n, g, f, dtype=x.dtype, device=x.device).transpose(1, 2)
    width = min(block_of(f, x.device), 64)
    parts = -(-f // width)
    grid = (parts * segs * b * g,)
    shared = {"f": f, "BF": width, "C": chunk, "DECAY": decay, "REVERSE": reverse, **config}
    numbers = (*x.stride()[:3], *log.stride()[:3], n, segs, size, g, parts)
    launch_kernel(prefix_segments, grid, (x, log, sums, decays), numbers, shared)
    last = torch.empty_like(first)
    tiles = dict(kernel_config("linear_scan", "any", x.device))
    before = torch.empty_like(sums)
    tensors = (sums, sums, before, sums, decays, first, first, last, last, sums, sums, sums)
    constants = {
        "f": f, "e": 1, "BE": 16, "SB": tiles.pop("segments"), "DECAY": decay, "NORM": False, "REVERSE": False, "HAS_OWN": True,
        "HAS_FIRST": True, "WITH_STATES": True, "WITH_DOT": False, **tiles,
    }  # fmt: skip
    launch_kernel(linear_scan, (b * g * f,), tensors, (segs, 1), constants)
    launch_kernel(prefix_outputs, grid, (x, log, before, out), numbers, shared)
    return out


class PrefixFunction(torch.autograd.Function):
    """The sums for autograd, in one direction. Arguments: x (b g n f), first (b g f), log_decay, whether backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, log_decay: Tensor | None, reverse: bool) -> Tensor:
        y = _launch(x, first, log_decay, reverse)
        ctx.save_for_backward(first, log_decay, y)
        ctx.reverse = reverse
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        first, log_decay, y = ctx.saved_tensors
        zero = torch.zeros_like(first)
        dx = PrefixFunction.apply(dy, zero, log_decay, not ctx.reverse)
        if ctx.reverse:
            d_first, d_decay = dx[:, :, -1], None
        else:
            d_first = dx[:, :, 0] if log_decay is None else dx[:, :, 0] * log_decay[:, :, 0].exp()
            d_decay = None
        if log_decay is not None and ctx.needs_input_grad[2]:
            if ctx.reverse:  # keep_j multiplies y_j on its way to y_{j-1}
                before = torch.cat([zero.unsqueeze(2).to(dx.dtype), dx[:, :, :-1]], 2)
                products = before * y
            else:
                before = torch.cat([first.unsqueeze(2).to(y.dtype), y[:, :, :-1]], 2)
                products = dx * before
            d_decay = products * log_decay.exp()
            if log_decay.shape[-1] == 1:
                d_decay = d_decay.sum(-1, keepdim=True)
        return dx, d_first.to(first.dtype), d_decay, None
